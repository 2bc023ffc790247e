"""Tests of rejections, and of the checks of OpenAI's limits on servers with and without these."""

from __future__ import annotations

import itertools
import json
from typing import Any, cast

import httpx2
import pytest
from latimer.conformance.check import Fail, Unsupported, all_checks
from latimer.conformance.checks.hosted import BEYOND, STRONG
from latimer.conformance.runner import Settings, judge, run
from latimer.conformance.target import Api, Reply, expect_finite
from starlette.responses import JSONResponse
from suite.server import Fault, Server
from suite.trial import HEADERS, Direct, Stage
from support.servers import serving

CLIPPED = [*(f"errors.{name}" for name, *_ in BEYOND), "responses.minimum"]
IDS = [
    *CLIPPED,
    *(f"errors.{name}" for name, *_ in STRONG),
    "errors.missing-model",
    "chat.metadata-alone",
    "tools.choice-alone",
    "tools.empty-list",
    "tools.too-many",
    "audio.input-long",
    "audio.speed-below",
    "audio.speed-above",
]
CHECKS = {check.id: check for check in all_checks()}


# The fields of a request that a server without OpenAI's limits takes as they are.
LIFTED = ("stop", "logprobs", "max_output_tokens", "input", "speed")


class Clips(Fault):
    """A server that accepts requests beyond OpenAI's limits, and clips them to these."""

    @staticmethod
    def request(path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request within the limits that also has the fields of the original."""
        within = {"model": "org/toy", **body, "asked": body}
        if isinstance(body.get("stop"), list):
            within["stop"] = body["stop"][:4]
        if body.get("max_tokens") == -1:
            within["max_tokens"] = None
        if type(body.get("max_output_tokens")) is int:
            within["max_output_tokens"] = max(body["max_output_tokens"], 16)
        if type(body.get("logprobs")) is int:
            within["logprobs"] = min(body["logprobs"], 5)
        if isinstance(body.get("input"), str):
            within["input"] = body["input"][:4096]
        if type(body.get("speed")) is float:
            within["speed"] = min(max(body["speed"], 0.25), 4.0)
        if len(body.get("tools") or ()) > 128:
            within["tools"] = body["tools"][:128]
        if not body.get("tools"):
            within.pop("tool_choice", None)
        for _, _, changes, field, _ in STRONG:
            if changes[field] == within.get(field):
                del within[field]
        within.pop("metadata", None)
        if "messages" in within:
            within["messages"] = [
                {name: value for name, value in message.items() if value != []}
                for message in within["messages"]
            ]
        return within


class Serves(Clips):
    """A server that serves requests beyond OpenAI's limits."""

    @staticmethod
    def valid(path: str, sent: dict[str, Any]) -> dict[str, Any]:
        """Return the original fields of a request that was found valid."""
        asked = sent["asked"]
        found = {**sent, **{name: asked[name] for name in LIFTED if name in asked}}
        if asked.get("max_tokens") == -1:
            found["max_tokens"] = 400
        return found


async def outcome(name: str, fault: Fault, hosted: bool) -> str:
    """Return the verdict of a check on a toy server."""
    stage = Stage()
    stage.servers["0"] = Server(fault, itertools.count(1_700_000_000).__next__)
    client = cast(httpx2.AsyncClient, Direct(stage, httpx2.URL("http://toy/0/v1/"), HEADERS))
    api = Api(client, "org/toy", "demo", hosted=hosted)
    return (await run(CHECKS[name], lambda: api, tries=1)).outcome


@pytest.mark.parametrize("name", IDS)
async def test_a_limit_may_be_openais_or_none(name: str) -> None:
    """By default OpenAI's rejection passes, and so does a correct answer."""
    assert await outcome(name, Fault(), False) == "pass"
    assert await outcome(name, Serves(), False) == "pass"


@pytest.mark.parametrize("name", CLIPPED)
async def test_a_clipped_request_never_passes(name: str) -> None:
    """The answer to a request that was clipped to OpenAI's limits fails."""
    assert await outcome(name, Clips(), False) == "fail"


@pytest.mark.parametrize("name", IDS)
async def test_openais_limits_can_be_required(name: str) -> None:
    """With `--limits openai` only OpenAI's rejection passes."""
    assert await outcome(name, Fault(), True) == "pass"
    assert await outcome(name, Serves(), True) == "fail"


ALLOWED = 'response_format type must be one of "text" or "json_object", but got: regex'


def reply(message: str, status: int = 400, param: str | None = None) -> Reply:
    """Return an error reply to a chat completion request with a response format."""
    error = {"code": status, "message": message, "type": "invalid_request_error", "param": param}
    body = json.dumps({"error": error}).encode()
    return Reply(status, httpx2.Headers(), body, "/chat/completions", {"response_format": {}})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ALLOWED, None),
        ("response_format is not supported", None),
        ("wrong", "response_format.type"),
    ],
)
def test_a_rejection_names_the_field(message: str, param: str | None) -> None:
    """A 400 that names a field of the request as param, or says what is allowed, is clean."""
    with pytest.raises(Unsupported):
        reply(message, param=param).ok()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"", "the endpoint /responses does not exist: status 404"),
        (404, b'{"error": {"message": "no"}}',
         "the endpoint /responses does not exist: status 404, 'no'"),
        (501, b'{"error": {"message": "Later.", "code": "unsupported_endpoint"}}',
         "the endpoint /responses does not exist: status 501, 'Later.'"),
        (404, b'{"error": {"message": "no", "param": "include"}}', "no"),
        (400, b'{"error": {"message": "no", "param": "include"}}', "no"),
    ],
)  # fmt: skip
def test_a_missing_endpoint_is_named(status: int, body: bytes, reason: str) -> None:
    """The reason of an endpoint that is missing has its path, the status, and the message.

    That of a field is the message.
    """
    found = Reply(status, httpx2.Headers(), body, "/responses", {"include": []})
    with pytest.raises(Unsupported) as rejection:
        found.ok()
    assert str(rejection.value) == reason


def test_a_log_probability_above_0_is_described_as_such() -> None:
    """The message names the bounds of log-probabilities, and the values that are outside."""
    expect_finite([0, -9.5, 1e-7])
    with pytest.raises(Fail) as failure:
        expect_finite([-0.5, 0.5, None, -99999.0])
    words = "expected log-probabilities above -10000 and at most 0, but got [0.5, None, -99999.0]"
    assert str(failure.value) == words


@pytest.mark.parametrize(
    ("message", "status"),
    [("regex must be one of", 400), ("bad response_format", 400), (ALLOWED, 500)],
)
def test_other_errors_are_failures(message: str, status: int) -> None:
    """An error that names no field, or says nothing about support, or is a 500, is a failure."""
    with pytest.raises(Fail):
        reply(message, status).ok()


class WithoutLegacy:
    """The toy server without `/completions`, whose 404 has an error object."""

    def __init__(self) -> None:
        self._server = Server()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/completions":
            error = {"message": "Not found", "type": "not_found", "param": None, "code": None}
            await JSONResponse({"error": error}, 404)(scope, receive, send)
        else:
            await self._server(scope, receive, send)


async def test_a_server_may_lack_legacy_completions() -> None:
    """Checks that need them are unsupported, and say why; those of unknown paths still judge."""
    groups = ("completions", "errors", "headers", "models", "security", "transport")
    checks = [check for check in CHECKS.values() if check.group in groups]
    with serving(WithoutLegacy) as address:
        settings = Settings(f"{address}/v1", "org/toy", "sk-right", "demo", hosted=True)
        verdicts = {one.check.id: one for one in await judge(settings, checks)}
    lacking = [one for one in verdicts.values() if one.outcome != "pass"]
    assert {(one.outcome, one.detail) for one in lacking} == {
        ("unsupported", "the endpoint /completions does not exist: status 404")
    }, [(one.check.id, one.outcome, one.detail) for one in lacking]
    assert "errors.unknown-model" in {one.check.id for one in lacking}
    judged = "transport.unknown-path", "errors.keys", "errors.type", "errors.messages-empty"
    assert [verdicts[name].outcome for name in judged] == ["pass"] * 4
