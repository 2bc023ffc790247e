"""The reasoning that a Messages request asks for (contract of messages, 5.1 and 5.2)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias

from ...backends.base import Model
from ...schemas.anthropic.messages import CountTokensRequest
from ..chat.templates import AS_USUAL, Reasoning, can_switch
from ..errors import InvalidRequest

# Reasoning is omitted, sealed without its text, or shown.
ReasoningDisplay: TypeAlias = Literal["hidden", "omitted", "shown"]

_KINDS = ("enabled", "adaptive", "between_tools", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_LEAST_BUDGET = 1_024
_MEMBERS = frozenset({"type", "budget_tokens", "display"})


class Thinking(NamedTuple):
    """The reasoning of a request.

    Args:
        omitted: True if the response has the reasoning in signatures only.
        ignored: the paths of fields that have no effect.
    """

    reasoning: Reasoning = AS_USUAL
    omitted: bool = False
    ignored: tuple[str, ...] = ()


_NONE = Thinking()


def thinking_of(request: CountTokensRequest, model: Model) -> Thinking:
    """Return what a request asks for; without `thinking`, a switch in the template is off.

    Raises:
        InvalidRequest: the budget is missing, too small, or not smaller than `max_tokens`.
    """
    source = model.template or ""
    config = request.output_config
    effort = None if config is None else config.effort
    if request.thinking is None and effort is None:
        return Thinking(Reasoning(enabled=False)) if can_switch(source) else _NONE
    ignored: list[str] = []
    enabled, omitted = _switch(request, request.thinking, ignored)
    if enabled is None and can_switch(source):
        enabled = False
    if effort is not None:
        known = _known(effort, source)
        if known is None:
            ignored.append("output_config.effort")
        effort = known
    reasoning = AS_USUAL if effort is None and enabled is None else Reasoning(effort, enabled)
    return Thinking(reasoning, omitted, tuple(ignored))


def _switch(
    request: CountTokensRequest, thinking: Any, ignored: list[str]
) -> tuple[bool | None, bool]:
    """Return True or False to switch reasoning, and True if its text is omitted."""
    if thinking is None:
        return None, False
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in _KINDS:
        ignored.append("thinking")
        return None, False
    ignored += [f"thinking.{name}" for name in thinking.keys() - _MEMBERS]
    if kind == "disabled":
        return False, False
    if kind == "enabled":
        _check_budget(request, thinking)
        # No engine ends reasoning after a number of tokens.
        ignored.append("thinking.budget_tokens")
    return True, thinking.get("display") == "omitted"


def _check_budget(request: CountTokensRequest, thinking: dict[str, Any]) -> None:
    path, budget = "thinking.enabled.budget_tokens", thinking.get("budget_tokens")
    if budget is None:
        raise InvalidRequest(f"{path}: Field required")
    if type(budget) is not int:
        raise InvalidRequest(f"{path}: Input should be a valid integer")
    if budget < _LEAST_BUDGET:
        raise InvalidRequest(f"{path}: Input should be greater than or equal to {_LEAST_BUDGET}")
    most = request.max_tokens
    if most is not None and budget >= most and not request.tools:
        raise InvalidRequest("`max_tokens` must be greater than `thinking.budget_tokens`")


def _known(effort: str, source: str) -> str | None:
    """Return an effort that a template knows, for one of Anthropic's; None if it knows none."""
    if "reasoning_effort" not in source or effort not in _EFFORTS:
        return None
    at = _EFFORTS.index(effort)
    while at > 2 and f"'{_EFFORTS[at]}'" not in source and f'"{_EFFORTS[at]}"' not in source:
        at -= 1
    return _EFFORTS[at]
