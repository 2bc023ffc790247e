"""Validation of requests by the contract's tables."""

from __future__ import annotations

import json
import re
from typing import Any

from suite import calls, constraints


class Refused(Exception):
    """The rejection of a request by an error object."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


NUMBERS = {
    "temperature": (0, 2), "top_p": (0, 1), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}  # fmt: skip
INTEGERS = {"n": (1, 128), "best_of": (0, 20), "seed": (-(2**63), 2**63)}
CHAT_INTEGERS = {"max_tokens": (1, 2**31), "max_completion_tokens": (1, 2**31),
                 "top_logprobs": (0, 20)}  # fmt: skip
TEXT_INTEGERS = {"max_tokens": (0, 2**31), "logprobs": (0, 5)}
PARTS = {"text", "refusal", "image_url", "input_audio", "file"}
TIERS = {None, "auto", "default", "flex", "scale", "priority", "fast"}
ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body."""

    def refuse(word: str) -> None:
        raise Refused(f"{word} is no JSON.")

    try:
        value = json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused("We could not parse the JSON body of your request.") from None
    if not isinstance(value, dict):
        raise Refused("The body must be an object.")
    if any(isinstance(one, float) and one in (float("inf"), float("-inf"))
           for one in value.values()):  # fmt: skip
        raise Refused("A number is not finite.")
    return value


def check_body(path: str, body: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in a request."""
    if "model" not in body:
        raise Refused("you must provide a model parameter")
    if body["model"] != "org/toy":
        raise Refused("The model does not exist.", None, "model_not_found", 404)
    chat = path == "/chat/completions"
    _check_numbers(body, chat)
    _check_types(body, chat)
    if chat:
        _check_messages(body)
    else:
        _check_prompt(body.get("prompt"))
    _check_combinations(body, chat)


def _check_numbers(body: dict[str, Any], chat: bool) -> None:
    integers = {**INTEGERS, **(CHAT_INTEGERS if chat else TEXT_INTEGERS)}
    for name, (low, high) in {**NUMBERS, **integers}.items():
        value = body.get(name)
        if value is None:
            continue
        kinds = (int,) if name in integers else (int, float)
        if type(value) not in kinds:
            raise Refused(f"Invalid type for '{name}'.", name, "invalid_type")
        if not low <= value <= high:
            raise Refused(f"Invalid '{name}': {value} is out of range.", name, "out_of_range")


def _check_types(body: dict[str, Any], chat: bool) -> None:
    for name in ("stream", "echo", *(("logprobs",) if chat else ())):
        if body.get(name) is not None and type(body[name]) is not bool:
            raise Refused(f"Invalid type for '{name}'.", name, "invalid_type")
    stop = body.get("stop")
    if stop is not None and not isinstance(stop, str | list):
        raise Refused("Invalid type for 'stop'.", "stop", "invalid_type")
    if isinstance(stop, list) and len(stop) > 4:
        raise Refused("Invalid 'stop': array too long.", "stop", "array_above_max_length")
    for token, bias in (body.get("logit_bias") or {}).items():
        if not -100 <= bias <= 100:
            raise Refused("Invalid 'logit_bias'.", f"logit_bias.{token}", "out_of_range")


def _check_messages(body: dict[str, Any]) -> None:
    if "messages" not in body:
        missing = "missing_required_parameter"
        raise Refused("Missing required parameter: 'messages'.", "messages", missing)
    messages = body["messages"]
    if not isinstance(messages, list) or not messages:
        raise Refused("Invalid 'messages'.", "messages", "empty_array")
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise Refused("Invalid value.", f"messages[{index}].role", "invalid_value")
        if message.get("tool_calls") == []:
            raise Refused("Empty array.", f"messages[{index}].tool_calls", "empty_array")
        content = message.get("content")
        for at, part in enumerate(content if isinstance(content, list) else ()):
            if part.get("type") not in PARTS:
                raise Refused("Invalid value.", f"messages[{index}].content[{at}].type")
        if not isinstance(content, str | list) and (content or not message.get("tool_calls")):
            raise Refused("Invalid content.", f"messages[{index}].content", "invalid_type")
    _check_results(messages)


def _check_results(messages: list[Any]) -> None:
    waiting: set[str] = set()
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "tool":
            waiting.discard(message["tool_call_id"])
        elif waiting:
            raise Refused(
                "An assistant message with 'tool_calls' must be followed by tool messages.",
                "messages",
            )
        waiting |= {call["id"] for call in message.get("tool_calls") or ()}


def check_metadata(metadata: Any) -> None:
    """Raise `Refused` unless metadata is null or has at most 16 pairs of short strings."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > 16:
        raise Refused("Invalid 'metadata'.", "metadata", "invalid_type")
    for key, value in metadata.items():
        if not isinstance(value, str) or len(key) > 64 or len(value) > 512:
            raise Refused("Invalid 'metadata'.", f"metadata.{key}", "string_above_max_length")


def _check_prompt(prompt: Any) -> None:
    if prompt is None or isinstance(prompt, str):
        return
    if not isinstance(prompt, list) or not prompt:
        raise Refused("Invalid type for 'prompt'.", "prompt", "invalid_type")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1 or not kinds <= {str, int, list}:
        raise Refused("Invalid type for 'prompt'.", "prompt", "invalid_type")
    ids = prompt if kinds == {int} else [i for one in prompt if type(one) is list for i in one]
    if any(type(token) is not int or token < 0 for token in ids):
        raise Refused("Invalid 'prompt': a token id is below zero.", "prompt", "invalid_value")


def _check_combinations(body: dict[str, Any], chat: bool) -> None:
    if body.get("stream_options") is not None and not body.get("stream"):
        raise Refused("'stream_options' is only allowed in a stream.", "stream_options")
    if body.get("top_logprobs") is not None and chat and not body.get("logprobs"):
        raise Refused("'top_logprobs' needs 'logprobs'.", "top_logprobs")
    if body.get("metadata") is not None and not body.get("store"):
        raise Refused("'metadata' needs 'store'.", "metadata")
    check_metadata(body.get("metadata"))
    best_of, count = body.get("best_of"), body.get("n") or 1
    if best_of is not None and best_of < count:
        raise Refused("'best_of' must not be below 'n'.", "best_of")
    if best_of is not None and best_of > count and body.get("stream"):
        raise Refused("'best_of' above 'n' cannot be streamed.", "best_of")
    if chat and body.get("service_tier") not in TIERS:
        raise Refused("Invalid 'service_tier'.", "service_tier", "invalid_value")
    if "no_such_field" in body:
        raise Refused("Unknown parameter: 'no_such_field'.", "no_such_field", "unknown_parameter")


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
FORMS = ("text", "json_object", "json_schema", "regex", "grammar")
CHOICES = ("none", "auto", "required")


def check_forms(body: dict[str, Any]) -> None:
    """Raise `Refused` for the first error in a request."""
    _check_tools(body.get("tools"))
    _check_choice(body)
    _check_form(body.get("response_format"))


def _check_tools(tools: Any) -> None:
    if tools is None:
        return
    if len(tools) > 128:
        raise Refused("Invalid 'tools': array too long.", "tools", "array_above_max_length")
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            raise Refused("Invalid value.", f"tools[{at}].type", "invalid_value")
        function = tool.get(kind) or {}
        if not NAME.fullmatch(str(function.get("name", ""))):
            raise Refused("Invalid name.", f"tools[{at}].{kind}.name", "invalid_value")
        _check_custom(function.get("format"), at)
        parameters = function.get("parameters")
        if parameters is not None and constraints.problem(parameters):
            raise Refused("Invalid schema.", f"tools[{at}].function.parameters", "invalid_type")


def _check_custom(form: Any, at: int) -> None:
    """Raise `Refused` unless the format of a custom tool is text or a valid grammar."""
    if form is None or form.get("type") == "text":
        return
    where = f"tools[{at}].custom.format"
    if form.get("type") != "grammar":
        raise Refused("Invalid value.", f"{where}.type", "invalid_value")
    if form["grammar"].get("syntax") not in ("lark", "regex"):
        raise Refused("Invalid value.", f"{where}.grammar.syntax", "invalid_value")
    try:
        calls.input_of(form)
    except ValueError as error:
        raise Refused(f"Invalid grammar: {error}.", f"{where}.grammar.definition") from None


def _check_choice(body: dict[str, Any]) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not body.get("tools"):
        raise Refused("'tool_choice' is only allowed with 'tools'.", "tool_choice")
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise Refused("Invalid 'tool_choice'.", "tool_choice", "invalid_value")
        return
    if choice.get("type") == "allowed_tools":
        return
    names = [tool[tool["type"]]["name"] for tool in body["tools"]]
    if choice[choice["type"]]["name"] not in names:
        raise Refused("'tool_choice' names no tool.", "tool_choice", "invalid_value")


def _check_form(form: Any) -> None:
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") not in FORMS:
        raise Refused("Invalid 'response_format'.", "response_format", "invalid_value")
    if form["type"] != "json_schema" or "schema" in form:
        return
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or not NAME.fullmatch(str(inner.get("name", ""))):
        raise Refused("Invalid name.", "response_format.json_schema.name", "invalid_value")
    problem = constraints.problem(inner.get("schema", {}))
    if problem:
        raise Refused(f"Invalid schema: {problem}.", "response_format")
