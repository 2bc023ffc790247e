"""Fields of other servers for reasoning, and for the prompt that a template makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import wrong_type, wrong_value
from .fields import Draft, Field, ignored, inside, mapped, refused, same


def thinking(draft: Draft, value: Any) -> None:
    """Switch reasoning on or off: a boolean, or Anthropic's object with a type."""
    if isinstance(value, dict):
        inside(draft, value)
    elif isinstance(value, bool):
        draft.set("enable_thinking", value)
    else:
        raise wrong_type(draft.origin, "a boolean or an object", value)


def kind(draft: Draft, value: Any) -> None:
    """Switch reasoning on or off by the type of Anthropic's `thinking`."""
    if value not in ("enabled", "disabled", "adaptive", "auto"):
        raise wrong_value(draft.origin, "expected 'enabled', 'disabled' or 'adaptive'.")
    if value in ("enabled", "disabled"):
        draft.set("enable_thinking", value == "enabled")


def think(draft: Draft, value: Any) -> None:
    """Set Ollama's `think`: a boolean, or an effort."""
    draft.set("enable_thinking" if isinstance(value, bool) else "reasoning_effort", value)


_BUDGET = "Limit all tokens with 'max_completion_tokens', or send 'reasoning_effort'."
_SHOWN = (
    "Reasoning is returned separate from the content. Omit it; --reasoning-field none omits the "
    "reasoning."
)
_MESSAGES = "Put the text into 'messages' or 'prompt'."
FILES = "Send images and audio as parts of messages."
_SPOKEN = "Responses have no audio. Send the request to chat."
_TEMPLATE = "Start the engine with another template, or send an 'adapter'."
_FITS = "a prompt is never cut: one that does not fit is a 400"
_KWARGS = "Omit it."
_NO_TEMPLATE = "completions have no template"


def _none(value: Any) -> bool:
    return bool(value == -1)


def _has_placeholder(given: Mapping[str, Any]) -> bool:
    """Return True for a request with one of koboldcpp's placeholders, such as `{{[INPUT]}}`."""
    names = ("prompt", "messages", "input", "stop", "stop_sequence")
    return any(_is_marked(given.get(name)) for name in names)


def _is_marked(value: Any) -> bool:
    """Return True if a text in a value has the beginning of a placeholder."""
    if isinstance(value, str):
        return "{{[" in value
    # The text of a whole value would take a second to make, without a turn for others.
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, list | dict) and any(map(_is_marked, parts))


FIELDS: tuple[Field, ...] = (
    same("reasoning_effort", "vLLM, llama.cpp, Ollama, OpenRouter", "low", on="chat"),
    ignored("reasoning_effort", "koboldcpp", _NO_TEMPLATE, "low", on="completions"),
    same("enable_thinking", "Qwen, SGLang", False, on="chat"),
    mapped("thinking", "DeepSeek, Anthropic", "`enable_thinking`", False, thinking, on="chat"),
    mapped("thinking.type", "DeepSeek, Anthropic", "`enable_thinking`", "disabled", kind,
           on="chat"),
    refused("thinking.budget_tokens", "Anthropic", _BUDGET, 1024, on="chat"),
    mapped("think", "Ollama", "`enable_thinking`, or `reasoning_effort`", False, think, on="chat"),
    mapped("reasoning", "OpenRouter, Ollama", "the fields below", {"effort": "low"}, inside, {},
           on="chat"),
    mapped("reasoning.effort", "OpenRouter, Ollama", "`reasoning_effort`", "low",
           on="chat"),
    mapped("reasoning.enabled", "OpenRouter", "`enable_thinking`", False, thinking, on="chat"),
    refused("reasoning.max_tokens", "OpenRouter", _BUDGET, 1024, on="chat"),
    refused("reasoning.exclude", "OpenRouter", _SHOWN, True, False, on="chat"),
    ignored("reasoning.summary", "OpenAI's Responses", "reasoning is returned unchanged", "auto",
            on="chat"),
    refused("include_reasoning", "vLLM, OpenRouter", _SHOWN, False, True),
    refused("separate_reasoning", "SGLang", _SHOWN, False, True),
    refused("reasoning_format", "llama.cpp", _SHOWN, "none", "auto", "deepseek"),
    refused("thinking_token_budget", "vLLM", _BUDGET, 100, _none),
    refused("thinking_budget", "Qwen", _BUDGET, 100, _none),
    refused("thinking_budget_tokens", "llama.cpp", _BUDGET, 100, _none),
    refused("reasoning_budget", "llama.cpp", _BUDGET, 100, _none),
    refused("reasoning_budget_tokens", "llama.cpp", _BUDGET, 100, _none),
    ignored("reasoning_budget_message", "llama.cpp", "it only has an effect with a budget",
            "Stop."),
    ignored("reasoning_budget_start_tag", "llama.cpp", "it only has an effect with a budget",
            "<think>"),
    ignored("reasoning_budget_end_tag", "llama.cpp", "it only has an effect with a budget",
            "</think>"),
    ignored("reasoning_budget_end_tags", "llama.cpp", "it only has an effect with a budget",
            ["</think>"]),
    ignored("reasoning_control", "llama.cpp", "it only enables later requests that end reasoning",
            True),
    ignored("thinking_forced_open", "llama.cpp", "open reasoning is detected in the prompt",
            True),
    same("add_generation_prompt", "vLLM, llama.cpp", False, on="chat"),
    same("continue_final_message", "vLLM, llama.cpp", True, on="chat"),
    mapped("continue_assistant_turn", "koboldcpp", "`continue_final_message`", True,
           on="chat"),
    ignored("add_generation_prompt", "vLLM", _NO_TEMPLATE, False, on="completions"),
    ignored("continue_final_message", "vLLM", _NO_TEMPLATE, True, on="completions"),
    refused("add_special_tokens", "vLLM", "A BOS is added once, if the model uses one. Omit it.",
            True, False, on="chat"),
    refused("add_special_tokens", "vLLM", "Send token ids, to which nothing is added.", False, True,
            on="completions"),
    refused("add_bos_token", "text-generation-webui",
            "Send token ids to completions, to which nothing is added.", False, True),
    same("chat_template_kwargs", "vLLM, llama.cpp", {"a": 1}, on="chat"),
    ignored("chat_template_kwargs", "vLLM", _NO_TEMPLATE, {"a": 1}, on="completions"),
    refused("chat_template", "vLLM", _TEMPLATE, "{{ messages }}", on="chat"),
    ignored("chat_template", "vLLM", _NO_TEMPLATE, "{{ messages }}", on="completions"),
    refused("instruction_template", "text-generation-webui", _TEMPLATE, "Alpaca", ""),
    refused("instruction_template_str", "text-generation-webui", _TEMPLATE, "{{ a }}", ""),
    same("adapter", "koboldcpp", {"user_start": "U:", "assistant_start": "A:"}, on="chat"),
    ignored("adapter", "koboldcpp", _NO_TEMPLATE, {"user_start": "U:"}, on="completions"),
    refused("generation_prompt", "llama.cpp", _TEMPLATE, "A:", ""),
    refused("chat_parser", "llama.cpp", "The model's template determines the parser. Omit it.",
            "{}", ""),
    ignored("chat_format", "llama.cpp", "the model's template determines the parser", 1),
    refused("parse_tool_calls", "llama.cpp", "Send 'tool_choice': 'none'.", False, True),
    refused("documents", "vLLM", _MESSAGES, [{"title": "a", "text": "b"}], []),
    refused("memory", "koboldcpp", _MESSAGES, "Be brief.", ""),
    refused("system", "Ollama", _MESSAGES, "Be brief.", ""),
    refused("system_prompt", "LM Studio", _MESSAGES, "Be brief.", ""),
    refused("template", "Ollama", "Send the whole prompt to completions.", "{{ .Prompt }}", ""),
    refused("raw", "Ollama", "Send the prompt to completions.", True, False, on="chat"),
    ignored("raw", "Ollama", _NO_TEMPLATE, True, on="completions"),
    refused("mode", "text-generation-webui", _TEMPLATE, "chat", "instruct", on="chat"),
    *(ignored(name, "text-generation-webui", "it only has an effect with `mode`", "a", on="chat")
      for name in ("character", "user_name", "user_bio", "bot_name", "name1", "name2", "greeting",
                   "chat_template_str", "chat_instruct_command")),
    refused("context", "Ollama", "Send token ids to completions.", [1, 2], []),
    refused("images", "koboldcpp, Ollama", FILES, ["aGk="], []),
    refused("audio", "koboldcpp", FILES, ["aGk="], [], on="completions"),
    refused("modalities", "OpenAI's chat", _SPOKEN, ["text", "audio"], ["text"], on="responses"),
    ignored("audio", "OpenAI's chat", "it only has an effect with `modalities`",
            {"voice": "alloy", "format": "wav"}, on="responses"),
    refused("replace_instruct_placeholders", "koboldcpp", "Send an 'adapter' to chat.", True,
            False, needs=_has_placeholder),
    refused("prompt_embeds", "vLLM", "Send a 'prompt'.", "aGk=", []),
    refused("mm_processor_kwargs", "vLLM", _KWARGS, {"a": 1}, {}),
    refused("media_io_kwargs", "vLLM", _KWARGS, {"a": {}}, {}),
    refused("truncate_prompt_tokens", "vLLM", "Send a shorter prompt.", 5, -1),
    ignored("truncation_side", "vLLM", "it only has an effect with `truncate_prompt_tokens`",
            "left"),
    ignored("truncation_length", "text-generation-webui", _FITS, 2048),
    ignored("max_context_length", "koboldcpp", _FITS, 2048),
    ignored("num_ctx", "Ollama", _FITS, 2048),
    ignored("context_length", "LM Studio", _FITS, 2048),
    ignored("truncate", "Ollama", _FITS, True),
    ignored("shift", "Ollama", _FITS, True),
    ignored("n_keep", "llama.cpp", _FITS, 5),
    ignored("n_discard", "llama.cpp", _FITS, 5),
    ignored("transforms", "OpenRouter", _FITS, ["middle-out"]),
)  # fmt: skip
