"""Translation of jobs to koboldcpp payloads, and of its stream to text and counts (sans-I/O)."""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import orjson

from ...schemas.native.koboldcpp import GeneratePayload, LastLogprobs, StreamEvent
from ..base import (
    ALWAYS_OR_NEVER,
    BREAKERS,
    MEDIA,
    Capabilities,
    Finish,
    Generation,
    MediaKind,
    Reason,
)
from ..errors import Busy, EngineError, EngineUnavailable, LatimerError, TooMany, Unsupported
from ..stops import StopMatcher, begun_before

ENGINE = "koboldcpp"
MAX_LOGIT_BIAS = 512
# The most images, and the most audio files, of a request.
MOST_MEDIA = 16

# koboldcpp's own defaults (temperature 0.7, top_p 0.9, top_k 100, trimming, placeholders …) and the
# operator's (`--gendefaults`) apply to omitted fields, so every request has neutral values.
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "typical": 1.0,
    "tfs": 1.0,
    "top_a": 0.0,
    "nsigma": 0.0,
    "rep_pen": 1.0,
    "repeat_penalty": 1.0,
    "repetition_penalty": 1.0,
    "rep_pen_range": 64,
    "rep_pen_slope": 1.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "smoothing_factor": 0.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "adaptive_target": -1.0,
    "trim_stop": False,
    "bypass_eos": False,
    "ban_eos_token": False,
    "use_default_badwordsids": False,
    "replace_instruct_placeholders": False,
    "using_openai_tools": False,
    "memory": "",
    "guidance_scale": 1.0,
    "reasoning_effort": "",
    "grammar": "",
    "grammar_retain_state": False,
    "logit_bias": {},
    "custom_token_bans": "",
    "banned_tokens": [],
    # The default order with top-a and tail-free sampling swapped, unless both are on. koboldcpp
    # batches calls (`--parallelrequests`) only with its default order, and keeps no record of
    # batched calls to check them by.
    "sampler_order": [6, 0, 3, 1, 4, 2, 5],
}
# The default order. A call with one of the two samplers is not batched.
ORDER = [6, 0, 1, 3, 4, 2, 5]

# llama.cpp's defaults of DRY, for a request that enables it. koboldcpp has no breakers by default.
DRY: dict[str, Any] = {
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": BREAKERS,
}

# koboldcpp's names of sampling extras, by their names in requests.
EXTRAS = {
    "top_k": "top_k",
    "min_p": "min_p",
    "typical_p": "typical",
    "top_n_sigma": "nsigma",
    "top_a": "top_a",
    "tfs": "tfs",
    "dynatemp_range": "dynatemp_range",
    "dynatemp_exponent": "dynatemp_exponent",
    "smoothing_factor": "smoothing_factor",
    "smoothing_curve": "smoothing_curve",
    "repeat_penalty": "rep_pen",
    "repeat_last_n": "rep_pen_range",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "dry_sequence_breakers": "dry_sequence_breakers",
    "ignore_eos": "ban_eos_token",
}

CAPABILITIES = Capabilities(
    engine=ENGINE,
    extras=frozenset(EXTRAS),
    refused={
        "min_tokens": ALWAYS_OR_NEVER,
        "frequency_penalty": "Omit it, or send presence_penalty, which is the most similar.",
        "parse_special": "It always parses control tokens. Omit it, or send true.",
        "suffix": "It does not expose the model's fill-in-the-middle tokens. Omit it.",
        "logit_bias_vocabulary": (
            "It does not expose its vocabulary. Send the model's own token ids."
        ),
    },
    # koboldcpp ignores ids that its vocabulary lacks. Its presence penalty also counts the prompt's
    # tokens. A window that is longer than the text is filled with token 0. XTC is its last sampler,
    # after the temperature. It applies top-n-sigma after the other samplers and, like the dynamic
    # temperature, to the 3,000 most likely tokens only. Mirostat begins where the last request with
    # it has ended.
    inexact=frozenset(
        {
            "logit_bias",
            "presence_penalty",
            "repeat_penalty",
            "xtc_probability",
            "top_n_sigma",
            "dynatemp_range",
            "mirostat",
        }
    ),
    late_logprobs=True,
    grammars=frozenset({"gbnf", "json_schema", "regex"}),
    plain_text=False,
    media_among_ids=False,
    marks_special=False,
    free_grammars=False,
    late_checks=True,
)


# koboldcpp's words for attached media in prompts (koboldcpp.py), and its payload fields for them.
_ATTACHED: Mapping[MediaKind, str] = {"image": "Image", "audio": "Audio"}
_FILES: Mapping[MediaKind, str] = {"image": "images", "audio": "audio"}


def longest_call(context: int) -> int:
    """Return the token limit of one call: 80 % of the context (koboldcpp.py, generate())."""
    return context - max(16, int(context * 0.2))


def to_seed(seed: int | None) -> int:
    """Return a seed in 1 … 2**31 - 1; koboldcpp replaces zero and below by the clock's second."""
    return (secrets.randbits(31) if seed is None else seed) % (2**31 - 1) + 1


def with_media(job: Generation, text: str) -> str:
    """Return a prompt's text with the words that koboldcpp's own chat uses for media.

    The words mark the place of each image or audio. The engine itself puts all media in front of
    the prompt.

    Raises:
        Unsupported: there are more media of a kind than the engine uses.
    """
    counts = dict.fromkeys(_ATTACHED, 0)
    for media in job.prompt.media:
        counts[media.kind] += 1
        if counts[media.kind] > MOST_MEDIA:
            hint = f"It uses the last {MOST_MEDIA} images, and as many audio files. Send fewer."
            raise Unsupported(media.param, ENGINE, hint)
        words = f"\n(Attached {_ATTACHED[media.kind]} {counts[media.kind]})\n"
        text = text.replace(MEDIA, words, 1)
    return text


def to_native(
    job: Generation, choice: int, prompt: str, max_length: int, context: int, genkey: str
) -> GeneratePayload:
    """Return the payload of one call; a choice without a seed gets a new one for each call."""
    sampling = job.sampling
    payload: dict[str, Any] = {
        "prompt": prompt,
        "max_length": max_length,
        "max_context_length": context,
        "genkey": genkey,
        "sampler_seed": to_seed(job.seeds[choice]),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "stop_sequence": list(job.stops.for_engine),
        **NEUTRAL,
        "render_special": bool(job.preserved_tokens),
        **{EXTRAS[name]: value for name, value in sampling.extras_within(context).items()},
    }
    if sampling.presence_penalty and "repeat_last_n" not in sampling.extras:
        payload["rep_pen_range"] = context
    if payload["rep_pen_range"] == 0:
        # koboldcpp looks back one token at least.
        payload["rep_pen"] = 1.0
    # koboldcpp takes the largest of its three spellings.
    payload["repeat_penalty"] = payload["repetition_penalty"] = payload["rep_pen"]
    if payload["top_a"] and payload["tfs"] < 1:
        payload["sampler_order"] = ORDER
    if payload["smoothing_factor"]:
        payload.setdefault("smoothing_curve", 1.0)
    if payload["dry_multiplier"]:
        payload = {**DRY, **payload}
    for media in job.prompt.media:
        payload.setdefault(_FILES[media.kind], []).append(b64encode(media.data).decode())
    if job.grammar is not None:
        payload["grammar"] = job.grammar.text
        # Only an end token may follow the end of a grammar.
        payload["ban_eos_token"] = False
    if sampling.logit_bias:
        if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
            raise TooMany("logit_bias", ENGINE, MAX_LOGIT_BIAS, len(sampling.logit_bias))
        payload["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return payload  # type: ignore[return-value]


# koboldcpp's error beyond `--ratelimit`, with the seconds until its end.
_RATE_LIMIT = re.compile(r"too quickly\. Please try again in (\d{1,9}) seconds")


def to_error(status: int, body: bytes) -> LatimerError:
    """Return the error for a failed response."""
    text = body[:200].decode(errors="replace")
    if status == 503:
        limited = _RATE_LIMIT.search(text)
        if limited is not None:
            seconds = int(limited[1]) + 1
            return Busy(
                f"{ENGINE} runs with --ratelimit, and accepts its next request in {seconds} s. "
                "Send the request again then, or start it without that option.",
                seconds,
            )
        return Busy(f"{ENGINE} is busy with requests from other clients.", 1.0)
    if status == 401:
        return EngineUnavailable(
            f"{ENGINE} requires its --password, and got no key or another one. Set it with "
            "--engine-key, or as engine_key in the engine's table."
        )
    return EngineError(f"{ENGINE} responded with status {status}: {text}")


FinishReason = Literal["stop", "length"]


def read_reason(reason: Any, data: bytes) -> FinishReason:
    """Return the finish reason of an event or a response.

    Raises:
        EngineError: the engine reports a failure, or an unknown reason.
    """
    if reason == "error":
        raise EngineError(f"{ENGINE} failed while generating.")
    if reason == "stop" or reason == "length":
        return reason  # type: ignore[no-any-return]
    raise EngineError(f"{ENGINE} sent an invalid event: {data[:200]!r}")


class ChoiceStream:
    """The text of one choice, streamed over one or more calls.

    koboldcpp's stream has text only, and its finish reason for a stop sequence is `length`. So stop
    sequences are matched here. Tokens are counted from `/api/extra/last_logprobs` after each call.

    Args:
        end: the spelling of the model's end token.
    """

    def __init__(self, job: Generation, choice: int, prompt_tokens: int, end: str = "") -> None:
        self.choice = choice
        # If control tokens are part of the text, so is the end token.
        self._ends = StopMatcher((end,)) if job.preserved_tokens and end else None
        self.prompt_tokens = prompt_tokens
        self._matcher = StopMatcher(job.stops.for_engine)
        self._cuts = job.stops.ends
        self._released = 0
        self._call_start = 0
        self._tokens = 0
        self.text = b""

    @property
    def stopped(self) -> bool:
        """True if a stop sequence has matched, here or in the reader."""
        return self._matcher.stop is not None or self.choice in self._cuts

    @property
    def tokens(self) -> int:
        """The number of tokens of the calls that have ended, without an end token."""
        return self._tokens

    @property
    def unended(self) -> int:
        """The number of bytes of the call that has not ended."""
        return len(self.text) - self._call_start

    def parse(self, data: bytes) -> StreamEvent:
        """Read an event.

        Raises:
            EngineError: the engine reports a failure, or the event is malformed.
        """
        try:
            event: StreamEvent = orjson.loads(data)
            reason = event["finish_reason"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise EngineError(f"{ENGINE} sent an invalid event: {data[:200]!r}") from None
        if reason is not None:
            read_reason(reason, data)
        return event

    def feed(self, text: str) -> bytes:
        """Add text of the stream; return its bytes, including stop sequences."""
        data = text.encode()
        return self._take(data if self._ends is None else self._ends.feed(data))

    def rest(self) -> bytes:
        """Return the bytes held back as a possible end token, after the end of a call."""
        return b"" if self._ends is None else self._take(self._ends.flush())

    def _take(self, data: bytes) -> bytes:
        self.text += data
        self._released += len(self._matcher.feed(data))
        return data

    def end_call(self, last: LastLogprobs | None, counted: int, ended: bool) -> None:
        """Add the token count of a call that has ended.

        Args:
            last: the call's tokens; None if the engine does not report them.
            counted: the number of tokens of the call's text by the engine's tokenizer, for a `last`
                of None.
            ended: True if an end token closed the call.
        """
        text = self.text[self._call_start :]
        if last is None:
            self._tokens += counted
        else:
            tokens = last["tokens"][:-1] if ended else last["tokens"]
            end = self._cuts.get(self.choice, self._released) - self._call_start
            self._tokens += tokens_before(tokens, text, end) if self.stopped else len(tokens)
        self._call_start = len(self.text)

    def finish(self, ended: bool) -> Finish:
        """Return the last event of the choice."""
        reason: Reason = "end" if ended else "length"
        if self.stopped:
            reason = "stop"
        return Finish(self.choice, reason, self._matcher.stop, self.prompt_tokens, self._tokens)


def tokens_before(tokens: Sequence[str], text: bytes, end: int) -> int:
    """Return how many tokens begin before byte `end` of the text."""
    return begun_before(end, _starts(tokens, text))


def _starts(tokens: Sequence[str], text: bytes) -> Iterator[int]:
    """Yield the position in the text at which each token begins.

    Tokens inside a character were decoded to less than their bytes. A run of them fills the text up
    to the next whole token that is found, in equal shares.
    """
    position = pending = 0
    for token in tokens:
        data = token.encode()
        found = text.find(data, position) if data else -1
        if found < 0 or (found > position and not pending):
            pending += 1
            continue
        yield from (position + i * (found - position) // pending for i in range(pending))
        yield found
        position, pending = found + len(data), 0
    yield from (position + i * (len(text) - position) // pending for i in range(pending))
