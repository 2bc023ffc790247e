"""Tests that a wrong argument of an adapter is an error when the adapter is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter, OpenAIMiddleware
from latimer.adapter.arguments import DEFAULTS
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.origins import LocalRules
from latimer.adapter.request_log import RequestLog
from latimer.backends.llama_server import LlamaServer
from starlette.applications import Starlette
from starlette.testclient import TestClient
from support.engines.echo import Echo

SECRET = "s3cr3t"
DIGEST = "sha256:" + "0" * 64
Make = Callable[..., object]


def adapter(**options: Any) -> OpenAIAdapter:
    """Return an adapter with some options."""
    return OpenAIAdapter(Echo(), **options)


def middleware(**options: Any) -> OpenAIMiddleware:
    """Return a middleware with some options."""
    return OpenAIMiddleware(Starlette(), Echo(), **options)


def complaint(make: Make = adapter, /, **options: Any) -> str:
    """Return the error for some options, which has no wording of pydantic and no secret."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its message is compared)
        make(**options)
    message = str(caught.value)
    wordings = (SECRET, "\n", "Input should", "type=", "pydantic")
    assert not [word for word in wordings if word in message]
    return message


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "is empty. Set the variable that it comes from, or omit api_keys to use no key."),
        (None, "is empty. Set the variable that it comes from, or omit api_keys to use no key."),
        (f"{SECRET}\n", "contains a line break or another control character."),
        (f"{SECRET} ", "starts or ends with whitespace."),
    ],
)
@pytest.mark.parametrize("make", [adapter, middleware])
def test_a_key_that_no_request_can_send_starts_no_server(
    make: Make, key: str | None, reason: str
) -> None:
    """An empty key, as of a variable that is not set, leaves no server open without a message."""
    assert complaint(make, api_keys=[key]).startswith(f"api_keys: a key {reason}")
    assert complaint(make, api_keys=["sk-one", key]).startswith(f"api_keys: a key {reason}")


def test_no_keys_are_none() -> None:
    """An empty list of keys is an error; None says that there are no keys."""
    empty = "api_keys: the list is empty. Omit api_keys to serve without API keys"
    assert complaint(api_keys=[]) == empty
    assert complaint(api_keys=(key for key in [""] if key)) == empty
    with TestClient(adapter(api_keys=None)) as client:
        assert client.get("/v1/models").is_success


@pytest.mark.parametrize("keys", [("sk-one",), {"sk-one"}, iter(["sk-one"])])
def test_keys_come_from_any_iterable(keys: Any) -> None:
    """Keys of a tuple, a set and an iterator are those that clients need."""
    with TestClient(adapter(api_keys=keys)) as client:
        assert client.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer sk-one"}
        assert client.get("/v1/models", headers=key).is_success


@pytest.mark.parametrize("name", ["api_keys", "model_names", "cors_origins", "prefixes"])
@pytest.mark.parametrize("value", [SECRET, SECRET.encode(), 5, {"a": "b"}])
def test_a_string_is_no_list(name: str, value: object) -> None:
    """A string in place of a list is an error: each of its letters would be an element."""
    said = complaint(**{name: value})
    assert said.startswith(f"{name} must be a list of strings: pass a list, such as ['")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"api_keys": [5]}, "api_keys[0] must be a string"),
        ({"api_keys": [SECRET.encode()]}, "api_keys[0] must be a string"),
        ({"model_names": ["a", 5]}, "model_names[1] must be a string, not 5"),
        ({"model_names": None}, "model_names must be a list of strings: pass"),
        ({"model_names": [" "]}, "model_names: a model name is empty"),
        ({"model_names": ["\udcf6"]}, "model_names: a model name is UTF-8 text"),
        ({"any_model": 1}, "any_model must be true or false, not 1"),
        ({"cors_origins": ["chat.example"]}, "cors_origins: 'chat.example' is not an origin."),
        ({"cors_origins": ["https://a.example/"]}, "cors_origins: 'https://a.example/' is not"),
        ({"local_rules": True}, "local_rules must be an object such as LocalRules(), not a value"),
        ({"local_rules": LocalRules}, "local_rules must be an object such as LocalRules(), not "),
        ({"max_body": True}, "max_body must be a whole number, not true"),
        ({"max_body": -1}, "max_body must be at least 1, not -1"),
        ({"strict": "yes"}, "strict must be true or false, not 'yes'"),
        ({"limits": "hosted"}, "limits must be one of engine, openai, not 'hosted'"),
        ({"chat_format": "x"}, "chat_format: unknown format 'x'; supported formats are alpaca, "),
        (
            {"logit_bias_vocabulary": "x"},
            "logit_bias_vocabulary: Invalid value: 'x'. Supported values are: 'cl100k_base', ",
        ),
        ({"keepalive": "10"}, "keepalive must be a number, not '10'"),
        ({"keepalive": True}, "keepalive must be a number, not true"),
        ({"keepalive": -1}, "keepalive must be at least 0"),
        ({"keepalive": float("nan")}, "keepalive must be a number, not nan"),
        ({"websocket_lifetime": -5}, "websocket_lifetime must be at least 0"),
        (
            {"reasoning_field": "x"},
            "reasoning_field must be one of reasoning_content, reasoning, not 'x'",
        ),
        ({"reasoning_key": SECRET.encode()}, "reasoning_key must be a string"),
        ({"reasoning_key": ""}, "reasoning_key must not be empty"),
        ({"store_required": "yes"}, "store_required must be true or false, not 'yes'"),
        ({"metrics": "off"}, "metrics must be true or false, not 'off'"),
        ({"metrics_names": "x"}, "metrics_names must be one of latimer, vllm, not 'x'"),
        ({"playground": "on"}, "playground must be true or false, not 'on'"),
        ({"speaker": "piper:x"}, "speaker must be an object such as speaker_of('piper:voice."),
        ({"transcriber": "whisper"}, "transcriber must be an object such as transcriber_of('"),
        ({"keys": ["a"]}, "keys must be a table"),
        ({"keys": {"a": {}}}, "keys.a.digest is missing"),
        ({"keys": {"a": {"digest": SECRET}}}, "keys.a.digest: expected sha256: and 64 "),
        ({"keys": {"a": {"digest": DIGEST, "x": 1}}}, "keys.a.x: unknown setting"),
        ({"keys": {1: {"digest": DIGEST}}}, "keys.1: a name must be a string"),
        ({"keys": {"a b": {"digest": DIGEST}}}, "keys.a b: a name has up to 64 letters"),
        ({"admission": {"store": "x://"}}, "admission.store: expected memory, or a URL"),
        ({"admission": {"stor": "x"}}, "admission.stor: unknown setting (did you mean 'store'?)"),
        ({"observers": None}, "observers must be a list: pass a list, such as [RequestLog("),
        ({"observers": [None]}, "observers must be objects with the base class Observer, such as"),
        ({"observers": [RequestLog]}, "observers must be objects with the base class Observer, "),
        ({"prefixes": ("v1",)}, "prefixes: 'v1' is not the beginning of a path. Expected '' or"),
        ({"prefixes": ("/v1/",)}, "prefixes: '/v1/' is not the beginning of a path."),
        ({"prefixes": ("/{tenant}/v1",)}, "prefixes: '/{tenant}/v1' is not the beginning of"),
        ({"prefixes": (None,)}, "prefixes: None is not the beginning of a path."),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], said: str) -> None:
    """A wrong value is an error that names the option, in the words of the settings."""
    assert complaint(**options).startswith(said)


def test_values_of_every_kind_are_accepted() -> None:
    """The defaults are allowed values, and numbers that are shorter than those of a command."""
    adapter(**{name: value for name, value in DEFAULTS.items() if name != "api_keys"})
    adapter(keepalive=0.01, websocket_lifetime=0.1, reasoning_field=None, store_age=30)
    adapter(keys={"a": {"digest": DIGEST, "weight": 2}}, prefixes=["/ai/v1", ""])
    adapter(keys={"a": {"digest": DIGEST, "models": ("m",)}}, observers=iter([RequestLog(print)]))


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        ("http://127.0.0.1:8080", "not a value of type str"),
        (None, "not None"),
        (LlamaServer, "not the class LlamaServer: make an instance of it"),
        ([], "not an empty list"),
        ([Echo()], "not a list of something else"),
    ],
)
def test_a_backend_is_an_engine(backend: Any, said: str) -> None:
    """A value that is neither an engine nor a list of models is a TypeError that says so."""
    with pytest.raises(TypeError, match=rf"an engine of latimer\.backends, or .*{said}"):
        OpenAIAdapter(backend)
    OpenAIAdapter([ModelEntry(Echo())])


def test_keys_that_replace_others_are_checked() -> None:
    """A key that no request can send does not replace one, and neither does a wrong table."""
    app = adapter(api_keys=["sk-one"])
    assert complaint(lambda: app.replace_keys([""], {})).startswith("api_keys: a key is empty")
    wrong: dict[str, Any] = {"a": {}}
    assert complaint(lambda: app.replace_keys([], wrong)) == "keys.a.digest is missing"
    with TestClient(app) as client:
        assert client.get("/v1/models").status_code == 401
