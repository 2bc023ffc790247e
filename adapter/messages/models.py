"""Models in Anthropic's form (contract of messages, section 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ...backends.base import Model
from ...backends.errors import shortened
from ..errors import InvalidRequest

# Anthropic's bounds of `limit`, and its default.
_LEAST, _MOST, _DEFAULT = 1, 1_000, 20
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
# The ways of reasoning; a template with a switch has all of them.
_KINDS = ("adaptive", "between_tools", "disabled", "enabled")
_SERVER_TOOLS = ("code_execution", "web_search")


def info_of(
    name: str, model: Model | None = None, reasons: bool = False, structures: bool = False
) -> dict[str, Any]:
    """Return Anthropic's object for a model.

    Args:
        model: None if no engine has described it.
        reasons: True if its template has reasoning.
        structures: True if its engine enforces JSON schemas.
    """
    created = 0 if model is None else model.modified
    found: dict[str, Any] = {
        "type": "model",
        "id": name,
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    if model is None:
        return found
    has_effort = "reasoning_effort" in (model.template or "")
    return {
        **found,
        "max_input_tokens": model.context,
        "max_tokens": model.context,
        "capabilities": {
            "batch": _supported(False),
            "citations": _supported(False),
            "code_execution": _supported(False),
            "context_management": _supported(False),
            "effort": {
                **_supported(has_effort),
                **{effort: _supported(has_effort) for effort in _EFFORTS},
            },
            "image_input": _supported("image" in model.media),
            "pdf_input": _supported(True),
            "server_tools": {
                **_supported(False),
                **{name: _supported(False) for name in _SERVER_TOOLS},
            },
            "structured_outputs": _supported(structures),
            "thinking": {
                **_supported(reasons),
                "types": {kind: _supported(reasons) for kind in _KINDS},
            },
        },
    }


def _supported(value: bool) -> dict[str, bool]:
    return {"supported": value}


def page_of(infos: Sequence[dict[str, Any]], query: Mapping[str, Any]) -> dict[str, Any]:
    """Return a page of models.

    Args:
        query: `limit`, and `after_id` or `before_id`, the id that the page follows or precedes.

    Raises:
        InvalidRequest: `limit` is not a number in its bounds, or no model has such an id.
    """
    limit = _limit_of(query.get("limit"))
    names = [info["id"] for info in infos]
    start, end = 0, len(infos)
    if (after := query.get("after_id")) is not None:
        start = _place(names, after, "after_id") + 1
    if (before := query.get("before_id")) is not None:
        end = _place(names, before, "before_id")
        page = infos[max(start, end - limit) : end]
        has_more = end - limit > start
    else:
        page = infos[start : start + limit]
        has_more = start + limit < end
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def _place(names: Sequence[str], name: str, field: str) -> int:
    if name not in names:
        raise InvalidRequest(f"{field}: No model has the id '{shortened(name)}'")
    return names.index(name)


def _limit_of(text: object) -> int:
    if text is None:
        return _DEFAULT
    try:
        limit = int(str(text))
    except ValueError:
        raise InvalidRequest("limit: Input should be a valid integer") from None
    if limit < _LEAST:
        raise InvalidRequest(f"limit: Input should be greater than or equal to {_LEAST}")
    if limit > _MOST:
        raise InvalidRequest(f"limit: Input should be less than or equal to {_MOST}")
    return limit
