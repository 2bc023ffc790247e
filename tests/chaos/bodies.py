"""Strategies for request bodies: valid ones with any field, and mutations of them."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import strategies as st
from support.engines.mistakes import MARK, places, written
from support.projector import png

from chaos.languages import gbnf, lark, regex, schema

MOST_BYTES = 2**20


def raw(text: str) -> str:
    """Return a string that is written without its quotes, for numbers that Python cannot hold."""
    return f"{MARK}{text}{MARK}"


def again(key: str) -> str:
    """Return a key that is written like another one, so that the object has it twice."""
    return key + MARK


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 127, 128, 129, 1.0, 1.5, -0.0, 0.1, 2**31 - 1, 2**31, 2**32,
    2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 1e308, -1e308, 5e-324, float("inf"), float("nan"),
    raw("1e400"), raw("-1e400"), raw("0" * 50), raw("1" + "0" * 5_000), raw("1.0e-400"), raw("-"),
    raw("00"), raw("1" * 25), raw("0." + "3" * 2_000), "", "a", "0", "\x00", "a\x00b", "\ud800",
    "\udfff\ud83d", "\ufeff", "\uffff", "\u2028", "é" * 50, "🔥", "<|im_end|>",
    "<|im_start|>system\n",
    "<think>", "</tool_call>", "null", "a" * 5_000, "a " * 200_000, "\\" * 1_000, '"', "%s%n{}", [],
    {}, [None], [[]], [[[]]], {"a": 1}, {"": None}, {"type": "text"}, {"type": "function"},
    [0], [-1], [5, "a"], [1e308], ["a", "b", "c", "d", "e"], [""], ["\x00"], [{}] * 3, "auto",
    "none",
    "required", "cl100k_base", "http://127.0.0.1:9/x", "file:///etc/hostname", "data:,",
)  # fmt: skip


def _deep(kind: str, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "array" else {"a": value}
    return value


def _many(kind: str, count: int) -> Any:
    return {
        "ids": list(range(count)), "zeros": [0] * count, "texts": ["a"] * count,
        "empty": [{}] * count, "keys": {str(n): n for n in range(count)}, "text": "ab c " * count,
        "controls": "<|im_end|>" * count, "bytes": "\x01" * count, "arrays": [[5]] * count,
    }[kind]  # fmt: skip


_MANY = ("ids", "zeros", "texts", "empty", "keys", "text", "controls", "bytes", "arrays")
strange: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(STRANGE),
    st.sampled_from(STRANGE),
    st.sampled_from(STRANGE),
    st.builds(
        _deep, st.sampled_from(("array", "object")), st.sampled_from((5, 100, 127, 128, 400))
    ),
    st.builds(_many, st.sampled_from(_MANY), st.sampled_from((5, 21, 129, 2_049, 50_000))),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


def _nudged(value: Any, by: Any) -> Any:
    """Return a value close to the given one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return by if isinstance(by, int | float) else -value - 1
    if isinstance(value, str):
        return value[:10_000] * (abs(by) % 50) if isinstance(by, int) else value + str(by)[:100]
    return [value]


def _copied(value: Any) -> Any:
    """Return a deep copy without shared parts, in which a change applies to one place only."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


@st.composite
def mutated(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Any:
    """Draw a value with up to five places changed."""
    value = _copied(draw(values))
    other = strange.map(_copied)
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 1, 2, 3, 5)))):
        found = list(places(value))
        if not found:
            return draw(other)
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        kind = draw(
            st.sampled_from(("set", "set", "set", "nudge", "delete", "again", "add", "wrap"))
        )
        if kind == "delete":
            del holder[key]
        elif kind == "wrap":
            holder[key] = [holder[key]]
        elif kind == "nudge":
            holder[key] = _nudged(holder[key], draw(other))
        elif kind == "set" or isinstance(holder, list):
            holder[key] = draw(other)
        else:
            name = (
                again(key) if kind == "again" else draw(st.sampled_from(("x", "", "\ud800", "n")))
            )
            holder[name] = draw(other)
    return value


PROMPTS = (
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "One day, a cat", "a", "", "é 漢 🔥", "1, 2, 3, ", " ", "\n\n", "one two three " * 60,
    "one two three " * 400, "\x00", "<|im_end|>", "\u200b" * 20,
)  # fmt: skip
STOPS = ("a", "\n", " is", "Paris", "é", "", "🔥", ".", "<|im_end|>", "x" * 4_096, "aa", "\x00")
_png = "data:image/png;base64," + base64.b64encode(png(255, 0, 0)).decode()
URLS = (
    _png, _png[:-20], "data:image/png;base64,", "data:,", "data:image/png,abc", "http://127.0.0.1:9/",
    "data:image/png;base64,****", "data:" + ";" * 20_000 + ",", "file:///etc/hostname", "", "data:",
    "data:image/jpeg;base64," + "A" * 100_000, "data:text/plain;charset=utf-8;base64,YQ==",
)  # fmt: skip

_counts = st.sampled_from((1, 1, 1, 2, 3, 20))
_words = st.sampled_from(("get_weather", "f", "a-b_c", "x" * 64))
_texts = st.sampled_from(PROMPTS)
_ids = st.lists(st.integers(0, 1_023), min_size=1, max_size=20)


def _schema_object() -> st.SearchStrategy[Any]:
    return schema.filter(lambda one: isinstance(one, dict))


SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from((0, 0.0, 0.7, 1, 2)), "top_p": st.sampled_from((0, 0.1, 1)),
    "frequency_penalty": st.floats(-2, 2), "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(
        st.integers(0, 1_100).map(str), st.sampled_from((-100, 100, 0.5, 0)), max_size=5
    ),
    "seed": st.sampled_from((0, 1, -1, 2**63 - 1, -(2**63), 2**31, 2**32)),
    "stop": st.one_of(st.sampled_from(STOPS), st.lists(st.sampled_from(STOPS), max_size=9)),
    "n": _counts, "stream": st.booleans(), "user": st.just("u"),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "top_k": st.sampled_from((-1, 0, 1, 5, 2**31 - 1)), "min_p": st.sampled_from((0, 0.05, 1)),
    "typical_p": st.sampled_from((0, 0.5, 1)), "top_n_sigma": st.sampled_from((-1, 0, 1.0, 1e30)),
    "top_a": st.sampled_from((0, 0.2, 1e30)), "tfs": st.sampled_from((0, 0.9, 1)),
    "smoothing_factor": st.sampled_from((0, 0.3, 100)),
    "smoothing_curve": st.sampled_from((0, 1, 1.5, 100)),
    "xtc_probability": st.sampled_from((0, 0.5, 1)),
    "xtc_threshold": st.sampled_from((0, 0.1, 0.6)),
    "dynatemp_range": st.sampled_from((0, 0.5, 50)),
    "dynatemp_exponent": st.sampled_from((0, 1, 9)),
    "mirostat": st.sampled_from((0, 1, 2)), "mirostat_tau": st.sampled_from((0, 5, 1e9)),
    "mirostat_eta": st.sampled_from((0, 0.1, 1e9)),
    "dry_multiplier": st.sampled_from((0, 0.8, 1e9)),
    "dry_base": st.sampled_from((0, 1.75, 1e30)),
    "dry_allowed_length": st.sampled_from((0, 2, 2**31 - 1)),
    "dry_penalty_last_n": st.sampled_from((-1, 0, 64, 2**31 - 1)),
    "dry_sequence_breakers": st.one_of(
        st.lists(st.sampled_from(STOPS), max_size=5),
        st.sampled_from((*STOPS, '["a"]', '["a"', "[]")),
    ),
    "adaptive_target": st.sampled_from((-1, 0, 0.5, 1)),
    "adaptive_decay": st.sampled_from((0, 0.5, 0.99)),
    "repeat_penalty": st.sampled_from((0, 0.01, 1, 1.1, 1e30)),
    "repeat_last_n": st.sampled_from((-1, 0, 64.0, 2**31 - 1)), "ignore_eos": st.booleans(),
    "min_tokens": st.sampled_from((0, 1, 3, 2**31 - 1)),
    "grammar": gbnf, "regex": regex, "lark": lark, "json_schema": schema,
    "oai_compat": st.booleans(),
    "logit_bias_vocabulary": st.sampled_from(("none", "cl100k_base", "../x")),
}  # fmt: skip
COMPLETION: dict[str, st.SearchStrategy[Any]] = {
    **SAMPLING,
    "best_of": _counts, "echo": st.booleans(), "logprobs": st.integers(0, 5),
    "suffix": st.sampled_from(("", " is it.", "é" * 30, "x " * 500)),
    "parse_special": st.booleans(),
}  # fmt: skip
prompts: st.SearchStrategy[Any] = st.one_of(
    _texts,
    _texts,
    st.lists(_texts, min_size=1, max_size=4),
    _ids,
    st.lists(_ids, min_size=1, max_size=3),
)


@st.composite
def _with_fields(
    draw: st.DrawFn, always: st.SearchStrategy[Any], fields: dict[str, st.SearchStrategy[Any]]
) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True))
    return {**draw(always), **{name: draw(fields[name]) for name in names}}


completion = _with_fields(
    st.fixed_dictionaries(
        {"model": st.just("m"), "prompt": prompts, "max_tokens": st.sampled_from((0, 1, 4, 16, 40))}
    ),
    COMPLETION,
)

_parts: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda text: {"type": "text", "text": text}, _texts),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, st.sampled_from(URLS)),
    st.builds(
        lambda data, form: {"type": "input_audio", "input_audio": {"data": data, "format": form}},
        st.sampled_from(("", "AAAA", "****", "A" * 60_000)),
        st.sampled_from(("wav", "mp3")),
    ),
    st.just({"type": "refusal", "refusal": "no"}),
    st.just({"type": "file", "file": {"file_data": "AAAA"}}),
)
_content: st.SearchStrategy[Any] = st.one_of(_texts, _texts, st.lists(_parts, max_size=3))
_arguments = st.sampled_from(('{"city": "Rome"}', "{}", "", "{", "null", "é", "[1]", '{"a":' * 90))


def _turn(name: str, arguments: str, result: Any) -> list[Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


_turns: st.SearchStrategy[list[Any]] = st.one_of(
    st.builds(lambda role, text: [{"role": role, "content": text}],
              st.sampled_from(("user", "user", "system", "developer", "assistant")), _content),
    st.builds(_turn, _words, _arguments, _content),
    st.builds(
        lambda text: [{"role": "assistant", "content": "x", "reasoning_content": text}], _texts
    ),
)  # fmt: skip
_messages = st.lists(_turns, min_size=1, max_size=3).map(
    lambda turns: [message for turn in turns for message in turn]
)


def _function(name: str, parameters: Any, strict: bool | None) -> Any:
    function = {"name": name, "description": "d", "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


_tool: st.SearchStrategy[Any] = st.one_of(
    st.builds(_function, _words, _schema_object(), st.sampled_from((None, True, False))),
    st.builds(_function, _words, st.just({"type": "object",
    "properties": {"a": {}}}), st.just(True)),
    st.builds(
        lambda name, definition, syntax: {
            "type": "custom",
            "custom": {"name": name, "format": {"type": "grammar", "grammar": {
                "syntax": syntax, "definition": definition}}},
        },
        _words, st.one_of(lark, regex), st.sampled_from(("lark", "regex")),
    ),
    st.builds(lambda name: {"type": "custom", "custom": {"name": name}}, _words),
)  # fmt: skip
CHAT: dict[str, st.SearchStrategy[Any]] = {
    **SAMPLING,
    "tools": st.lists(_tool, max_size=3, unique_by=lambda tool: tool[tool["type"]]["name"]),
    "tool_choice": st.one_of(
        st.sampled_from(("none", "auto", "required")),
        st.builds(lambda name: {"type": "function", "function": {"name": name}}, _words),
    ),
    "parallel_tool_calls": st.booleans(),
    "response_format": st.one_of(
        st.just({"type": "json_object"}),
        st.builds(
            lambda own, strict: {
                "type": "json_schema", "json_schema": {"name": "s", "schema": own, "strict": strict}
            },
            _schema_object(), st.booleans(),
        ),
    ),
    "functions": st.lists(st.builds(lambda name, own: {"name": name, "parameters": own},
                                    _words, _schema_object()), max_size=2),
    "function_call": st.sampled_from(("none", "auto", {"name": "f"})),
    "logprobs": st.booleans(), "top_logprobs": st.integers(0, 20),
    "max_completion_tokens": st.sampled_from((1, 16)),
    "reasoning_effort": st.sampled_from(("none", "low", "max")),
    "chat_template_kwargs": st.sampled_from(({}, {"enable_thinking": False}, {"messages": []})),
    "adapter": st.fixed_dictionaries({"user_start": _texts, "assistant_gen": _texts}),
    "modalities": st.just(["text"]), "metadata": st.just({"a": "b"}), "store": st.booleans(),
    "service_tier": st.sampled_from(("auto", "flex")), "verbosity": st.just("low"),
    "prediction": st.builds(lambda text: {"type": "content", "content": text}, _content),
}  # fmt: skip
chat = _with_fields(
    st.fixed_dictionaries(
        {
            "model": st.just("m"),
            "messages": _messages,
            "max_tokens": st.sampled_from((1, 4, 16, 40)),
        }
    ),
    CHAT,
)
tokenize = st.fixed_dictionaries({"prompt": _texts}, optional={"add_special_tokens": st.booleans()})
detokenize = st.fixed_dictionaries({"tokens": _ids})

embeddings = _with_fields(
    st.fixed_dictionaries({"model": st.just("m"), "input": prompts}),
    {
        "encoding_format": st.sampled_from(("float", "base64")),
        "dimensions": st.sampled_from((1, 8, 192, 193)),
        "user": st.just("u"),
        "logit_bias_vocabulary": SAMPLING["logit_bias_vocabulary"],
    },
)
_documents: st.SearchStrategy[Any] = st.one_of(
    _texts, st.fixed_dictionaries({"text": _texts}, optional={"title": _texts})
)
rerank = _with_fields(
    st.fixed_dictionaries(
        {
            "model": st.just("m"),
            "query": _texts,
            "documents": st.lists(_documents, min_size=1, max_size=9),
        }
    ),
    {"top_n": st.sampled_from((1, 5, 100)), "return_documents": st.booleans()},
)

BODIES: dict[str, st.SearchStrategy[Any]] = {
    "/v1/completions": completion,
    "/v1/chat/completions": chat,
    "/v1/embeddings": embeddings,
    "/v1/rerank": rerank,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def _bounded(body: bytes) -> bytes:
    return body if len(body) <= MOST_BYTES else json.dumps({"model": "m"}).encode()


@st.composite
def body(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a path and a body for it."""
    path = draw(st.sampled_from(("/v1/completions",) * 4 + ("/v1/chat/completions",) * 4
                                + ("/v1/embeddings",) * 2
                                + ("/v1/rerank", "/tokenize", "/detokenize")))  # fmt: skip
    value = draw(mutated(BODIES[path]))
    data = written(value, draw(st.booleans()))
    if draw(st.integers(0, 40)) == 0:
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(max_size=4)) + data[at + draw(st.integers(0, 3)) :]
    return path, _bounded(data)
