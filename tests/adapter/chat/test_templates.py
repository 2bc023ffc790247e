"""Tests of the models' own chat templates, rendered in a sandbox."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from latimer.adapter.chat.conversation import turns_of
from latimer.adapter.chat.instruct import Opening
from latimer.adapter.chat.profile import IN_WORDS
from latimer.adapter.chat.templates import (
    AS_USUAL,
    Conversation,
    Reasoning,
    render,
    variables_of,
)
from latimer.backends.base import Model
from latimer.backends.errors import EngineError, RequestError
from latimer.schemas.openai.chat import ChatRequest

MODEL = Model("m", 100, None, "<s>", "</s>", False, "fp", 0)
LLAMA_2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def prompt_of(
    template: str | None, *messages: tuple[str, Any], adds_bos: bool = False, **extra: Any
) -> str:
    """Return the prompt of some messages."""
    body = [{"role": role, "content": content, **extra} for role, content in messages]
    request = ChatRequest.model_validate({"model": "m", "messages": body})
    model = replace(MODEL, template=template, adds_bos=adds_bos)
    style = IN_WORDS[0]._replace(developer="developer" in (template or ""))
    turns, _ = turns_of(model, request.messages, (), style, None)
    return render(model, {"messages": turns, "variables": {}})


def test_a_template_with_bos_and_eos() -> None:
    """A template can use the text of the BOS and EOS tokens, as Llama 2's does."""
    text = prompt_of(LLAMA_2, ("user", " Hi "), ("assistant", "Yes"), ("user", "So"))
    assert text == "<s>[INST] Hi [/INST] Yes </s><s>[INST] So [/INST]"


def test_a_bos_that_the_model_adds_is_not_written_twice() -> None:
    """A leading BOS that the engine adds is removed from the prompt, and later ones stay."""
    text = prompt_of(LLAMA_2, ("user", "Hi"), ("assistant", "Yes"), ("user", "So"), adds_bos=True)
    assert text == "[INST] Hi [/INST] Yes </s><s>[INST] So [/INST]"


def test_a_template_may_collect_values_in_a_list() -> None:
    """A template can append to its own lists and take from them, as Kimi K2's does."""
    template = (
        "{% set seen = [] %}{% for m in messages %}{% set _ = seen.append(m.content) %}"
        "{% endfor %}{{ seen.pop(0) }}{{ seen }}"
    )
    assert prompt_of(template, ("user", "Hi"), ("user", "So")) == "Hi['So']"


def test_no_text_is_escaped_for_html() -> None:
    """Text that a template adds to `safe` text stays as it is, as in Functionary's template."""
    assert prompt_of("{{ 'a'|safe + messages[0].content }}", ("user", '<"&>')) == 'a<"&>'


def test_the_tag_for_training_is_no_error() -> None:
    """The `{% generation %}` tag around assistant content renders that content unchanged."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    )
    assert prompt_of(template, ("user", "a"), ("assistant", "b"), ("user", "c")) == "a?b!c?"


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    """A template's `raise_exception` is a 400 on `messages` with the template's message."""
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        prompt_of(LLAMA_2, ("assistant", "Hi"))
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_mistake() -> None:
    """A syntax error in a template is an engine error, not a 400."""
    with pytest.raises(EngineError, match="invalid"):
        prompt_of("{% for %}", ("user", "Hi"))


def test_the_environment_that_models_expect() -> None:
    """Templates get trimmed blocks, loop controls, dates, unescaped JSON, and `tools` as none."""
    template = (
        "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}\n  {% endif %}\n"
        "{{ m.content | tojson }}\n{% endfor %}\n{{ strftime_now('%Y') }}"
        "{% if tools is none %} none{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    text = prompt_of(template, ("user", "first"), ("user", "<é'&>"))
    assert re.fullmatch(r'"<é\'&>"\n20\d\d none>', text)


def test_templates_choose_the_escapes_of_json() -> None:
    """A template can say whether `tojson` escapes characters beyond ASCII."""
    template = (
        "{% for m in messages %}{{ m.content | tojson(ensure_ascii=False) }}"
        "{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}"
    )
    assert prompt_of(template, ("user", "é")) == '"é""\\u00e9"'


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    """A template that tries to leave the sandbox only fails the request."""
    with pytest.raises(RequestError):
        assert prompt_of(template, ("user", "Hi")) is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ 10 ** (10 ** 7) > 1 }}",
        "{% set n = namespace(x=3) %}{% for _ in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ ('a' * (3 * 10 ** 9))|length }}",
        "{{ (10 ** 9 * 'a')|length }}",
        "{{ ([0] * (10 ** 9))|length }}",
    ],
)
def test_a_template_cannot_calculate_without_end(template: str) -> None:
    """A template with a huge product or power only fails the request, and at once."""
    with pytest.raises(RequestError, match="is too large"):
        prompt_of(template, ("user", "Hi"))


def test_a_template_can_multiply() -> None:
    """Products and powers of usual sizes work in a template."""
    template = "{{ '-' * 3 }}{{ 2 * '+' }}{{ [0] * 2 }}{{ 12 * 3.5 }}{{ 2 ** 10 }}{{ 2 ** -1 }}"
    assert prompt_of(template, ("user", "Hi")) == "---++[0, 0]42.010240.5"


def test_developers_are_systems_where_the_template_knows_none() -> None:
    """A developer message is a system message unless the template knows the developer role."""
    show = "{% for m in messages %}{{ m.role }};{% endfor %}"
    assert prompt_of(show, ("developer", "x"), ("user", "y")) == "system;user;"
    knows = show + "{# developer #}"
    assert prompt_of(knows, ("developer", "x"), ("user", "y")) == "developer;user;"


def test_parts_are_joined_and_names_kept() -> None:
    """A template gets content as a string and keeps message names."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    show = "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}"
    assert prompt_of(show, ("user", parts), name="Ann") == "Ann:ab"
    assert prompt_of(show, ("system", []), name="Bob") == "Bob:"


def test_without_a_template_it_is_alpaca() -> None:
    """A model without a template uses the Alpaca format, as in koboldcpp."""
    text = prompt_of(
        None, ("system", "Be kind."), ("user", "Hi"), ("assistant", "Yo"), ("user", "?")
    )
    assert text == (
        "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nYo\n\n### Instruction:\n?\n\n"
        "### Response:\n"
    )


def test_a_last_message_of_the_assistants_goes_on() -> None:
    """A final assistant message ends the prompt and keeps whitespace that the template trims."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
    text = prompt_of(template, ("user", " Hi "), ("assistant", " So "))
    assert text == "[user]Hi<end>[assistant]So "


def test_what_a_template_leaves_out_cannot_go_on() -> None:
    """A final assistant message that the template omits cannot be continued."""
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="omits the final assistant message"):
        prompt_of(template, ("user", "Hi"), ("assistant", "So"))


def test_a_call_without_text_cannot_go_on() -> None:
    """A final assistant message with a call and null as its content is a client's error."""
    template = "{% for m in messages %}{{ 'a call' if m.tool_calls else m.content }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}
    with pytest.raises(RequestError, match="omits the final assistant message"):
        render(replace(MODEL, template=template), {"messages": [call], "variables": {}})


def test_a_message_without_a_free_mark_cannot_go_on() -> None:
    """A final assistant message with every character that can mark its end is an error."""
    text = "".join(map(chr, range(0x10F000, 0x10FFFE)))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert prompt_of(template, ("assistant", text[1:])) == text[1:]
    with pytest.raises(RequestError, match=r"U\+10F000 to U\+10FFFD"):
        prompt_of(template, ("assistant", text))


@pytest.mark.parametrize(
    ("source", "fields", "variables"),
    [
        ("", {}, {}),
        ("{{ a }}", {"chat_template_kwargs": {"a": [1]}}, {"a": [1]}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, {"enable_thinking": True}),
        ("{{ enable_thinking }}",
         {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
         {"enable_thinking": False}),
        ("", {"reasoning_effort": "none"}, {}),
        ("{{ enable_thinking }}", {"enable_thinking": True}, {"enable_thinking": True}),
        ("{% if thinking %}{% endif %}", {"enable_thinking": False}, {"thinking": False}),
        ("{{ reasoning_effort }}", {"enable_thinking": False}, {"reasoning_effort": "none"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "none", "enable_thinking": True},
         {"enable_thinking": True}),
        ("<think>", {"enable_thinking": True}, {}),
    ],
)  # fmt: skip
def test_variables_of_a_template(
    source: str, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    """The request's own template variables take precedence over those from `reasoning_effort`."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = ChatRequest.model_validate(body)
    reasoning = Reasoning(request.reasoning_effort, request.enable_thinking)
    model = replace(MODEL, template=source)
    assert variables_of(request.chat_template_kwargs, reasoning, model) == (variables, ())


def test_a_variable_that_a_template_does_not_use_is_listed() -> None:
    """A variable without effect is still passed on, and named among the fields without effect."""
    model = replace(MODEL, template="{{ b }}")
    given = {"a": 1, "b": 2}
    assert variables_of(given, AS_USUAL, model) == (given, ("chat_template_kwargs.a",))


@pytest.mark.parametrize(
    ("roles", "opening", "prompt"),
    [
        (("user",), None, "user:x;assistant:"),
        (("user",), "begin", "user:x;assistant:"),
        (("user",), "end", "user:x;"),
        (("user", "assistant"), None, "user:x;assistant:x"),
        (("user", "assistant"), "continue", "user:x;assistant:x"),
        (("user", "assistant"), "begin", "user:x;assistant:x;assistant:"),
        (("user", "assistant"), "end", "user:x;assistant:x;"),
    ],
)
def test_a_request_names_the_end_of_its_prompt(
    roles: tuple[str, ...], opening: Opening | None, prompt: str
) -> None:
    """A prompt ends with a new turn, inside the last message or after it, as requested."""
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    conversation: Conversation = {
        "messages": [{"role": role, "content": "x"} for role in roles],
        "variables": {},
        "opening": opening,
    }
    assert render(replace(MODEL, template=source), conversation) == prompt


@pytest.mark.parametrize(
    ("source", "reasoning", "dropped"),
    [
        ("", Reasoning("low"), ["reasoning_effort"]),
        ("<think>", Reasoning("low"), ["reasoning_effort"]),
        ("<think>", Reasoning("none"), ["reasoning_effort"]),
        ("", Reasoning(enabled=True), ["enable_thinking"]),
        ("<think> while thinking", Reasoning(enabled=False), ["enable_thinking"]),
        ("", Reasoning("high", True), ["reasoning_effort", "enable_thinking"]),
    ],
)
def test_reasoning_without_a_setting_is_named(
    source: str, reasoning: Reasoning, dropped: list[str]
) -> None:
    """A reasoning field for which the template has no setting is listed."""
    assert variables_of(None, reasoning, replace(MODEL, template=source)) == ({}, tuple(dropped))


def test_variables_reach_the_template() -> None:
    """A template reads the variables of a request by name."""
    conversation: Conversation = {
        "messages": [{"role": "user", "content": "x"}],
        "variables": {"mood": "kind"},
    }
    assert render(replace(MODEL, template="{{ mood }}"), conversation) == "kind"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_template_is_given_by_itself_is_refused(name: str) -> None:
    """A request cannot override the variables that Latimer itself sets."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest.model_validate({**body, "chat_template_kwargs": {name: []}})
    with pytest.raises(RequestError) as caught:
        variables_of(request.chat_template_kwargs, AS_USUAL, MODEL)
    assert caught.value.param == f"chat_template_kwargs.{name}"
