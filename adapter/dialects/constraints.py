"""Constraints of other servers, as Latimer's grammar fields."""

from __future__ import annotations

import re
from typing import Any

from ...backends.grammar.regex import literal
from ...schemas.openai.common import read_schema
from ..errors import wrong_type, wrong_value
from .fields import Draft, Field, ignored, inside, mapped, refused, same

_OBJECT = {"type": "object"}
_SPACE = "Omit it. Use a 'regex' or a 'grammar' for other whitespace."
_TAGS = "Use 'tools' or a 'grammar' instead."
_COMMENT = re.compile(r"(?m)^\s*(?://|#).*$")
_LARK_RULE = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]?[A-Za-z_]\w*(?:\.-?\d+)?\s*:(?!:))")


def schema(draft: Draft, value: Any) -> None:
    """Set `json_schema` to a schema, or to the schema that a string contains as JSON."""
    found = value
    if isinstance(value, str):
        try:
            found = read_schema(value)
        except ValueError as error:
            raise wrong_value(draft.origin, f"{error}. Send a JSON schema.") from None
    if not isinstance(found, dict):
        raise wrong_type(draft.origin, "a JSON schema, as an object or a string", found)
    draft.set("json_schema", found)


def any_object(draft: Draft, _value: Any) -> None:
    """Set `json_schema` to that of any JSON object."""
    draft.set("json_schema", _OBJECT)


def format_(draft: Draft, value: Any) -> None:
    """Set Ollama's `format`: "json", or a schema."""
    schema(draft, _OBJECT if value == "json" else value)


def choice(draft: Draft, value: Any) -> None:
    """Set `grammar` to one that allows exactly the given texts."""
    if not isinstance(value, list):
        raise wrong_type(draft.origin, "an array of strings", value)
    if not value:
        raise wrong_value(
            draft.origin,
            "empty array. Expected an array with minimum length 1, but got an empty array instead.",
            "empty_array",
        )
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise wrong_type(f"{draft.origin}[{index}]", "a string", text)
    texts = " | ".join(literal(text) for text in dict.fromkeys(value))
    draft.set("grammar", f"root ::= {texts}")


def grammar(draft: Draft, value: Any) -> None:
    """Set `grammar` or `lark`, by the syntax: EBNF with `::=` is GBNF, rules with `:` are Lark."""
    if not isinstance(value, str):
        raise wrong_type(draft.origin, "a string", value)
    rules = _COMMENT.sub("", value)
    if "%llguidance" not in rules and "::=" in rules:
        draft.set("grammar", value)
    elif _LARK_RULE.search(rules):
        draft.set("lark", value)
    else:
        reason = "it is neither GBNF ('root ::= …') nor Lark ('start: …')."
        raise wrong_value(draft.origin, reason)


_VLLM, _OLD = "vLLM", "vLLM up to 0.11"
_WORDS = ["yes", "no"]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
_GBNF = 'root ::= "yes" | "no"'

FIELDS: tuple[Field, ...] = (
    same("grammar", "llama.cpp, koboldcpp", _GBNF),
    same("json_schema", "llama.cpp", _SCHEMA),
    same("regex", "SGLang", "yes|no"),
    mapped("ebnf", "SGLang", "`grammar`", _GBNF, None, ""),
    same("response_format", "vLLM, llama.cpp", {"type": "json_object"}),
    mapped("structured_outputs", _VLLM, "the fields below", {"regex": "yes|no"}, inside, {}),
    mapped("structured_outputs.json", _VLLM, "`json_schema`", _SCHEMA, schema),
    mapped("structured_outputs.json_object", _VLLM, "`json_schema`", True, any_object, False),
    mapped("structured_outputs.regex", _VLLM, "`regex`", "yes|no"),
    mapped("structured_outputs.choice", _VLLM, "`grammar`", _WORDS, choice),
    mapped("structured_outputs.grammar", _VLLM, "`grammar`, or `lark`", _GBNF, grammar),
    refused("structured_outputs.structural_tag", _VLLM, _TAGS, "{}"),
    refused("structured_outputs.whitespace_pattern", _VLLM, _SPACE, "[ ]?"),
    refused("structured_outputs.disable_any_whitespace", _VLLM, _SPACE, True, False),
    refused("structured_outputs.disable_additional_properties", _VLLM,
            "Send 'additionalProperties': false in the schema.", True, False),
    mapped("guided_json", _OLD, "`json_schema`", _SCHEMA, schema),
    mapped("guided_json_object", _OLD, "`json_schema`", True, any_object, False),
    mapped("guided_regex", _OLD, "`regex`", "yes|no", None, ""),
    mapped("guided_choice", _OLD, "`grammar`", _WORDS, choice),
    mapped("guided_grammar", _OLD, "`grammar`, or `lark`", _GBNF, grammar, ""),
    refused("guided_whitespace_pattern", _OLD, _SPACE, "[ ]?", ""),
    refused("structural_tag", _OLD, _TAGS, "{}"),
    ignored("guided_decoding_backend", _OLD, "every backend enforces the same constraint",
            "xgrammar"),
    mapped("format", "Ollama", "`json_schema`", "json", format_, ""),
    mapped("grammar_string", "text-generation-webui", "`grammar`", _GBNF, None, ""),
    refused("grammar_lazy", "llama.cpp", "A grammar applies from the start of the answer. Omit it.",
            True, False),
    refused("grammar_triggers", "llama.cpp",
            "A grammar applies from the start of the answer. Omit it.",
            [{"type": 1, "value": "a"}], []),
    refused("grammar_retain_state", "koboldcpp",
            "Each request starts its grammar from the beginning. Omit it.", True, False),
)  # fmt: skip
