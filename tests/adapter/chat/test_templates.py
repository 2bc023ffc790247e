"""Chat templates: the models' own, in a sandbox."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from latimer.adapter.chat.conversation import plain
from latimer.adapter.chat.templates import Conversation, render, variables_of
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
    """The prompt of some messages."""
    body = [{"role": role, "content": content, **extra} for role, content in messages]
    request = ChatRequest.model_validate({"model": "m", "messages": body})
    model = replace(MODEL, template=template, adds_bos=adds_bos)
    return render(model, {"messages": plain(model, request.messages), "variables": {}})


def test_a_template_with_bos_and_eos() -> None:
    """Llama 2's turns, with the tokens' spellings."""
    text = prompt_of(LLAMA_2, ("user", " Hi "), ("assistant", "Yes"), ("user", "So"))
    assert text == "<s>[INST] Hi [/INST] Yes </s><s>[INST] So [/INST]"


def test_a_bos_that_the_model_adds_is_not_written_twice() -> None:
    """The first one is left to the engine, the others are the template's."""
    text = prompt_of(LLAMA_2, ("user", "Hi"), ("assistant", "Yes"), ("user", "So"), adds_bos=True)
    assert text == "[INST] Hi [/INST] Yes </s><s>[INST] So [/INST]"


def test_the_tag_for_training_is_no_error() -> None:
    """`{% generation %}` stands around what the assistant says, and changes nothing."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}!{% endgeneration %}"
        "{% else %}{{ m.content }}?{% endif %}{% endfor %}"
    )
    assert prompt_of(template, ("user", "a"), ("assistant", "b"), ("user", "c")) == "a?b!c?"


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    """`raise_exception` is a 400 on `messages`, in the template's words."""
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        prompt_of(LLAMA_2, ("assistant", "Hi"))
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_mistake() -> None:
    """A syntax error is no 400."""
    with pytest.raises(EngineError, match="broken"):
        prompt_of("{% for %}", ("user", "Hi"))


def test_the_environment_that_models_expect() -> None:
    """Trimmed blocks, loop controls, dates, JSON that is not escaped for HTML, no tools."""
    template = (
        "{% for m in messages %}\n  {% if loop.first %}\n{% continue %}\n  {% endif %}\n"
        "{{ m.content | tojson }}\n{% endfor %}\n{{ strftime_now('%Y') }}"
        "{% if tools is none %} none{% endif %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    text = prompt_of(template, ("user", "first"), ("user", "<é'&>"))
    assert re.fullmatch(r'"<é\'&>"\n20\d\d none>', text)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template: str) -> None:
    """What a file from the internet must not do ends the request, nothing else."""
    with pytest.raises(RequestError):
        assert prompt_of(template, ("user", "Hi")) is None


def test_developers_are_systems_where_the_template_knows_none() -> None:
    """A template that knows the role gets it as it is."""
    show = "{% for m in messages %}{{ m.role }};{% endfor %}"
    assert prompt_of(show, ("developer", "x"), ("user", "y")) == "system;user;"
    knows = show + "{# developer #}"
    assert prompt_of(knows, ("developer", "x"), ("user", "y")) == "developer;user;"


def test_parts_are_joined_and_names_kept() -> None:
    """Content is a string for the template, whatever form it came in."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    show = "{% for m in messages %}{{ m.name }}:{{ m.content }}{% endfor %}"
    assert prompt_of(show, ("user", parts), name="Ann") == "Ann:ab"
    assert prompt_of(show, ("system", []), name="Bob") == "Bob:"


def test_without_a_template_it_is_alpaca() -> None:
    """As koboldcpp does for models without one."""
    text = prompt_of(
        None, ("system", "Be kind."), ("user", "Hi"), ("assistant", "Yo"), ("user", "?")
    )
    assert text == (
        "Be kind.\n\n### Instruction:\nHi\n\n### Response:\nYo\n\n### Instruction:\n?\n\n"
        "### Response:\n"
    )


def test_a_last_message_of_the_assistants_goes_on() -> None:
    """Nothing stands behind it, and its blanks are kept even where a template trims."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}"
    text = prompt_of(template, ("user", " Hi "), ("assistant", " So "))
    assert text == "[user]Hi<end>[assistant]So "


def test_what_a_template_leaves_out_cannot_go_on() -> None:
    """A template that shows only users has no place for it."""
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="leaves out the assistant's last message"):
        prompt_of(template, ("user", "Hi"), ("assistant", "So"))


@pytest.mark.parametrize(
    ("source", "fields", "variables"),
    [
        ("", {}, {}),
        ("", {"chat_template_kwargs": {"a": [1]}}, {"a": [1]}),
        ("{{ reasoning_effort }}", {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ("{{ enable_thinking }}", {"reasoning_effort": "none"}, {"enable_thinking": False}),
        ("{{ enable_thinking }}", {"reasoning_effort": "low"}, {"enable_thinking": True}),
        ("{{ enable_thinking }}",
         {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
         {"enable_thinking": False}),
        ("", {"reasoning_effort": "none"}, {}),
    ],
)  # fmt: skip
def test_variables_of_a_template(
    source: str, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    """The request's own go before what its effort means to the template."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = ChatRequest.model_validate(body)
    assert (
        variables_of(
            request.chat_template_kwargs,
            request.reasoning_effort,
            replace(MODEL, template=source),
            "engine",
        )
        == variables
    )


def test_variables_reach_the_template() -> None:
    """By their names."""
    conversation: Conversation = {
        "messages": [{"role": "user", "content": "x"}],
        "variables": {"mood": "kind"},
    }
    assert render(replace(MODEL, template="{{ mood }}"), conversation) == "kind"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_template_is_given_by_itself_is_refused(name: str) -> None:
    """Nobody else's messages, by a detour."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest.model_validate({**body, "chat_template_kwargs": {name: []}})
    with pytest.raises(RequestError) as caught:
        variables_of(request.chat_template_kwargs, None, MODEL, "engine")
    assert caught.value.param == f"chat_template_kwargs.{name}"
