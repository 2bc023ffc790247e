"""The limits on requests in one table, each with its reason and its option.

No limit is below the ones that OpenAI publishes. A request beyond a limit is rejected before work
on it begins, with a 400 or a 413 that names the limit. `docs/security.md` shows this table.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    """An upper bound on a part of a request.

    Args:
        most: the largest value that is accepted.
        unit: the unit of `most`.
        of: the part of a request that is bounded.
        reason: the reason for the value.
        option: the command-line option that changes it, if there is one.
    """

    most: int
    unit: str
    of: str
    reason: str
    option: str = ""


BODY = Limit(
    32 << 20, "bytes", "a request's body",
    "A body is kept in memory while its request runs; images are most of it.", "--max-body",
)  # fmt: skip
HEAD = Limit(
    65_536,
    "bytes",
    "a request's line and headers",
    "8 KiB are usual; it is kept until its end.",
)
NESTING = Limit(
    128, "levels", "arrays and objects in a body", "Deep values are read by recursion in places."
)
VALUES = Limit(
    2_097_152, "values", "a body: elements, fields, arrays and objects",
    "Twice the token ids that are taken; each is an object in memory that takes its time.",
)  # fmt: skip
CONTAINERS = Limit(
    262_144, "arrays and objects", "a body", "Each takes about a hundred times its two characters."
)
PROMPTS = Limit(2_048, "prompts", "`prompt`", "As many inputs as OpenAI's embeddings take.")
CHOICES = Limit(
    4_096, "choices", "prompts times `n` or `best_of`",
    "Each choice is kept until the reply is complete; they are worked off in turn.",
)  # fmt: skip
IDS = Limit(
    1_048_576, "token ids", "all of `prompt`, or `tokens`", "More than any model's context holds."
)
TEXT = Limit(
    4 << 20, "characters", "the `prompt` of `/tokenize`",
    "More than nearly any context holds; a tokeniser cannot be stopped in the middle.",
)  # fmt: skip
TOKEN_SIZE = Limit(
    1_024, "bytes", "a token, where the vocabulary is not known",
    "A text with more bytes than a context of such tokens is refused unread.",
)  # fmt: skip
MESSAGES = Limit(
    65_536,
    "messages",
    "`messages`",
    "Each is a token at least; templates visit it several times.",
)
PARTS = Limit(65_536, "parts", "the `content` of all messages", "Each is an object of its own.")
WORD = Limit(
    1_000_000, "characters", "a word, or a run of blanks, in process",
    "llama.cpp cuts words by recursion: each character takes up to 400 bytes of the stack.",
)  # fmt: skip
SPELLED = Limit(
    4_096, "pieces", "control tokens that messages spell",
    "Each is a question to the tokeniser.",
)  # fmt: skip
IMAGES = Limit(
    1_500,
    "images and sounds",
    "a request's messages",
    "OpenAI's limit; `--max-body` is nearer.",
)
PIXELS = Limit(
    100_000_000, "pixels", "an image", "A file of 1 MB can unfold to gigabytes in an engine."
)
SCANS = Limit(100, "scans", "a progressive JPEG", "Each visits all pixels; ten are usual.")
SOUND = Limit(
    3_600, "seconds", "a sound", "A file of 100 bytes can say that it unfolds to gigabytes."
)
STOP = Limit(4_096, "characters", "a stop sequence", "Each choice keeps a table of each of them.")
BREAKERS = Limit(
    16, "strings", "`dry_sequence_breakers`",
    "An engine compares each with every token of the vocabulary.",
)  # fmt: skip
BREAKER = Limit(40, "characters", "a string of `dry_sequence_breakers`", "llama.cpp reads no more.")
BIASES = Limit(65_536, "tokens", "`logit_bias`", "Each is applied to each token that is generated.")
GRAMMAR = Limit(
    65_536, "characters", "`grammar`, `regex`, `lark`",
    "A chain of rules is followed on the stack, as deep as it is long.",
)  # fmt: skip
SCHEMA = Limit(
    1 << 20, "characters", "a JSON schema, and the grammar made of schemas or tools",
    "Five thousand properties, as OpenAI takes, come to half of it.",
)  # fmt: skip
PROPERTIES = Limit(
    5_000, "properties", "a JSON schema, in process",
    "As many as OpenAI takes; llguidance needs more than a second for so many.",
)  # fmt: skip
SCHEMA_VISITS = Limit(
    100_000, "schemas", "a JSON schema with its references written out",
    "References to references double at each step.",
)  # fmt: skip
SCHEMA_DEPTH = Limit(64, "levels", "schemas inside schemas", "OpenAI takes ten.")
ONE_OF = Limit(64, "schemas", "`oneOf`", "Every two of them are compared; `anyOf` has no limit.")
KEY = Limit(
    256, "characters", "a property's name beside which other names are allowed",
    "A rule goes as deep as the name is long.",
)  # fmt: skip
REPETITIONS = Limit(
    2_000, "times", "repetitions in grammars, lengths and items in schemas",
    "llama.cpp writes each of them out.",
)  # fmt: skip
GROUPS = Limit(64, "levels", "brackets inside brackets in `grammar`", "Readers recurse.")
ITEMS = Limit(
    100_000, "items", "a grammar with its repetitions written out", "Each takes memory and time."
)
MULTIPLE = Limit(
    10_000, "units of its last digit", "`multipleOf` in process, and what several have in common",
    "llguidance keeps a state for each remainder.",
)  # fmt: skip
WAYS = Limit(
    2_048, "ways", "a grammar, to go on at one place",
    "llama.cpp follows each by itself; 160 characters could stop it for ever.",
)  # fmt: skip
PATHS = Limit(
    25_000, "paths", "a grammar, through one token", "Each is followed for each token, in C++."
)
TRIAL = Limit(
    3, "seconds of CPU time", "compiling a grammar, where that is tried in a process of its own",
    "Some take minutes, and llguidance cannot be stopped.",
)  # fmt: skip
TRIAL_MEMORY = Limit(1_024, "MiB", "the same", "Some take gigabytes.")
SECONDS = Limit(
    30, "seconds", "one step of preparing a request",
    "Rendering, grammars and validation run in threads that are stopped then.",
)  # fmt: skip

LIMITS: tuple[Limit, ...] = (
    BODY, HEAD, NESTING, VALUES, CONTAINERS, PROMPTS, CHOICES, IDS, TEXT, TOKEN_SIZE, MESSAGES,
    PARTS, WORD, SPELLED, IMAGES, PIXELS, SCANS, SOUND, STOP, BREAKERS, BREAKER, BIASES, GRAMMAR,
    SCHEMA, PROPERTIES, SCHEMA_VISITS, SCHEMA_DEPTH, ONE_OF, KEY, REPETITIONS, GROUPS, ITEMS,
    MULTIPLE, WAYS, PATHS, TRIAL, TRIAL_MEMORY, SECONDS,
)  # fmt: skip


def table() -> str:
    """Return the limits as a table in Markdown."""
    rows = ["| what | at most | why | option |", "|---|--:|---|---|"]
    for limit in LIMITS:
        option = f"`{limit.option}`" if limit.option else ""
        rows.append(f"| {limit.of} | {limit.most:,} {limit.unit} | {limit.reason} | {option} |")
    return "\n".join(rows) + "\n"
