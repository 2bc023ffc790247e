"""Fields of other servers: vLLM, llama.cpp, Ollama, koboldcpp, LM Studio, OpenRouter and more.

One table has every field with its verdict. Only requests with fields that Latimer's schema lacks
are looked up here. `docs/dialects.md` shows the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schemas.openai.common import MOVED
from . import constraints, ends, prompts, sampling, serving
from .fields import Draft, Field, Where

__all__ = [
    "GROUPS", "REFUSED_IN_MESSAGES", "TABLES", "Draft", "Field", "Where", "replaced", "table",
]  # fmt: skip

GROUPS: Mapping[str, tuple[Field, ...]] = {
    "Constraints": constraints.FIELDS,
    "Sampling": sampling.FIELDS,
    "Length, end and reply": ends.FIELDS,
    "Reasoning and prompts": prompts.FIELDS,
    "Caches, models and operation": serving.FIELDS,
}

# The hint for each field of a message that is refused unless it is empty.
REFUSED_IN_MESSAGES: Mapping[str, str] = {"images": prompts.FILES}


# Fields that the Responses API has itself, or has under another name.
_RESPONSES_OWN = frozenset((*MOVED, "reasoning"))


def _on(where: Where) -> Mapping[str, Field]:
    fields = [field for group in GROUPS.values() for field in group]
    if where != "responses":
        return {field.name: field for field in fields if field.on in (None, where)}
    # Its own rows replace those of chat.
    return {
        field.name: field
        for places in ((None, "chat"), ("responses",))
        for field in fields
        if field.on in places and field.name.partition(".")[0] not in _RESPONSES_OWN
    }


# The fields of each endpoint by name; a request's fields are replaced in this order.
TABLES: Mapping[Where, Mapping[str, Field]] = {
    "chat": _on("chat"),
    "completions": _on("completions"),
    "responses": _on("responses"),
}
_PLACES: Mapping[Where, Mapping[str, int]] = {
    where: {name: place for place, name in enumerate(fields)} for where, fields in TABLES.items()
}


def replaced(body: Mapping[str, Any], extra: Mapping[str, Any], where: Where) -> Draft | None:
    """Return a request with Latimer's own fields; None if all of its other fields are unknown.

    Args:
        extra: the fields of the body that the endpoint's schema lacks.

    Raises:
        InvalidRequest: a field is refused, or contradicts another one.
    """
    fields = TABLES[where]
    known = sorted((name for name in extra if name in fields), key=_PLACES[where].__getitem__)
    if not known:
        return None
    draft = Draft(body, fields, where)
    for name in known:
        del draft.body[name]
    for name in known:
        draft.take(name, extra[name])
    return draft


def table() -> str:
    """Return all fields as tables in Markdown."""
    lines: list[str] = []
    for title, fields in GROUPS.items():
        lines += [
            f"## {title}", "",
            "| field | of | endpoint | verdict | becomes, or hint, or reason |",
            "|---|---|---|---|---|",
        ]  # fmt: skip
        for field in fields:
            note = field.note.replace("|", "\\|")
            lines.append(
                f"| `{field.name}` | {field.servers} | {field.on or 'all'} | {field.verdict} | "
                f"{note} |"
            )
        lines.append("")
    return "\n".join(lines)
