"""The response object (contract, sections 3 and 6)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.openai.common import ErrorBody, FinishReason, Usage
from ...schemas.openai.messages import TextFormat
from ...schemas.openai.responses import FlatFormat, FlatSchemaFormat, ResponseRequest
from ..generation.sinks import Result
from .output import Output, Shape
from .tools import Tools

# The status and the details of a response, by the reason for its end; others are complete.
_CUT: Mapping[str, tuple[str, dict[str, str]]] = {
    "length": ("incomplete", {"reason": "max_output_tokens"}),
}
# The states of a response that another one can continue.
USABLE = frozenset({"completed", "incomplete"})
# The codes of a failed response in OpenAI's published type, by the type of an error here; clients
# do not send a request with an invalid prompt again.
_FAILURES = {"requests": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
_FAILURE = "server_error"


@dataclass(slots=True)
class Draft:
    """A response that is being made.

    Args:
        begun: the response object at its beginning, with every key.
        tier: the `service_tier` at its end.
    """

    begun: Mapping[str, Any]
    shape: Shape
    tier: str

    @property
    def id(self) -> str:
        """The id of the response."""
        return str(self.begun["id"])

    def whole(self, results: Sequence[Result], usage: Usage) -> dict[str, Any]:
        """Return the response object of a plain response."""
        output = Output(self.id, self.shape)
        for delta in results[0].deltas:
            output.add(delta)
        reason = results[0].finish_reason
        output.end(reason)
        return self.ended(output.items, reason, usage)

    def ended(
        self, items: Sequence[Mapping[str, Any]], reason: FinishReason, usage: Usage
    ) -> dict[str, Any]:
        """Return the response object with its output and its usage."""
        status, details = _CUT.get(reason, ("completed", None))
        return {
            **self.begun,
            "status": status,
            "completed_at": None if details else int(time.time()),
            "incomplete_details": details,
            "service_tier": self.tier,
            "output": items,
            "usage": usage_of(usage),
        }

    def failed(
        self, items: Sequence[Mapping[str, Any]], failure: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the response object of a stream that an error ended, with its finished items."""
        return {
            **self.begun,
            "status": "failed",
            "error": failure,
            "service_tier": self.tier,
            "output": items,
        }

    def cancelled(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the response object of a response that its client cancelled."""
        return {**self.begun, "status": "cancelled", "service_tier": self.tier, "output": items}


def begun(
    request: ResponseRequest, place: tuple[str, int], model: str, tools: Tools, stored: bool
) -> dict[str, Any]:
    """Return the response object at its beginning, with every key.

    Args:
        place: the id of the response, and its time in microseconds since 1970.
        stored: True if the response is stored.
    """
    text, reasoning = request.text, request.reasoning
    found = {
        "id": place[0],
        "object": "response",
        "created_at": place[1] // 1_000_000,
        "status": "in_progress",
        "background": bool(request.background),
        "completed_at": None,
        "error": None,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "presence_penalty": request.presence_penalty or 0.0,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or "auto",
        "store": stored,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "text": {
            "format": _echoed(None if text is None else text.format),
            "verbosity": (None if text is None else text.verbosity) or "medium",
        },
        "tool_choice": tools.choice_echo,
        "tools": tools.echo,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
    if request.conversation is not None:
        found["conversation"] = {"id": request.conversation.id}
    return found


def _echoed(form: FlatFormat | None) -> dict[str, Any]:
    """Return `text.format` as the response has it."""
    if not isinstance(form, FlatSchemaFormat):
        return {"type": "text" if form is None or isinstance(form, TextFormat) else form.type}
    return {
        "type": form.type,
        "name": form.name,
        "schema": form.schema_,
        "strict": bool(form.strict),
        "description": form.description,
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a chat response as those of a response."""
    prompt, completion = usage["prompt_tokens_details"], usage["completion_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cache_write_tokens": prompt["cache_write_tokens"],
            "cached_tokens": prompt["cached_tokens"],
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
    }


def failure_of(error: ErrorBody) -> dict[str, str]:
    """Return the `error` of a failed response, which has fewer codes than other errors."""
    return {"code": _FAILURES.get(error["type"], _FAILURE), "message": error["message"]}
