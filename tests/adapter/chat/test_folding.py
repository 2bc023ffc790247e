"""Messages in orders that chat templates reject or omit."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.adapter.chat.conversation import Style, turns_of
from latimer.adapter.chat.folding import ANY, STRICTEST, MessageRules, fold
from latimer.adapter.chat.formats import FORMATS
from latimer.adapter.chat.profile import FUNCTION, TemplateProfile, detect_profile
from latimer.adapter.chat.templates import TemplateError, render
from latimer.adapter.chat.tools import check_calls
from latimer.backends.base import Model
from latimer.schemas.openai.chat import ChatRequest
from support.strict_templates import STRICT

PUBLISHED = {
    path.stem: path.read_text()
    for path in sorted((Path(__file__).parents[2] / "templates").glob("*.jinja"))
}
TEMPLATES = {**PUBLISHED, **STRICT}
MANNERS: dict[str, TemplateProfile] = {}
# Letters as in `profile._SAMPLES`, with "Q" for parallel calls with content.
UNUSUAL = (
    "S", "SS", "SA", "A", "AU", "SAU", "SSU", "SDU", "UU", "UAAU", "UAUU", "USU", "SUS", "SUASU",
    "SUAUS", "SUCRU", "SUCRS", "SUCRSA", "SUACRAU", "SUCRASUAU", "UPRR", "SUPRRSU", "UPRRAPRRU",
    "DUDSUA", "UMR", "SUMRAU", "SUTRAU", "CRU", "UCRSCRSAU", "UBR", "BRU", "SUBRAU", "UABRBRAU",
    "UQRRAU", "UTRTRATRAU",
)  # fmt: skip
# Calls with content.
SAYING = "BQT"


def model_of(name: str) -> Model:
    """Return a model with one of the templates."""
    return Model(name, 100, TEMPLATES[name], "<s>", "</s>", False, "fp", 0)


def manner(name: str) -> TemplateProfile:
    """Return the conventions of one of the templates."""
    if name not in MANNERS:
        MANNERS[name] = detect_profile(model_of(name))
    return MANNERS[name]


def conversation(letters: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation, as a client sends them."""
    messages: list[dict[str, Any]] = []
    waiting: list[str] = []
    roles = {"S": "system", "D": "developer", "U": "user", "A": "assistant"}
    for index, letter in enumerate(letters):
        text = f"text-{index}."
        if letter in roles:
            messages.append({"role": roles[letter], "content": text})
        elif letter == "R":
            messages.append({"role": "tool", "tool_call_id": waiting.pop(0), "content": text})
        else:
            waiting = [f"call_{index:08}{place}" for place in range(1 + (letter in "PQ"))]
            arguments = text if letter == "M" else f'{{"key": "{text}"}}'
            function = {"name": f"name_{index}", "arguments": arguments}
            calls = [{"id": one, "type": "function", "function": function} for one in waiting]
            message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": calls}
            if letter in SAYING:
                message["content"] = f"said-{index}."
            if letter == "T":
                message["reasoning_content"] = "Thought."
            messages.append(message)
    return messages


def texts_of(letters: str) -> list[str]:
    """Return the texts of a conversation's messages in their order."""
    return [
        text
        for index, letter in enumerate(letters)
        for text in ([f"said-{index}."] if letter in SAYING else []) + [f"text-{index}."]
    ]


def turns(name: str, letters: str, tools: bool = True) -> tuple[Any, Any, Any]:
    """Return a conversation's messages for a template, those folded, and the tools."""
    body = {"model": "m", "messages": conversation(letters)}
    parsed = ChatRequest.model_validate(body).messages
    known = manner(name)
    functions = [FUNCTION] if tools else []
    made, listed = turns_of(model_of(name), parsed, functions, known.style, known.tags)
    order = known.order_with_tools if tools else known.order
    return made, fold(made, order, known.style.null), listed


def shown(name: str, letters: str, tools: bool = True) -> str:
    """Return the prompt of a conversation."""
    _, messages, listed = turns(name, letters, tools)
    return render(model_of(name), {"messages": messages, "variables": {}, "tools": listed})


@pytest.mark.parametrize("tools", [True, False], ids=["tools", "no tools"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_shows_every_message(name: str, tools: bool) -> None:
    """Every template renders the orders that OpenAI accepts, with the text of each message."""
    for letters in UNUSUAL:
        prompt = shown(name, letters, tools)
        assert [text for text in texts_of(letters) if text not in prompt] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_usual_conversations_are_not_folded(name: str) -> None:
    """A conversation in the template's own order is not changed."""
    for letters in ("U", "UAU", "UAUAU", "UCR", "UCRCR", "UCRAUA"):
        made, messages, _ = turns(name, letters)
        assert messages is made


PARTS = ["S", "D", "U", "A", "CR", "PRR", "QRR", "ACR", "BR", "ABR", "TR", "MR"]
LETTERS = st.lists(st.sampled_from(PARTS), max_size=9)


@pytest.mark.parametrize("name", TEMPLATES)
@given(letters=LETTERS.filter(bool).map("".join), tools=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_text_is_lost_in_any_conversation(name: str, letters: str, tools: bool) -> None:
    """Each text, function and argument is in the prompt, in order unless messages are folded."""
    made, messages, _ = turns(name, letters, tools)
    prompt = shown(name, letters, tools)
    places = [prompt.find(text) for text in texts_of(letters)]
    assert -1 not in places
    calls = [index for index, letter in enumerate(letters) if letter in "CPQBTM"]
    assert all(f"name_{index}" in prompt for index in calls)
    if messages is made:
        head = len(letters) - len(letters.lstrip("SD"))
        assert places[head:] == sorted(places[head:])


@given(letters=LETTERS.filter(bool).map("".join))
@settings(max_examples=60, deadline=None)
def test_calls_and_texts_are_inside_turns(letters: str) -> None:
    """Gemma 4's template begins no turn after text of the model, so nothing is put there."""
    prompt = shown("google-gemma-4-31B-it", letters)
    is_open = False
    for marker in re.findall(r"<\|turn>|<turn\|>|<\|tool_call>", prompt):
        assert is_open or marker == "<|turn>", prompt
        is_open = marker != "<turn|>"


def test_steps_with_content_stay_in_one_turn() -> None:
    """Content with calls adds no user turn in Gemma 4's template, so all reasoning is kept."""
    name, prompts = "google-gemma-4-31B-it", []
    for steps in range(1, 4):
        prompts.append(shown(name, "U" + "TR" * steps))
        assert prompts[-1].count("Thought.") == steps
        assert prompts[-1].count("<|turn>user") == 1
        assert all(prompts[-1].startswith(before) for before in prompts)


@pytest.mark.parametrize(
    ("name", "letters", "tools"),
    [
        (name, letters, tools)
        for name in TEMPLATES
        for letters in ("UBR", "UTR", "UBRAU")
        for tools in (True, False)
    ],
)
def test_content_is_folded_only_if_it_would_be_lost(name: str, letters: str, tools: bool) -> None:
    """Content with a call is folded only if the template omits, rejects or moves it."""
    made, messages, listed = turns(name, letters, tools)
    try:
        given = {"messages": made, "variables": {}, "tools": listed}
        prompt = render(model_of(name), given)  # type: ignore[arg-type]
        places = [prompt.find(text) for text in texts_of(letters)]
        # Gemma 4's template writes the content after the result.
        is_shown = -1 not in places and places == sorted(places)
    except TemplateError:
        is_shown = False
    assert (messages is made) == is_shown


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "letters", ["SUASUAU", "SUCRSCRAU", "SUPRRASUAUSU", "UUAAUSUAU", "SUBRBRAUBRAU"]
)
def test_the_prompt_of_a_conversation_begins_that_of_its_continuation(
    name: str, letters: str
) -> None:
    """Folding keeps the cached prefix: each prompt begins with the one before it."""
    if not grows(name, "SUAUAU"):
        pytest.skip("The template changes earlier messages of any conversation.")
    order = manner(name).order
    if "B" in letters and order.text_and_call and not order.text_and_earlier_call:
        pytest.skip("The template changes earlier content once an answer follows.")
    assert grows(name, letters)


def grows(name: str, letters: str) -> bool:
    """Return True if the prompt of each turn of the assistant begins the next one's prompt."""
    ends = [
        i for i in range(1, len(letters)) if letters[i] in "ABCPT" and letters[i - 1] not in "A"
    ]
    prompts = [begun(name, letters[:end]) for end in ends]
    return all(after.startswith(before) for before, after in itertools.pairwise(prompts))


def begun(name: str, letters: str) -> str:
    """Return a prompt without the beginning of the assistant's next turn."""
    _, messages, _ = turns(name, letters, tools=False)
    here = "\U0010f123"
    last = {**messages[-1], "content": f"{messages[-1]['content']}{here}"}
    prompt = render(model_of(name), {"messages": [*messages[:-1], last], "variables": {}})
    return prompt.partition(here)[0]


ORDERS = st.builds(MessageRules, **{name: st.booleans() for name in MessageRules._fields}).map(
    lambda order: order._replace(kept=True)
)


def pure(letters: str) -> list[dict[str, Any]]:
    """Return the messages of a conversation, as `fold` gets them."""
    return [{**one, "content": one["content"] or ""} for one in conversation(letters)]


@given(letters=LETTERS.map("".join), order=ORDERS)
@settings(max_examples=150)
def test_nothing_is_lost_and_calls_stay_whole(letters: str, order: MessageRules) -> None:
    """Folding keeps each text once, in its order, and each result directly after its call."""
    made = pure(letters)
    found = fold(made, order)
    said = "\n".join(str(turn) for turn in found)
    places = [said.find(text) for text in texts_of(letters)]
    if order.parallel:
        assert places == sorted(places)
    assert -1 not in places
    ids: list[str] = []
    for turn in found:
        if turn["role"] == "tool":
            ids.remove(turn["tool_call_id"])
        else:
            assert not ids
            ids = [call["id"] for call in turn.get("tool_calls", ())]


@given(letters=LETTERS.map("".join), more=LETTERS.map("".join), order=ORDERS)
@settings(max_examples=150)
def test_folded_messages_are_a_prefix(letters: str, more: str, order: MessageRules) -> None:
    """A conversation's folded messages begin those of its continuation by the assistant."""
    if not order.alone and "U" not in letters:
        order = order._replace(alone=True)
    order = order._replace(text_and_earlier_call=True)
    before = fold(pure(letters), order)
    after = fold(pure(f"{letters}CR{more}"), order)
    if letters and letters[-1] != "A":
        assert list(after[: len(before)]) == list(before)


def test_a_later_system_message_never_moves_to_the_head() -> None:
    """A later system message becomes part of the user message after it, with its role."""
    made = pure("SUASU")
    found = fold(made, STRICTEST._replace(system=True, kept=True))
    assert [(turn["role"], turn["content"]) for turn in found] == [
        ("system", "text-0."), ("user", "text-1."), ("assistant", "text-2."),
        ("user", "System: text-3.\n\ntext-4."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("letters", "order", "expected"),
    [
        ("SDU", MessageRules(systems=False), ["system:text-0.\n\ntext-1.", "user:text-2."]),
        ("UU", MessageRules(users=False), ["user:text-0.\n\ntext-1."]),
        ("UAA", MessageRules(assistants=False), ["user:text-0.", "assistant:text-1.\n\ntext-2."]),
        ("SU", MessageRules(system=False), ["user:System: text-0.\n\ntext-1."]),
        (
            "UDA",
            MessageRules(later=False),
            ["user:text-0.", "user:Developer: text-1.", "assistant:text-2."],
        ),
        (
            "UAS",
            MessageRules(later=False),
            ["user:text-0.", "assistant:text-1.", "user:System: text-2."],
        ),
        ("AU", MessageRules(begins=False), ["user:", "assistant:text-0.", "user:text-1."]),
        ("S", MessageRules(alone=False), ["system:text-0.", "user:"]),
        (
            "UBR",
            MessageRules(text_and_call=False),
            ["user:text-0.", "assistant:said-1.", "assistant:", "tool:text-2."],
        ),
        (
            "UBRABR",
            MessageRules(text_and_earlier_call=False),
            [
                "user:text-0.",
                "assistant:said-1.",
                "assistant:",
                "tool:text-2.",
                "assistant:text-3.",
                "assistant:said-4.",
                "tool:text-5.",
            ],
        ),
        (
            "UACR",
            MessageRules(text_and_call=False, calls_after_text=False, model=False),
            ["user:text-0.", "assistant:text-1.", "user:", "assistant:", "tool:text-3."],
        ),
        (
            "UBRABR",
            MessageRules(text_and_call=False, assistants=False, calls_after_text=False),
            [
                "user:text-0.",
                "model:said-1.",
                "assistant:",
                "tool:text-2.",
                "model:text-3.\n\nsaid-4.",
                "assistant:",
                "tool:text-5.",
            ],
        ),
    ],
)
def test_each_step(letters: str, order: MessageRules, expected: Sequence[str]) -> None:
    """Each restriction of a template causes the documented change, and no other."""
    found = fold(pure(letters), order)
    assert [f"{turn['role']}:{turn['content']}" for turn in found] == expected


def test_a_template_without_restrictions() -> None:
    """Without restrictions, the messages are the same object."""
    made = pure("SUSSAAUU")
    assert fold(made, ANY) is made


@pytest.mark.parametrize("letters", ["U", "S", "SU", "PRR", "A", "AS"])
def test_the_time_grows_with_the_messages(letters: str) -> None:
    """Ten thousand messages are folded within a second, in any order."""
    made = [{**turn, "content": "x" * 1_000} for turn in pure(letters) * (10_000 // len(letters))]
    begun = time.process_time()
    fold(made, STRICTEST)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("repeats", [False, True])
def test_the_time_grows_with_the_results_of_a_message(repeats: bool) -> None:
    """Ten thousand results are prepared within two seconds, whichever calls they are for."""
    ids = ["a"] if repeats else [f"{number:05}" for number in range(10_000)]
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    results = [
        {"role": "tool", "tool_call_id": one, "content": one}
        for one in (ids * 10_000 if repeats else reversed(ids))
    ]
    caller = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [{"role": "user", "content": "x"}, caller, *results]
    parsed = ChatRequest.model_validate({"model": "m", "messages": messages}).messages
    model = Model("m", 100, None, "", "", False, "fp", 0)
    begun = time.process_time()
    check_calls(parsed)
    for form in FORMATS[0], next(one for one in FORMATS if one.in_order):
        turns, _ = turns_of(model, parsed, (), Style(form, True, True, results="tool"), None)
        shown = [turn["content"] for turn in fold(turns, STRICTEST) if turn["role"] == "tool"]
        assert shown == (ids * 10_000 if repeats else ids)
    assert time.process_time() - begun < 2
