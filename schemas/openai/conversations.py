"""`/v1/conversations`: requests and replies (contract of responses, section 1)."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from typing_extensions import TypedDict

from .common import Metadata, Request, empty_string, invalid, too_long, unexpected
from .response_items import LONGEST_ID, Item, ItemReference

# OpenAI's limit for the items of a request.
MOST = 20
# Other characters have a meaning in the path of an item.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _check_id(value: object) -> object:
    name = value.get("id") if isinstance(value, dict) else None
    if name is None:
        return value
    if not isinstance(name, str):
        raise unexpected(name, "a string", ".id")
    if not name:
        raise empty_string(".id")
    if len(name) > LONGEST_ID:
        raise too_long("string", LONGEST_ID, len(name), ".id")
    if not _NAME.fullmatch(name):
        raise invalid(
            "Invalid '{param}': expected letters, digits, underscores and dashes only.",
            "invalid_value",
            ".id",
        )
    return value


def _check_whole(item: Item) -> Item:
    if isinstance(item, ItemReference):
        raise invalid(
            "Invalid '{param}': a conversation takes no references to items. Send the item itself.",
            "invalid_value",
        )
    return item


Items = Annotated[
    list[Annotated[Item, BeforeValidator(_check_id), AfterValidator(_check_whole)]],
    Field(max_length=MOST),
]


class CreateConversation(Request):
    """Body of `POST /v1/conversations`."""

    items: Items | None = None
    metadata: Metadata | None = None


class AddItems(Request):
    """Body of `POST /v1/conversations/{id}/items`."""

    items: Items


class Conversation(TypedDict):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    """The confirmation of a deletion."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]
