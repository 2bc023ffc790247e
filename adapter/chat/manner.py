"""A model's conventions for tools, reasoning and roles, detected once from its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.base import Model
from ...backends.offload import Memo
from .conversation import FUNCTION, Style, style_of
from .folding import Order
from .order import order_of
from .reasoning import Tags, tags_of


@dataclass(slots=True)
class Manner:
    """A model's conventions.

    Args:
        style: the way in which its template shows tools and the model writes tool calls.
        tags: the tags around its reasoning; None for a model without reasoning.
        order: the orders of messages that its template accepts.
        order_with_tools: the same in a conversation with tools.
    """

    style: Style
    tags: Tags | None
    order: Order
    order_with_tools: Order


def manner_of(model: Model) -> Manner:
    """Return the conventions of a model."""
    style = style_of(model)
    order = order_of(model, style)
    with_tools = order_of(model, style, [FUNCTION]) if style.native else order
    tags = tags_of(model.template) if model.template is not None else None
    return Manner(style, tags, order, with_tools)


# The template takes most of the memory of an entry.
_manners: Memo[Model, Manner] = Memo(1 << 20, lambda model, _: len(model.template or "") + 1_000)


async def known_manner_of(model: Model) -> Manner:
    """Return the cached conventions of a model; compiling and trying a template takes 0.1 s."""
    return await _manners.get(model, lambda: manner_of(model))
