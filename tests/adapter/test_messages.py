"""Tests of reasoning and tool calls with models that generate a fixed script of tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.backends.llama_cpp import LlamaCpp
from latimer.schemas.openai.messages import REASONING_FIELDS
from support import scripted
from support.clients import adapting
from support.replies import chunks_in

TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {**PARAMETERS, "additionalProperties": False}},
}
THOUGHT = ("<think>", "Let me see.", " Paris?", "</think>", "\n\n")
ANSWER = ("It is", " Paris", ".")
CALL = ('{"name": "f", ', '"arguments": {"a": 5}', "}")
ENGINES = ("llama_cpp", "llama_server")

Ask = Callable[..., Any]


@pytest.fixture(params=ENGINES)
def asking(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a client factory for an engine with a model that generates a script."""

    @asynccontextmanager
    async def ask(
        script: Sequence[str], template: str = scripted.CHATML, marks: Sequence[str] = ()
    ) -> AsyncIterator[Ask]:
        engine = scripted.scripted_engine(request.param, tmp_path, script, template, marks)
        async with engine as backend, adapting(backend) as client:
            yield _asker(client)

    return ask


def _asker(client: httpx2.AsyncClient) -> Ask:
    async def ask(**body: Any) -> Any:
        messages = [{"role": "user", "content": "Hi"}]
        full = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 60, **body}
        reply = await client.post("/v1/chat/completions", json=full)
        assert reply.status_code == 200, reply.text
        return chunks_in(reply) if body.get("stream") else reply.json()

    return ask


def message_of(reply: Any) -> tuple[Any, Any, Any, str]:
    """Return the reasoning, content, calls and finish reason of a reply."""
    choice = reply["choices"][0]
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message.get("reasoning_content"), message["content"], calls, choice["finish_reason"]


def counts_of(reply: Any) -> Any:
    """Return the usage of a reply without the cached tokens."""
    return {**reply["usage"], "prompt_tokens_details": None}


THINKERS = pytest.mark.parametrize(
    ("script", "template", "marks"),
    [
        ((*THOUGHT, *ANSWER), scripted.MAY_THINK, TAGS),
        ((*THOUGHT, *ANSWER), scripted.MAY_THINK, ()),
        ((*THOUGHT[1:], *ANSWER), scripted.THINKING, ()),
        ((*THOUGHT[1:], *ANSWER), scripted.THINKING, TAGS),
    ],
    ids=["tokens", "text", "begun", "begun tokens"],
)


@THINKERS
async def test_thoughts_are_no_content(
    asking: Any, script: Sequence[str], template: str, marks: Sequence[str]
) -> None:
    """Reasoning is not content, with tags as tokens or text, also if the prompt opens it."""
    async with asking(script, template, marks) as ask:
        reply = await ask()
        assert message_of(reply) == ("Let me see. Paris?", "It is Paris.", [], "stop")
        details = reply["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(script) - len(ANSWER)
        chunks = await ask(stream=True, stream_options={"include_usage": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert deltas[0]["role"] == "assistant"
        assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Let me see. Paris?"
        assert "".join(d.get("content") or "" for d in deltas) == "It is Paris."
        assert counts_of(chunks[-1]) == counts_of(reply)


async def test_a_first_token_with_a_space_is_a_token_of_the_answer(asking: Any) -> None:
    """The first token of an answer has its entry and is not reasoning, if its space is dropped."""
    script = (*THOUGHT[:-1], " It is", *ANSWER[1:])
    async with asking(script, scripted.MAY_THINK, TAGS) as ask:
        reply = await ask(logprobs=True)
        assert message_of(reply) == ("Let me see. Paris?", "It is Paris.", [], "stop")
        tokens = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
        assert tokens == [" It is", *ANSWER[1:]]
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
        # Tokens that the engine sends together are in one chunk.
        choices = [chunk["choices"][0] for chunk in await ask(logprobs=True, stream=True)]
        shown = [choice for choice in choices if choice["delta"].get("content")]
        assert "".join(choice["delta"]["content"] for choice in shown) == "It is Paris."
        streamed = [one["token"] for choice in shown for one in choice["logprobs"]["content"]]
        assert streamed == tokens
        assert counts_of(await ask()) == counts_of(reply)


async def test_tags_around_an_answer_are_no_content(asking: Any) -> None:
    """Granite's tags around the answer after its reasoning are dropped, plain and streamed."""
    template = scripted.MAY_THINK + "{# <response></response> #}"
    script = (*THOUGHT[:-1], "<response>", *ANSWER, "</response>")
    async with asking(script, template) as ask:
        reply = await ask()
        assert message_of(reply) == ("Let me see. Paris?", "It is Paris.", [], "stop")
        deltas = [chunk["choices"][0]["delta"] for chunk in await ask(stream=True)]
        assert "".join(d.get("content") or "" for d in deltas) == "It is Paris."


def parts_of(message: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a message or of a delta."""
    return {name: text for name, text in message.items() if name != "role" and text}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", None])
async def test_the_field_for_thoughts_can_be_chosen(tmp_path: Path, field: Any) -> None:
    """Messages and deltas have reasoning in the chosen field only; usage always counts it."""
    path = scripted.scripted(
        tmp_path / "model.gguf", (*THOUGHT[1:], *ANSWER), scripted.THINKING, ()
    )
    wanted = {"content": "It is Paris."} | ({field: "Let me see. Paris?"} if field else {})
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "logprobs": True}
    async with adapting(LlamaCpp(path), reasoning_field=field) as client:
        ask = functools.partial(client.post, "/v1/chat/completions")
        whole = (await ask(json=body)).json()
        assert parts_of(whole["choices"][0]["message"]) == wanted
        assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        for logprobs in (True, False):
            reply = await ask(json={**body, "logprobs": logprobs, "stream": True})
            choices = [chunk["choices"][0] for chunk in chunks_in(reply)]
            assert choices[0]["delta"]["role"] == "assistant"
            found: dict[str, str] = {}
            for choice in choices:
                for name, text in parts_of(choice["delta"]).items():
                    found[name] = found.get(name, "") + text
            assert found == wanted
            if logprobs:
                tokens = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
                assert tokens == whole["choices"][0]["logprobs"]["content"]


async def test_thoughts_that_differ_are_an_error(echo: httpx2.AsyncClient) -> None:
    """Two fields with different reasoning in one message are a 400 that names one of them."""
    thought = {"role": "assistant", "content": "a", "reasoning": "x", "reasoning_content": "y"}
    messages = [{"role": "user", "content": "?"}, thought, {"role": "user", "content": "?"}]
    reply = await echo.post("/v1/chat/completions", json={"model": "m", "messages": messages})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages[1].reasoning")


@pytest.mark.parametrize("field", REASONING_FIELDS)
async def test_a_thought_without_an_answer_is_a_message(
    echo: httpx2.AsyncClient, field: str
) -> None:
    """A message that was cut off in its reasoning can be sent back."""
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, field: "Hm."},
        {"role": "user", "content": "Go on."},
    ]
    body = {"model": "m", "messages": messages, "max_tokens": 2}
    reply = await echo.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "x-latimer-ignored" not in reply.headers


@THINKERS
async def test_stops_do_not_count_in_thoughts(
    asking: Any, script: Sequence[str], template: str, marks: Sequence[str]
) -> None:
    """A stop sequence in the reasoning is ignored, and one in the content stops the engine."""
    async with asking(script, template, marks) as ask:
        reply = await ask(stop=["Paris"])
        assert message_of(reply) == ("Let me see. Paris?", "It is ", [], "stop")
        # " Paris" begins before the cut, so it is counted.
        assert reply["usage"]["completion_tokens"] == len(script) - 1
        logged = await ask(stop=["Paris"], logprobs=True)
        tokens = [entry["token"] for entry in logged["choices"][0]["logprobs"]["content"]]
        assert tokens == ["It is", " Paris"]
        assert counts_of(logged) == counts_of(reply)


@THINKERS
async def test_a_schema_begins_behind_the_thought(
    asking: Any, script: Sequence[str], template: str, marks: Sequence[str]
) -> None:
    """A schema or regular expression constrains the content and not the reasoning."""
    async with asking(script, template, marks) as ask:
        thought, content, _, reason = message_of(await ask(response_format=SCHEMA))
        assert (thought, reason) == ("Let me see. Paris?", "stop")
        assert isinstance(json.loads(content)["a"], int)
        thought, content, _, _ = message_of(await ask(regex="[a-c]{3}"))
        assert (thought, len(content)) == ("Let me see. Paris?", 3)


async def test_a_thought_that_is_cut_off(asking: Any) -> None:
    """Reasoning cut off by `max_tokens` gives empty content and the finish reason `length`."""
    async with asking((*THOUGHT, *ANSWER), scripted.MAY_THINK, TAGS) as ask:
        reply = await ask(max_tokens=3)
        assert message_of(reply) == ("Let me see. Paris?", "", [], "length")
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_a_model_that_does_not_think_now(asking: Any) -> None:
    """Without a reasoning tag all text is content, with a logprobs entry for every token."""
    async with asking(ANSWER, scripted.MAY_THINK, TAGS) as ask:
        reply = await ask(logprobs=True)
        assert message_of(reply) == (None, "It is Paris.", [], "stop")
        tokens = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
        assert tokens == list(ANSWER)
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_a_call_behind_a_thought_that_calls(asking: Any) -> None:
    """Only a call in the answer is a tool call, not one in the reasoning."""
    script = (*THOUGHT[:2], "<tool", "_call>no", "</think>", "<tool_call>", *CALL, "</tool_call>")
    async with asking(script, scripted.HERMES + "{# <think> #}", (*TAGS, *CALL_TAGS)) as ask:
        reply = await ask(tools=[TOOL])
        thought = "Let me see.<tool_call>no"
        assert message_of(reply) == (thought, None, [("f", {"a": 5})], "tool_calls")


async def test_markers_that_are_tokens_begin_calls(asking: Any) -> None:
    """A marker token begins a call, whose tokens have logprobs and ignore stop sequences."""
    async with asking(("So: ", "<tool_call>", *CALL, "</tool_call>"), scripted.HERMES,
                      CALL_TAGS) as ask:  # fmt: skip
        called = ("So:", [("f", {"a": 5})], "tool_calls")
        reply = await ask(tools=[TOOL], logprobs=True)
        assert message_of(reply)[1:] == called
        tokens = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
        assert tokens == ["So: ", "<tool_call>", *CALL[:2]]
        assert message_of(await ask(tools=[TOOL], stop=["name"]))[1:] == called
        assert message_of(await ask(tools=[TOOL], stop=[":"]))[1:] == ("So", [], "stop")


async def test_text_spelled_like_a_marker_is_content(asking: Any) -> None:
    """Text that spells a marker is content if the marker is a token."""
    script = ("<tool", "_call>", *CALL)
    async with asking(script, scripted.HERMES, CALL_TAGS) as ask:
        expected = '<tool_call>{"name": "f", "arguments": {"a": 5}}'
        assert message_of(await ask(tools=[TOOL]))[1:] == (expected, [], "stop")


async def test_arguments_follow_their_schema_when_the_model_calls_by_itself(asking: Any) -> None:
    """A call that the model chooses to make is constrained to the schema from the marker on."""
    script = ("<tool", "_call>", '{"name": "f", ', '"arguments": {"a": "x"}', "}", "</tool_call>")
    async with asking(script) as ask:
        _, content, calls, _ = message_of(await ask(tools=[TOOL]))
        assert content is None
        assert [name for name, _ in calls] == ["f"]
        assert isinstance(calls[0][1]["a"], int)


async def test_a_call_streams_as_it_is_written(asking: Any) -> None:
    """A call streams its header in the first delta, then its arguments, then an empty delta."""
    async with asking(("<tool_call>", '{"name": "f", ', '"arguments": {', '"a": ', "5}", "}",
                       "</tool_call>"), scripted.HERMES, CALL_TAGS) as ask:  # fmt: skip
        chunks = [chunk["choices"][0] for chunk in await ask(tools=[TOOL], stream=True)]
        first = chunks[0]["delta"]
        call_id = first["tool_calls"][0].pop("id")
        assert len(call_id) == 29
        head = {"index": 0, "type": "function", "function": {"name": "f", "arguments": ""}}
        assert first == {"role": "assistant", "content": None, "tool_calls": [head],
                         "refusal": None}  # fmt: skip
        fragments = [chunk["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
        assert [one["function"] for one in fragments] == [
            {"arguments": "{"}, {"arguments": '"a": '}, {"arguments": "5}"}
        ]  # fmt: skip
        assert all(one.keys() == {"index", "function"} for one in fragments)
        assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "tool_calls")


async def test_custom_tools_take_text(asking: Any) -> None:
    """A custom tool's input is returned as text, and `tool_choice` can name the tool."""
    custom = {"type": "custom", "custom": {"name": "run", "description": "Run it."}}
    script = ("<tool_call>", '{"name": "run", ', '"arguments": {"input": "a \\"b\\"', '\\nc"}}',
              "</tool_call>")  # fmt: skip
    async with asking(script, scripted.HERMES, CALL_TAGS) as ask:
        choice = {"type": "custom", "custom": {"name": "run"}}
        for more in ({}, {"tool_choice": "required"}, {"tool_choice": choice}):
            reply = await ask(tools=[TOOL, custom], **more)
            call = reply["choices"][0]["message"]["tool_calls"][0]
            assert call["type"] == "custom"
            assert call["custom"] == {"name": "run", "input": 'a "b"\nc'}
        chunks = [chunk["choices"][0] for chunk in await ask(tools=[custom], stream=True)]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
        assert parts[0]["custom"] == {"name": "run", "input": ""}
        assert [part["custom"]["input"] for part in parts[1:]] == ['a "b"', "\nc"]
        assert all(part.keys() == {"index", "custom"} for part in parts[1:])
        assert chunks[-1]["finish_reason"] == "tool_calls"
        # A custom tool's input comes with its tokens, as a function's arguments do.
        shown = (await ask(tools=[custom], logprobs=True))["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in shown] == list(script[:-1])
        spelled = "".join(one["token"] for one in shown)
        assert json.loads(spelled[spelled.index("{") : spelled.rindex("}") + 1])["name"] == "run"


GRAMMARS = (("regex", "[0-9]{3}x"), ("lark", 'start: DIGIT~3 "x"\n%import common.DIGIT'))


@pytest.mark.parametrize(("syntax", "definition"), GRAMMARS, ids=["regex", "lark"])
async def test_custom_tools_with_a_grammar(asking: Any, syntax: str, definition: str) -> None:
    """A custom tool's input follows its grammar, whether the call is forced or chosen."""
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    custom = {"type": "custom", "custom": {"name": "run", "format": grammar}}
    script = ("<tool_call>", '{"name": "run", ', '"arguments": {"input": "x"', "}}",
              "</tool_call>")  # fmt: skip
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]}
    async with asking(script, scripted.HERMES, CALL_TAGS) as ask:
        for choice in ("auto", "required", {"type": "custom", "custom": {"name": "run"}},
                       {"type": "allowed_tools", "allowed_tools": allowed}):  # fmt: skip
            reply = await ask(tools=[custom], tool_choice=choice, parallel_tool_calls=False)
            (call,) = reply["choices"][0]["message"]["tool_calls"]
            assert re.fullmatch("[0-9]{3}x", call["custom"]["input"]), call
            # The call is sent back unchanged.
            answered = [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "content": "done"},
            ]
            await ask(tools=[custom], messages=answered, max_tokens=1)


async def test_several_calls(asking: Any) -> None:
    """Several calls come in order, each with its own id, or only one if calls are not parallel."""
    script = ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "</tool_call>\n", "<tool_",
              'call>{"name": "f", "arguments": {"a": 2}}', "</tool_call>")  # fmt: skip
    async with asking(script) as ask:
        whole = await ask(tools=[TOOL])
        assert message_of(whole)[2:] == ([("f", {"a": 1}), ("f", {"a": 2})], "tool_calls")
        calls = whole["choices"][0]["message"]["tool_calls"]
        assert len({call["id"] for call in calls}) == 2
        chunks = [chunk["choices"][0] for chunk in await ask(tools=[TOOL], stream=True)]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
        assert [part["index"] for part in parts] == sorted(part["index"] for part in parts)
        assert [part["index"] for part in parts if "id" in part] == [0, 1]
        alone = await ask(tools=[TOOL], parallel_tool_calls=False)
        assert message_of(alone)[2:] == ([("f", {"a": 1})], "tool_calls")


# A template of a conversation, with a placeholder for each format's way to write a call.
TALK = (
    "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
HARMONY = TALK.replace("CALL", f"<|channel|>commentary to=functions.{NAME}<|message|>{ARGUMENTS}")
MISTRAL = TALK.replace("CALL", f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {ARGUMENTS}}}]')
MISTRAL_ARGS = TALK.replace("CALL", f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}")
LLAMA_3 = TALK.replace("CALL", f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}')
LLAMA_3 += "{# <|python_tag|> #}"
XML = TALK.replace("CALL", f"<tool_call><function={NAME}><parameter=a>{ARGUMENTS}</parameter>")
FORMATS = pytest.mark.parametrize(
    ("script", "template", "marks"),
    [
        (("<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>",
          '{"a": ', "5}"), HARMONY, ("<|channel|>", "<|constrain|>", "<|message|>")),
        (("[TOOL_CALLS]", '[{"name": "f", ', '"arguments": {"a": 5}', "}", "]"), MISTRAL,
         ("[TOOL_CALLS]",)),
        (("[TOOL_CALLS]", "f", "[ARGS]", '{"a": ', "5}"),
         MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
        (('{"name": "f", ', '"parameters": {"a": 5}', "}"), LLAMA_3, ("<|python_tag|>",)),
        (("<|python_tag|>", '{"name": "f", ', '"parameters": {"a": 5}', "}"), LLAMA_3,
         ("<|python_tag|>",)),
        (("<tool_call>", "<function=f>\n", "<parameter=a>\n", "5", "\n</parameter>\n",
          "</function>", "</tool_call>"), XML, CALL_TAGS),
        (("<tool_call>", *CALL, "</tool_call>"), scripted.CHATML, CALL_TAGS),
    ],
    ids=["harmony", "mistral", "mistral args", "llama 3", "python tag", "xml", "told in words"],
)  # fmt: skip


@FORMATS
async def test_calls_in_every_format(
    asking: Any, script: Sequence[str], template: str, marks: Sequence[str]
) -> None:
    """A call is parsed in every format, whether the model chooses it or `tool_choice` forces it."""
    async with asking(script, template, marks) as ask:
        called = (None, [("f", {"a": 5})])
        assert message_of(await ask(tools=[TOOL]))[1:] == (*called, "tool_calls")
        named = {"type": "function", "function": {"name": "f"}}
        assert message_of(await ask(tools=[TOOL], tool_choice=named))[1:] == (*called, "stop")
        chunks = [chunk["choices"][0] for chunk in await ask(tools=[TOOL], stream=True)]
        parts = [part for chunk in chunks for part in chunk["delta"].get("tool_calls", ())]
        text = "".join(part["function"]["arguments"] for part in parts)
        assert json.loads(text) == {"a": 5}
        assert chunks[-1]["finish_reason"] == "tool_calls"


async def test_what_gpt_oss_thinks(asking: Any) -> None:
    """The analysis channel of gpt-oss is reasoning, even without tools."""
    script = ("<|channel|>", "analysis", "<|message|>", "They greet.", "<|end|>")
    async with asking(script, HARMONY, ("<|channel|>", "<|message|>", "<|end|>")) as ask:
        assert message_of(await ask()) == ("They greet.", "", [], "stop")


async def test_choices_that_begin_differently(asking: Any) -> None:
    """Each of several choices has its own role and call id, in the order of the indices."""
    async with asking(("<tool_call>", *CALL, "</tool_call>"), scripted.HERMES, CALL_TAGS) as ask:
        chunks = [chunk["choices"][0] for chunk in await ask(tools=[TOOL], n=3, stream=True)]
        roles = [chunk["index"] for chunk in chunks if "role" in chunk["delta"]]
        assert roles == [0, 1, 2]
        firsts = {chunk["index"]: chunk["delta"] for chunk in reversed(chunks)}
        assert len({delta["tool_calls"][0]["id"] for delta in firsts.values()}) == 3
        ends = [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]]
        assert ends == ["tool_calls"] * 3
