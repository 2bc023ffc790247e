"""Messages, tools, tool calls and results in the form that published templates take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter.chat.conversation import BLOCK, turns_of
from latimer.adapter.chat.profile import detect_style
from latimer.adapter.chat.reasoning import tags_of
from latimer.adapter.chat.templates import render
from latimer.backends.base import Model
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.messages import Function

from .families import FAMILIES

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
    """Return a model with a chat template."""
    return Model("m", 100, template, "<s>", "</s>", False, "fp", 0)


def published(title: str) -> str:
    """Return a published template."""
    return next(path for path in TEMPLATES if path.stem == title).read_text()


def shown(template: str | None, *messages: dict[str, Any], tools: bool = True) -> str:
    """Return the prompt of some messages."""
    model = model_of(template)
    parsed = ChatRequest.model_validate({"model": "m", "messages": list(messages)}).messages
    tags = tags_of(template) if template is not None else None
    functions = [WEATHER] if tools else []
    turns, declared = turns_of(model, parsed, functions, detect_style(model), tags)
    return render(model, {"messages": turns, "variables": {}, "tools": declared})


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_call_and_its_result_are_shown(path: Path) -> None:
    """Every published template renders the tool, the call and its result, in this order."""
    prompt = shown(path.read_text(), ASKED, CALLED, RESULT)
    rest = prompt[prompt.index("Weather?") :]
    assert "Tells it" in prompt
    assert rest.index("get_weather") < rest.index("Paris") < rest.index("21 degrees")


@pytest.mark.parametrize("title", FAMILIES)
def test_each_family_gets_its_calls_and_results_back(title: str) -> None:
    """A template of each family shows the tool, the call as the model writes it, and its result."""
    template = published(title)
    style = detect_style(model_of(template))
    assert style.native
    assert "get_weather" not in shown(template, ASKED, tools=False)
    prompt = shown(template, ASKED, CALLED, RESULT)
    rest = prompt[prompt.index("Weather?") :]
    assert "Tells it" in prompt
    called = rest.index(
        next(one for one in style.form.name_spellings("get_weather") if one in rest)
    )
    assert called < rest.index("Paris") < rest.index("21 degrees")


@pytest.mark.parametrize(
    ("title", "last", "line"),
    [
        ("Kimi-K2-Instruct", "get_weather:2", "\n"),
        ("Kimi-K2-Thinking", "get_weather:2", "\n"),
        # The first template spells the end of the line.
        ("moonshotai-Kimi-K2", "get_weather:0", "\\n"),
    ],
)
def test_ids_of_kimi_k2_name_the_function(title: str, last: str, line: str) -> None:
    """Kimi K2's templates show each call and its result with the id that the model expects.

    The results of a message can come in any order.
    """
    calls = [{**CALL, "id": name} for name in ("call_a", "call_b")]
    results = [
        {**RESULT, "tool_call_id": name, "content": name[-1]} for name in ("call_b", "call_a")
    ]
    again = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": "call_c"}]}
    prompt = shown(
        published(title), ASKED, {**CALLED, "tool_calls": calls}, *results,
        again, {**RESULT, "tool_call_id": "call_c"},
    )  # fmt: skip
    returned = [f"get_weather:{n}{line}{text}<" for n, text in enumerate("ab")]
    assert all(f"## Return of functions.{one}" in prompt for one in returned)
    assert f"## Return of functions.{last}{line}21" in prompt
    assert "call_" not in prompt.replace("tool_call_", "")


def test_results_in_the_message_of_their_calls() -> None:
    """Gemma 4's first template gets results, in the order of the calls, with the calls."""
    calls = [{**CALL, "id": name} for name in ("call_a", "call_b")]
    results = [
        {**RESULT, "tool_call_id": "call_b", "content": '{"sky": "blue"}'},
        {**RESULT, "tool_call_id": "call_a"},
    ]
    template = published("google-gemma-4-31B-it-interleaved")
    prompt = shown(template, ASKED, {**CALLED, "tool_calls": calls}, *results)
    responses = [
        '<|tool_response>response:get_weather{value:<|"|>21 degrees<|"|>}<tool_response|>',
        '<|tool_response>response:get_weather{sky:<|"|>blue<|"|>}<tool_response|>',
    ]
    assert prompt.endswith("<tool_call|>" + "".join(responses))


def test_calls_that_a_template_omits_are_content() -> None:
    """LFM2's first template shows no calls, so that they are written into the content."""
    prompt = shown(published("LFM2-8B-A1B"), ASKED, CALLED, RESULT)
    call = '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    assert "<|tool_response_start|>21 degrees" in prompt


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_without_tools_nothing_is_told_of_them(path: Path) -> None:
    """A prompt without tools mentions none of them."""
    assert "get_weather" not in shown(path.read_text(), ASKED, tools=False)


def test_a_model_without_a_template_is_told_in_words() -> None:
    """A model without a template gets the documented tool instructions as text."""
    prompt = shown(None, ASKED, CALLED, RESULT)
    name = '"name": "get_weather"'
    listed = f'{{{name}, "description": "Tells it", "parameters": {{"type": "object"}}}}'
    assert BLOCK + listed in prompt
    assert f'<tool_call>{{{name}, "arguments": {{"city": "Paris"}}}}</tool_call>' in prompt
    assert "<tool_response>\n21 degrees\n</tool_response>" in prompt


def test_words_follow_what_the_system_says() -> None:
    """The tool instructions follow the system message's own text in one system message."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    system = {"role": "system", "content": "Be brief."}
    prompt = shown(template, system, ASKED)
    assert prompt.startswith(f"[system]Be brief.\n\n{BLOCK}")
    assert prompt.count("[system]") == 1


def test_a_template_without_a_system_role() -> None:
    """A template without a system role gets the tool instructions before the first user message."""
    path = next(path for path in TEMPLATES if "gemma" in path.stem)
    prompt = shown(path.read_text(), ASKED)
    assert prompt.index(BLOCK.strip()) < prompt.index("Weather?")


def test_ids_as_long_as_a_template_wants_them() -> None:
    """Mistral's template gets ids of nine characters: the last nine of each call's id."""
    path = next(path for path in TEMPLATES if "Nemo" in path.stem)
    prompt = shown(path.read_text(), ASKED, CALLED, RESULT)
    assert prompt.count("pqrstuvwx") == 2
    assert str(CALL["id"]) not in prompt


def test_results_of_several_calls_are_one_turn() -> None:
    """A template with strictly alternating roles gets the results of several calls in one turn."""
    path = next(path for path in TEMPLATES if "gemma" in path.stem)
    calls = [{**CALL, "id": name} for name in "ab"]
    results = [{**RESULT, "tool_call_id": name, "content": f"result {name}"} for name in "ab"]
    prompt = shown(path.read_text(), ASKED, {**CALLED, "tool_calls": calls}, *results)
    assert prompt.index("result a") < prompt.index("result b")
    assert prompt.count("<start_of_turn>user") == 2


@pytest.mark.parametrize("arguments", ["Paris!", r'{"c": "\ud800"}', r'{"\udc00": 1}'])
def test_arguments_that_are_no_object_stay_as_they_were_sent(arguments: str) -> None:
    """The template gets arguments that are not a JSON object exactly as the client sent them."""
    broken = {**CALL, "function": {"name": "get_weather", "arguments": arguments}}
    path = next(path for path in TEMPLATES if "Qwen" in path.stem)
    prompt = shown(path.read_text(), ASKED, {**CALLED, "tool_calls": [broken]}, RESULT)
    assert arguments in prompt or json.dumps(arguments) in prompt


@pytest.mark.parametrize(
    "assistant",
    [
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm."},
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "", "reasoning": "Hm."},
        {
            "role": "assistant",
            "content": "Yes.",
            "reasoning_details": [
                {"type": "reasoning.text", "text": "H", "format": "unknown", "index": 0},
                {"type": "reasoning.encrypted", "data": "eA==", "index": 1},
                {"type": "reasoning.text", "text": "m.", "signature": None, "index": 2},
            ],
        },
    ],
    ids=["in content", "beside it", "reasoning", "both", "one is empty", "details"],
)
def test_thoughts_of_the_assistant_are_split_off(assistant: dict[str, Any]) -> None:
    """The template gets the reasoning apart from the content, in either form that clients send."""
    template = (
        "{# <think> #}{% for m in messages %}"
        "[{{ m.role }}|{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    )
    prompt = shown(template, ASKED, assistant, ASKED, tools=False)
    assert "[assistant|Hm.|Yes.]" in prompt


@pytest.mark.parametrize(
    "fields", [{"content": "<think>\nHm.</think>\nYes."}, {"content": "Yes.", "reasoning": "Hm."}]
)
def test_a_template_that_removes_reasoning_itself_gets_it(fields: dict[str, Any]) -> None:
    """LFM2.5's template shows the reasoning of the latest answer, and removes that before it."""
    answer = {"role": "assistant", **fields}
    prompt = shown(published("LFM2.5-Instruct"), ASKED, answer, ASKED, answer, ASKED, tools=False)
    assert prompt.count("assistant\nYes.<|im_end|>") == 1
    assert prompt.count("assistant\n<think>Hm.</think>Yes.<|im_end|>") == 1


def test_tags_that_a_template_does_not_know_are_text() -> None:
    """Only the reasoning tags that a model's template contains are parsed."""
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
    """A template that writes calls in an unknown format gets the tools as text instructions."""
    template = (
        '{# "name" "arguments" #}{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]'
        "{{ m.content }}{% for c in m.tool_calls %}" + wrong + "{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert detect_style(model_of(template)).native == native


def test_published_ways_to_call() -> None:
    """The published templates with a known tool call format get the tools themselves."""
    found = {path.stem for path in TEMPLATES if detect_style(model_of(path.read_text())).native}
    assert found == {
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "Qwen-Qwen2.5-7B-Instruct",
        "ibm-granite-granite-3.3-2B-Instruct", "meta-llama-Llama-3.1-8B-Instruct",
        "mistralai-Mistral-Nemo-Instruct-2407", "openai-gpt-oss-120b", "ibm-granite-granite-4.0",
        *FAMILIES,
    }  # fmt: skip


def test_calls_without_tools_in_the_template() -> None:
    """A template that shows calls and no tools gets the tools as its model card says."""
    template = next(path for path in TEMPLATES if "V3.1" in path.stem).read_text()
    system = {"role": "system", "content": "Be brief."}
    prompt = shown(template, system, ASKED, CALLED, RESULT)
    described = "### get_weather\nDescription: Tells it\n\nParameters: {"
    assert prompt.startswith("<s>Be brief.\n\n## Tools\nYou have access to the following tools:")
    assert prompt.index(described) < prompt.index("IMPORTANT: ALWAYS") < prompt.index("Weather?")
    assert 'get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>' in prompt
    assert shown(template, system, ASKED, tools=False).startswith("<s>Be brief.<")


def test_arguments_as_text() -> None:
    """A template that adds arguments to text gets them as the JSON that the client sent."""
    path = next(path for path in TEMPLATES if "V3.1" in path.stem)
    template = path.read_text().replace(" | tojson", "")
    assert detect_style(model_of(template)).texts
    empty = {**CALL, "id": "b", "function": {"name": "get_weather", "arguments": ""}}
    called = {**CALLED, "tool_calls": [CALL, empty]}
    prompt = shown(template, ASKED, called, RESULT, {**RESULT, "tool_call_id": "b"})
    assert '<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>' in prompt
    assert "<｜tool▁sep｜>{}<｜tool▁call▁end｜>" in prompt
