"""The limits on requests in one table, each with its reason and its option.

No limit is below the ones that OpenAI publishes. A request beyond a limit is rejected before work
on it begins, with a 400 or a 413 that names the limit. `docs/security.md` shows this table.
"""

from typing import NamedTuple


class Limit(NamedTuple):
    """An upper bound on a part of a request.

    Args:
        maximum: the largest value that is accepted.
        unit: the unit of `maximum`.
        of: the part of a request that is bounded.
        reason: the reason for the value.
        option: the command-line option that changes it, if there is one.
    """

    maximum: int
    unit: str
    of: str
    reason: str
    option: str = ""


BODY = Limit(
    32 << 20, "bytes", "a request body",
    "A body is kept in memory while its request runs; images are its largest part.", "--max-body",
)  # fmt: skip
HEAD = Limit(
    65_536,
    "bytes",
    "the request line and headers",
    "8 KiB is usual; they are buffered until they are complete.",
)
NESTING = Limit(128, "levels", "arrays and objects in a body", "Some parsers are recursive.")
VALUES = Limit(
    2_097_152, "values", "a body: elements, fields, arrays and objects",
    "Twice the limit of token ids; each value takes memory and CPU time.",
)  # fmt: skip
CONTAINERS = Limit(
    262_144,
    "arrays and objects",
    "a body",
    "Each takes about a hundred times the memory of its two characters.",
)
FIELDS = Limit(
    393_216, "fields", "all objects in a body",
    "Six for each message; a million different ones take half a second to parse.",
)  # fmt: skip
PROMPTS = Limit(2_048, "prompts", "`prompt`", "OpenAI's limit for the inputs of embeddings.")
INPUTS = Limit(2_048, "inputs", "`input`, or `documents`", "OpenAI's limit for embeddings.")
CHOICES = Limit(
    4_096, "choices", "prompts times `n` or `best_of`",
    "Choices are kept in memory until the response is complete.",
)  # fmt: skip
IDS = Limit(
    1_048_576,
    "token ids",
    "all of `prompt`, `input`, `tokens` or `reply_token_ids`",
    "More than any model's context holds.",
)
SPOKEN = Limit(4_096, "characters", "`input` and `instructions` of speech", "OpenAI's limit.")
TEXT = Limit(
    4 << 20, "characters", "the `prompt` of `/tokenize`",
    "More than almost any context length; tokenization cannot be interrupted.",
)  # fmt: skip
TOKEN_SIZE = Limit(
    1_024, "bytes", "a token, where the vocabulary is not known",
    "A text with more bytes than a context of such tokens is rejected before tokenization.",
)  # fmt: skip
MESSAGES = Limit(
    100_000,
    "messages",
    "`messages`",
    "Each has at least one token, and templates visit it several times.",
)
PARTS = Limit(65_536, "parts", "the `content` of all messages", "Each is an object in memory.")
WORD = Limit(
    1_000_000, "characters", "a word or a run of whitespace, in process",
    "llama.cpp splits words recursively: each character takes up to 400 bytes of the stack.",
)  # fmt: skip
SPELLED = Limit(
    4_096, "pieces", "control tokens as text in messages",
    "Each is a call of the tokenizer.",
)  # fmt: skip
IMAGES = Limit(
    1_500,
    "images and audio files",
    "the messages of a request",
    "OpenAI's limit; `--max-body` is usually reached first.",
)
PIXELS = Limit(
    100_000_000, "pixels", "an image", "A file of 1 MB can decompress to gigabytes in an engine."
)
ALL_PIXELS = Limit(
    500_000_000, "pixels", "all images of a request",
    "A file of 34 bytes can have 100 million. Usual images in a body have fewer together.",
)  # fmt: skip
WEBP_PIXELS = Limit(
    50_000_000, "pixels", "a WebP image",
    "Latimer converts it to PNG, which takes 16 bytes for each pixel.",
)  # fmt: skip
WEBP_SECONDS = Limit(
    20, "seconds of CPU time",
    "converting a WebP image of more than 4 million pixels, in a separate process",
    "A small file can have many pixels.",
)  # fmt: skip
WEBP_MEMORY = Limit(1_024, "MiB", "the same", "A small file can take gigabytes.")
SCANS = Limit(100, "scans", "a progressive JPEG", "Each scan visits all pixels; ten are usual.")
SOUND = Limit(
    3_600, "seconds", "an audio file", "A file of 100 bytes can declare gigabytes of samples."
)
SOUND_SECONDS = Limit(
    60, "seconds of CPU time", "decoding a recording to transcribe, in a separate process",
    "A small file can keep a decoder busy for hours.",
)  # fmt: skip
SOUND_MEMORY = Limit(1_024, "MiB", "the same", "A small file can declare large frames.")
SOUND_RATE = Limit(
    384_000, "samples a second", "a recording to transcribe, which has at least 1,000",
    "At 1 Hz, a file of 7 KB is an hour. Telephones have 8,000, and studios up to 384,000.",
)  # fmt: skip
HEARING_SECONDS = Limit(
    3_600, "seconds", "transcribing a recording with a library (`--transcription`)",
    "Others wait meanwhile. Then its process is ended, and the next recording has another one.",
)  # fmt: skip
FORM_PARTS = Limit(256, "fields", "a form", "OpenAI's have a dozen; each is an object in memory.")
FORM_TEXT = Limit(
    262_144, "bytes", "a field of a form, except a file", "More than any model reads of a prompt."
)
PDF_PAGES = Limit(
    5_000, "pages", "a PDF file in the input of a response",
    "Each page takes time; the text of more fits into no context.",
)  # fmt: skip
PDF_TEXT = Limit(
    4 << 20, "characters", "the PDF files of a request",
    "More than almost any context length; a small file can inflate to it.",
)  # fmt: skip
PDF_SECONDS = Limit(
    20, "seconds", "reading the PDF files of a request, in a separate process",
    "A small file can keep a reader busy for hours.",
)  # fmt: skip
PDF_MEMORY = Limit(512, "MiB", "the same, for each file", "A small file can take gigabytes.")
SPOKEN_SAMPLES = Limit(
    64, "MiB", "the samples of a spoken answer that is not streamed",
    "They are kept in memory until the answer is complete; it is 23 minutes at 24 kHz.",
)  # fmt: skip
TOOLS = Limit(
    512, "tools", "`tools`, or `functions`",
    "Each is a way to continue a grammar, whose number is limited, too.",
)  # fmt: skip
STOP = Limit(4_096, "characters", "a stop sequence", "Each choice keeps a table for each of them.")
STOPS = Limit(
    128, "sequences", "`stop`", "Each generated byte is compared with all that have begun."
)
STOP_TEXT = Limit(16_384, "characters", "all of `stop`", "Preparing them blocks the event loop.")
BREAKERS = Limit(
    16, "strings", "`dry_sequence_breakers`",
    "The engine compares each with every token of the vocabulary.",
)  # fmt: skip
BREAKER = Limit(40, "characters", "a string of `dry_sequence_breakers`", "llama.cpp reads no more.")
STRENGTH = Limit(
    100, "in magnitude", "`temperature`, `presence_penalty`, `frequency_penalty`",
    "Engines calculate in single precision.",
)  # fmt: skip
BIASES = Limit(65_536, "tokens", "`logit_bias`", "Each is applied to every generated token.")
GRAMMAR = Limit(
    65_536, "characters", "`grammar`, `regex`, `lark`",
    "Rules are followed recursively.",
)  # fmt: skip
SCHEMA = Limit(
    1 << 20, "characters", "a JSON schema, and the grammar of schemas or tools",
    "OpenAI's maximum of 5,000 properties needs half of it.",
)  # fmt: skip
PROPERTIES = Limit(
    5_000, "properties", "a JSON schema, in process",
    "OpenAI's limit; llguidance needs more than a second for this many. A required name without a "
    "property counts as one.",
)  # fmt: skip
SCHEMA_VISITS = Limit(
    100_000, "schemas", "a JSON schema with its references resolved",
    "Nested references can double the size at each level.",
)  # fmt: skip
COPIES = Limit(
    10_000, "schemas", "the copies of a JSON schema's definitions, in process",
    "llguidance copies what a reference next to other keywords leads to.",
)  # fmt: skip
SCHEMA_DEPTH = Limit(64, "levels", "schemas inside schemas", "OpenAI allows ten.")
ONE_OF = Limit(64, "schemas", "`oneOf`", "All pairs are compared; `anyOf` has no limit.")
KEY = Limit(
    256, "characters", "a property name in an object with additional properties",
    "Rules are nested as deeply as the name is long.",
)  # fmt: skip
REPETITIONS = Limit(
    2_000, "times", "repetitions in grammars, lengths and items in schemas",
    "llama.cpp expands each of them.",
)  # fmt: skip
GROUPS = Limit(64, "levels", "nested groups in `grammar`", "Parsers are recursive.")
ITEMS = Limit(
    100_000, "items", "a grammar with its repetitions expanded", "Each takes memory and time."
)
MULTIPLE = Limit(
    10_000, "units of its last digit",
    "`multipleOf` in process, and the common multiple of several",
    "llguidance keeps a state for each remainder.",
)  # fmt: skip
WAYS = Limit(
    2_048, "ways", "a grammar, to continue at one position",
    "llama.cpp follows each separately; 160 characters could block it forever.",
)  # fmt: skip
PATHS = Limit(
    25_000, "paths", "a grammar, through one token", "llama.cpp follows each for every token."
)
TRIAL = Limit(
    3, "seconds of CPU time", "compiling a grammar, where it is tried in a separate process",
    "Some take minutes, and llguidance cannot be interrupted.",
)  # fmt: skip
TRIAL_MEMORY = Limit(1_024, "MiB", "the same", "Some take gigabytes.")
SECONDS = Limit(
    30, "seconds", "one step of preparing a request",
    "Rendering, grammars and validation run in threads that are then stopped.",
)  # fmt: skip

LIMITS = tuple(one for one in list(globals().values()) if isinstance(one, Limit))


def table() -> str:
    """Return the limits as a table in Markdown."""
    rows = ["| what | at most | why | option |", "|---|--:|---|---|"]
    for limit in LIMITS:
        option = f"`{limit.option}`" if limit.option else ""
        rows.append(f"| {limit.of} | {limit.maximum:,} {limit.unit} | {limit.reason} | {option} |")
    return "\n".join(rows) + "\n"
