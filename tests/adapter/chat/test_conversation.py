"""Messages, tools, calls and results as published templates take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.chat.conversation import BLOCK, style_of, turns_of
from latimer.adapter.chat.reasoning import tags_of
from latimer.adapter.chat.templates import render
from latimer.backends.base import Model
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.messages import Function

TEMPLATES = sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))
ASKED = {"role": "user", "content": "Weather?"}
CALL = {
    "id": "call_abcdefghijklmnopqrstuvwx",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "21 degrees"}
WEATHER = Function(name="get_weather", description="Tells it", parameters={"type": "object"})


def model_of(template: str | None) -> Model:
    """A model with a template."""
    return Model("m", 100, template, "<s>", "</s>", False, "fp", 0)


def shown(template: str | None, *messages: dict[str, Any], tools: bool = True) -> str:
    """The prompt of some messages."""
    model = model_of(template)
    parsed = ChatRequest.model_validate({"model": "m", "messages": list(messages)}).messages
    tags = tags_of(template) if template is not None else None
    functions = [WEATHER] if tools else []
    turns, told = turns_of(model, parsed, functions, style_of(model), tags)
    return render(model, {"messages": turns, "variables": {}, "tools": told})


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_call_and_its_result_are_shown(path: Path) -> None:
    """Every published template tells of the tool, the call and its result, in this order."""
    prompt = shown(path.read_text(), ASKED, CALLED, RESULT)
    rest = prompt[prompt.index("Weather?") :]
    assert "Tells it" in prompt
    assert rest.index("get_weather") < rest.index("Paris") < rest.index("21 degrees")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_without_tools_nothing_is_told_of_them(path: Path) -> None:
    """The prompt is that of the messages alone."""
    assert "get_weather" not in shown(path.read_text(), ASKED, tools=False)


def test_a_model_without_a_template_is_told_in_words() -> None:
    """The words are what the documentation says, and results are the user's turn."""
    prompt = shown(None, ASKED, CALLED, RESULT)
    name = '"name": "get_weather"'
    told = f'{{{name}, "description": "Tells it", "parameters": {{"type": "object"}}}}'
    assert BLOCK + told in prompt
    assert f'<tool_call>{{{name}, "arguments": {{"city": "Paris"}}}}</tool_call>' in prompt
    assert "<tool_response>\n21 degrees\n</tool_response>" in prompt


def test_words_follow_what_the_system_says() -> None:
    """There is one system message, and its own text comes first."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    system = {"role": "system", "content": "Be brief."}
    prompt = shown(template, system, ASKED)
    assert prompt.startswith(f"[system]Be brief.\n\n{BLOCK}")
    assert prompt.count("[system]") == 1


def test_a_template_without_a_system_role() -> None:
    """The words stand before the first thing that the user says."""
    path = next(path for path in TEMPLATES if "gemma" in path.stem)
    prompt = shown(path.read_text(), ASKED)
    assert prompt.index(BLOCK.strip()) < prompt.index("Weather?")


def test_ids_as_long_as_a_template_wants_them() -> None:
    """Mistral's template takes nine letters: the last ones of each id."""
    path = next(path for path in TEMPLATES if "Nemo" in path.stem)
    prompt = shown(path.read_text(), ASKED, CALLED, RESULT)
    assert prompt.count("pqrstuvwx") == 2
    assert str(CALL["id"]) not in prompt


def test_results_of_several_calls_are_one_turn() -> None:
    """Templates that want users and assistant in turns get one turn for all results."""
    path = next(path for path in TEMPLATES if "gemma" in path.stem)
    calls = [{**CALL, "id": name} for name in "ab"]
    results = [{**RESULT, "tool_call_id": name, "content": f"result {name}"} for name in "ab"]
    prompt = shown(path.read_text(), ASKED, {**CALLED, "tool_calls": calls}, *results)
    assert prompt.index("result a") < prompt.index("result b")
    assert prompt.count("<start_of_turn>user") == 2


@pytest.mark.parametrize("arguments", ["Paris!", r'{"c": "\ud800"}', r'{"\udc00": 1}'])
def test_arguments_that_are_no_object_stay_as_they_were_sent(arguments: str) -> None:
    """A call that somebody else's model made is shown, whatever it is."""
    broken = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    path = next(path for path in TEMPLATES if "Qwen" in path.stem)
    prompt = shown(path.read_text(), ASKED, {**CALLED, "tool_calls": [broken]}, RESULT)
    assert arguments in prompt or json.dumps(arguments) in prompt


@pytest.mark.parametrize(
    "assistant",
    [
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
    ],
    ids=["in content", "beside it"],
)
def test_thoughts_of_the_assistant_are_split_off(assistant: dict[str, Any]) -> None:
    """A template gets them beside the content, however the client sends them back."""
    template = (
        "{# <think> #}{% for m in messages %}"
        "[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    )
    prompt = shown(template, ASKED, assistant, ASKED, tools=False)
    assert "[assistant|Hm.|Yes.]" in prompt


def test_tags_that_a_template_does_not_know_are_text() -> None:
    """Only a model's own tags are looked for."""
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assistant = {"role": "assistant", "content": "<think>Hm.</think>Yes."}
    assert "[<think>Hm.</think>Yes.]" in shown(template, ASKED, assistant, ASKED, tools=False)


@pytest.mark.parametrize(
    ("wrong", "native"),
    [
        ("{{ c.function | tojson }}", True),
        ("<calls>{{ c.function | tojson }}</calls>", False),
        ("[{{ c.function.name }}({{ c.function.arguments }})]", False),
    ],
)
def test_how_calls_are_written_is_seen_and_not_guessed(wrong: str, native: bool) -> None:
    """A template that mentions JSON and writes calls otherwise is told of tools in words."""
    template = (
        '{# "name" "arguments" #}{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]'
        "{{ m.content }}{% for c in m.tool_calls %}" + wrong + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert style_of(model_of(template)).native == native


def test_published_ways_to_call() -> None:
    """Of the published templates those whose way is known are given tools themselves."""
    found = {path.stem for path in TEMPLATES if style_of(model_of(path.read_text())).native}
    assert found == {
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Qwen-Qwen2.5-7B-Instruct",
        "ibm-granite-granite-3.3-2B-Instruct", "meta-llama-Llama-3.1-8B-Instruct",
        "mistralai-Mistral-Nemo-Instruct-2407", "openai-gpt-oss-120b",
    }  # fmt: skip
