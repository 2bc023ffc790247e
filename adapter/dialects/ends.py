"""Fields of other servers for the length, the end and the parts of a reply."""

from __future__ import annotations

from typing import Any

from .fields import Draft, Field, ignored, inside, mapped, refused, same


def alternatives(draft: Draft, value: Any) -> None:
    """Set the log-probabilities of llama.cpp's `n_probs`."""
    if draft.where == "chat":
        draft.set("logprobs", True)
        draft.set("top_logprobs", value)
    else:
        draft.set("logprobs", value)


def usage(draft: Draft, value: Any) -> None:
    """Set `include_usage` in a stream; other responses always have their usage."""
    if value is True and draft.body.get("stream"):
        given = draft.body.get("stream_options")
        draft.replace(
            "stream_options", {**(given if isinstance(given, dict) else {}), "include_usage": True}
        )


_WEBUI = "text-generation-webui"
_ECHO = "Send 'echo' and 'logprobs' to /v1/completions."
_IDS = "Send the reply's text to /tokenize."
_TEXT = "Send the text of the token in 'stop'."
_STOP = "Omit it. The request's 'stop' has the text to append."
_LEFT_OUT = "Control tokens are never part of a reply. Omit it."

FIELDS: tuple[Field, ...] = (
    mapped("n_predict", "llama.cpp", "`max_tokens`", 5),
    mapped("num_predict", "Ollama", "`max_tokens`", 5),
    mapped("max_new_tokens", "text-generation-webui, Transformers", "`max_tokens`", 5),
    mapped("max_length", "koboldcpp", "`max_tokens`", 5),
    mapped("stop_sequence", "koboldcpp", "`stop`", ["5"], None, []),
    mapped("stopping_strings", _WEBUI, "`stop`", ["5"], None, []),
    mapped("custom_stopping_strings", _WEBUI, "`stop`", ["5"], None, []),
    refused("stop_token_ids", "vLLM", _TEXT, [5], []),
    refused("include_stop_str_in_output", "vLLM", _STOP, True, False),
    refused("trim_stop", "koboldcpp", _STOP, False, True),
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
