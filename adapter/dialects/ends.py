"""Fields of other servers for the length, the end and the parts of a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ...schemas import limits
from ...schemas.openai.common import read_limit, whole
from ..errors import InvalidRequest, wrong_value
from .fields import Draft, Field, ignored, inside, mapped, refused, same

_QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_LITERAL = re.compile(_QUOTED, re.DOTALL)
_LITERALS = re.compile(rf"(?:{_QUOTED})(?:\s*,\s*(?:{_QUOTED}))*\s*,?", re.DOTALL)
_BEGINS = re.compile(r"""\s*\[?\s*["']""")
# A quote, or an escape sequence, which is skipped.
_BARE_QUOTE = re.compile(r'\\.|"', re.DOTALL)
# A character of a literal can have six: \u0041.
_LONGEST = 8 * limits.STOP_TEXT.maximum


def alternatives(draft: Draft, value: Any) -> None:
    """Set the log-probabilities of llama.cpp's `n_probs`."""
    if draft.where == "completions":
        draft.set("logprobs", value)
        return
    if draft.where == "chat":
        draft.set("logprobs", True)
    draft.set("top_logprobs", value)


def most_tokens(draft: Draft, value: Any) -> None:
    """Set the largest number of tokens; -1 and -2 mean no limit, which Responses has by default."""
    if draft.where != "responses" or value is None or read_limit(whole(value)) is not None:
        draft.set("max_tokens", value)


def stops(draft: Draft, value: Any) -> None:
    """Set `stop`; a string that begins with a quote or a bracket and a quote is a list.

    text-generation-webui reads its strings as a list of literals: `"a", "b"`.
    """
    if isinstance(value, str) and _BEGINS.match(value):
        inner = value.strip()
        if inner[0] == "[" and inner[-1] == "]":
            inner = inner[1:-1].strip()
        if len(inner) > _LONGEST or not _LITERALS.fullmatch(inner):
            raise _not_a_list(draft.origin)
        try:
            value = [json.loads(_in_json(text), strict=False) for text in _LITERAL.findall(inner)]
        except ValueError:
            raise _not_a_list(draft.origin) from None
    draft.set("stop", value)


def _in_json(text: str) -> str:
    """Return a string literal with double quotes."""
    if text[0] == '"':
        return text
    inner = text[1:-1].replace("\\'", "'")
    return f'"{_BARE_QUOTE.sub(_escaped, inner)}"'


def _escaped(found: re.Match[str]) -> str:
    return '\\"' if found[0] == '"' else found[0]


def _not_a_list(name: str) -> InvalidRequest:
    return wrong_value(
        name,
        'the string is not a list of strings such as \'["a", "b"]\'. Send an array of strings.',
    )


def usage(draft: Draft, value: Any) -> None:
    """Set `include_usage` in a stream; other responses always have their usage."""
    # A response of the Responses API always has its usage.
    if value is True and draft.where != "responses" and draft.body.get("stream"):
        given = draft.body.get("stream_options")
        draft.replace(
            "stream_options", {**(given if isinstance(given, dict) else {}), "include_usage": True}
        )


def _has_stop(given: Mapping[str, Any]) -> bool:
    """Return True for a request with a stop sequence."""
    names = ("stop", "stop_sequence", "stopping_strings", "custom_stopping_strings")
    return any(given.get(name) for name in names)


_WEBUI = "text-generation-webui"
_ECHO = "Send 'echo' and 'logprobs' to /v1/completions."
_IDS = "Send the reply's text to /tokenize."
_TEXT = "Send the text of the token in 'stop'."
_STOP = "Omit it. The request's 'stop' has the text to append."
_ONE = "A response has one choice. Send several requests."
_LEFT_OUT = "Control tokens are never part of a reply. Omit it."

FIELDS: tuple[Field, ...] = (
    mapped("n_cmpl", "llama.cpp", "`n`", 2),
    refused("n", "OpenAI's chat", _ONE, 2, 1, on="responses"),
    refused("n_cmpl", "llama.cpp", _ONE, 2, 1, on="responses"),
    mapped("n_predict", "llama.cpp", "`max_tokens`", 20, most_tokens),
    mapped("num_predict", "Ollama", "`max_tokens`", 20, most_tokens),
    mapped("max_new_tokens", "text-generation-webui, Transformers", "`max_tokens`", 20,
           most_tokens),
    mapped("max_length", "koboldcpp", "`max_tokens`", 20, most_tokens),
    mapped("stop_sequence", "koboldcpp", "`stop`", ["5"], None, []),
    mapped("stopping_strings", _WEBUI, "`stop`", ["5"], stops, [], "", "[]"),
    mapped("custom_stopping_strings", _WEBUI, "`stop`", ["5"], stops, [], "", "[]"),
    refused("stop_token_ids", "vLLM", _TEXT, [5], []),
    refused("include_stop_str_in_output", "vLLM", _STOP, True, False),
    refused("trim_stop", "koboldcpp", _STOP, False, True, needs=_has_stop),
    refused("bypass_eos", "koboldcpp", "Send 'ignore_eos'.", True, False),
    refused("skip_special_tokens", "vLLM", _LEFT_OUT, False, True),
    refused("render_special", "koboldcpp", _LEFT_OUT, True, False),
    refused("preserved_tokens", "llama.cpp", _LEFT_OUT, ["<a>"], []),
    ignored("spaces_between_special_tokens", "vLLM", "a reply has no control tokens", False),
    refused("singleline", "koboldcpp", "Send 'stop': '\\n'.", True, False),
    refused("frmttriminc", "koboldcpp", "Omit it.", True, False),
    refused("frmtrmblln", "koboldcpp", "Omit it.", True, False),
    refused("echo", "vLLM", "Put the last message before the reply.", True, False, on="chat"),
    same("echo", "vLLM", True, on="completions"),
    mapped("n_probs", "llama.cpp", "`logprobs`, and `top_logprobs` in chat", 3, alternatives, 0),
    refused("logprobs", "OpenAI's chat",
            "Send 'message.output_text.logprobs' in 'include'.", True, False, on="responses"),
    refused("post_sampling_probs", "llama.cpp",
            "Log-probabilities are computed before sampling. Omit it.", True, False),
    refused("prompt_logprobs", "vLLM", _ECHO, 1),
    refused("logprob_token_ids", "vLLM", "Send 'top_logprobs', or 'logprobs' in completions.", [5],
            []),
    refused("return_tokens_as_token_ids", "vLLM", _IDS, True, False),
    refused("return_token_ids", "vLLM", _IDS, True, False),
    refused("return_tokens", "llama.cpp", _IDS, True, False),
    refused("return_prompt_text", "vLLM", "Send 'echo' to /v1/completions.", True, False),
    refused("response_fields", "llama.cpp", "Send 'oai_compat': false for a native response.",
            ["content"], []),
    ignored("verbose", "llama.cpp", "it adds diagnostics to the reply", True),
    ignored("timings_per_token", "llama.cpp", "it adds diagnostics to the reply", True),
    ignored("return_progress", "llama.cpp", "it adds diagnostics to the stream", True),
    ignored("sse_ping_interval", "llama.cpp", "it only affects comments in the stream", 5),
    ignored("stream_interval", "vLLM", "it only affects the size of chunks", 2),
    ignored("max_tokens_second", _WEBUI, "it only affects the speed of the stream", 5),
    ignored("return_token_offsets", "vLLM", "it has no effect on these endpoints", True),
    ignored("return_mm_kwargs", "vLLM", "it has no effect on these endpoints", False),
    ignored("routed_experts_prompt_start", "vLLM", "it only affects diagnostics", 1),
    ignored("auto_max_new_tokens", _WEBUI, "`max_tokens` is the limit", True),
    mapped("usage", "OpenRouter", "the field below", {"include": True}, inside, {}),
    mapped("usage.include", "OpenRouter", "`stream_options.include_usage` in a stream", True, usage,
           False),
)  # fmt: skip
