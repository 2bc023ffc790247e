"""Rates of valid calls, as verifiers of model providers count them.

K2 Vendor Verifier counts the calls whose arguments are JSON, name an offered function, and match
its schema. A small model at temperature 1 writes almost random text here, so that only the
constraints make a call valid: https://github.com/MoonshotAI/K2-Vendor-Verifier.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from latimer.adapter.chat.formats import FORMATS, ToolCallFormat, format_of
from latimer.adapter.chat.formats.tag_formats import Tagged
from latimer.adapter.chat.profile import detect_style
from latimer.backends.base import Model
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.samples import FULL, sample

pytestmark = pytest.mark.slow

TEMPLATES = Path(__file__).parents[2] / "templates"
# Calls in formats without a published template among the tests, in any template.
CALLS = {
    "xml": (
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>"
    ),
    "mistral-args": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "bare": '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
}
ANY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\n{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}\nassistant\n{% endif %}"
)
UNITS = {"type": "string", "enum": ["celsius", "fahrenheit", 'a "b"\n</c>']}
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": UNITS,
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "hourly": {"type": "boolean"},
            "above": {"type": ["number", "null"]},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    "plan-trip": {
        "type": "object",
        "properties": {
            "stops": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"unit": UNITS, "at": {"const": "é中"}},
                    "required": ["unit"],
                    "additionalProperties": False,
                },
                "minItems": 1,
                "maxItems": 2,
            },
            "kind": {"anyOf": [{"const": 1}, {"const": "</parameter>"}]},
        },
        "required": ["stops"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}
NOTE = {"type": "string", "maxLength": 8}
# References, a nullable string, and a name that contains parts of tags.
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {
        'a "b">c': {"$ref": "#/$defs/unit"},
        "place": {"anyOf": [{"enum": ["x</parameter>y", "12"]}, {"type": "null"}]},
        "where": {"type": "array", "items": {"$ref": "#/properties/place"}, "maxItems": 2},
    },
    "$defs": {"unit": UNITS},
    "required": ['a "b">c', "place"],
    "additionalProperties": False,
}
# These differ from other formats in their markers only.
ALIKE = ("deepseek-v4", "kimi-k2-first")
FORMS = [form for form in FORMATS if FULL or form.title not in ALIKE]
# Requests for each format, many of which can be cut off.
MOST = 200


def template_of(form: ToolCallFormat) -> str:
    """Return a template in which the model writes calls in a format."""
    if form.title in CALLS:
        return ANY.replace("CALL", CALLS[form.title])
    published = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]
    template = next(one for one in published if format_of(one) is form)
    # A random model would not end its reasoning.
    return template.replace("think>", "mind>")


def schemas_of(form: ToolCallFormat) -> dict[str, Any]:
    """Return the schemas of the functions; text in tags has no limit that a model would reach."""
    if isinstance(form, Tagged):
        return {"find": FIND, **SCHEMAS}
    weather = SCHEMAS["get_weather"]
    return {
        **SCHEMAS,
        "get_weather": {**weather, "properties": {**weather["properties"], "note": NOTE}},
    }


class Templated(LlamaCpp):
    """The demo model with another chat template."""

    template = ""

    async def model(self) -> Model:
        """Return the model with the template."""
        return replace(await super().model(), template=self.template)


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[Templated]:
    """Return an engine whose template can be set."""
    engine = Templated(context=8192, threads=1)
    yield engine
    await engine.aclose()


def verdict(call: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return the verdict on a call: "valid", or the first thing that is wrong."""
    name = call["function"]["name"]
    if name not in schemas:
        return "unknown name"
    try:
        value = json.loads(call["function"]["arguments"])
        Draft202012Validator(schemas[name]).validate(value)
    except json.JSONDecodeError:
        return "no JSON"
    except ValidationError:
        return "no match"
    return "valid"


def requests(schemas: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield requests for any of the functions, and for each of them."""
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in schemas.items()
    ]
    named = [{"type": "function", "function": {"name": name}} for name in schemas]
    count = sample(1, 8)
    for seed, chosen in zip(range(MOST), cycle([*named, "required"]), strict=False):
        yield {
            "model": "m", "messages": [{"role": "user", "content": "Weather?"}], "tools": tools,
            "tool_choice": chosen, "parallel_tool_calls": False, "temperature": 1,
            "max_tokens": sample(350, 600), "n": count,
            # A seed makes the engine evaluate the prompt again.
            "seed": seed * count if FULL else None,
        }  # fmt: skip


@pytest.mark.timeout(sample(120, 900))
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.title)
async def test_every_call_is_valid(engine: Templated, form: ToolCallFormat) -> None:
    """Each call of a random model is JSON, names an offered function, and matches its schema."""
    engine.template = template_of(form)
    assert detect_style(await engine.model()).form is form
    schemas = schemas_of(form)
    # The last function has no arguments.
    wanted = sample(len(schemas) - 1, 200)
    found: Counter[str] = Counter()
    names: Counter[str] = Counter()
    async with adapting(engine) as client:
        for body in requests(schemas):
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            for choice in reply.json()["choices"]:
                # A call that the limit cuts off is not counted.
                if choice["finish_reason"] != "length":
                    calls = choice["message"]["tool_calls"]
                    found.update(verdict(call, schemas) for call in calls)
                    names.update(call["function"]["name"] for call in calls)
            if found.total() >= wanted and (not FULL or names.keys() >= schemas.keys()):
                break
    assert set(found) == {"valid"}, found
    assert found.total() >= wanted
