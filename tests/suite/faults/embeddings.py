"""Faults in embeddings."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from suite import embeddings
from suite.faults.base import broken, only, refuse, take, without
from suite.server import EMBEDDINGS


def reply(change: Any) -> Any:
    """Return a reply hook that changes the body of embeddings in place."""
    return only(EMBEDDINGS, lambda body: (change(body), body)[1])


def _given(when: Any) -> Any:
    return lambda body: when({"input": None, **body})


def items(change: Any) -> Any:
    """Return a reply hook that changes each embedding in place."""
    return reply(lambda body: [change(item) for item in body["data"]])


broken("embeddings-object", reply=reply(lambda body: body.update(object="embeddings")))
broken("embeddings-item-object", reply=items(lambda item: item.update(object="vector")))
broken("embeddings-model", reply=reply(lambda body: body.pop("model")))
broken("embeddings-nested", reply=items(lambda item: item.update(embedding=[item["embedding"]])))
broken(
    "embeddings-usage-zero",
    reply=reply(lambda body: body.update(usage={"prompt_tokens": 0, "total_tokens": 0})),
)
broken(
    "embeddings-usage-first",
    reply=reply(lambda body: body["usage"].update(
        {name: count // len(body["data"]) for name, count in body["usage"].items()})),
)  # fmt: skip
broken("embeddings-reversed", reply=reply(lambda body: body["data"].reverse()))
broken("embeddings-index-zero", reply=items(lambda item: item.update(index=0)))
broken(
    "embeddings-mixed",
    reply=reply(lambda body: _mix(body["data"])),
)
broken("embeddings-constant", reply=items(lambda item: _constant(item)))
broken(
    "embeddings-ids-each",
    valid=lambda path, body: (
        {**body, "input": [[token] for token in body["input"]]}
        if path == EMBEDDINGS and isinstance(body["input"][0], int) and len(body["input"]) > 2
        else body
    ),
)
broken(
    "embeddings-ids-joined",
    valid=lambda path, body: (
        {**body, "input": [[token for one in body["input"] for token in one]]}
        if path == EMBEDDINGS and isinstance(body["input"][0], list)
        else body
    ),
)
broken(
    "embeddings-no-base64",
    valid=lambda path, body: without("encoding_format")(path, body) if path == EMBEDDINGS else body,
)
broken("embeddings-big-endian", reply=items(lambda item: _recode(item, ">f")))
broken("embeddings-doubles", reply=items(lambda item: _recode(item, "<d")))
broken("embeddings-counted", reply=lambda path, body, sent: _counted(path, body))
broken("embeddings-long", reply=items(lambda item: _scaled(item)))
broken(
    "embeddings-dimensions-ignored",
    valid=lambda path, body: {**body, "dimensions": None} if path == EMBEDDINGS else body,
)
broken("embeddings-user-refused", request=refuse(lambda body: "user" in body, EMBEDDINGS))
broken(
    "embeddings-hundred",
    request=refuse(lambda body: isinstance(body.get("input"), list)
                   and 100 < len(body["input"]) < 300, EMBEDDINGS),
)  # fmt: skip
for _name, _when in (
    ("cut", lambda body: isinstance(body["input"], str) and len(body["input"]) > 9000),
    ("empty-string", lambda body: body["input"] == ""),
    ("empty-list", lambda body: body["input"] == []),
    ("empty-item", lambda body: isinstance(body["input"], list) and "" in body["input"]),
    ("many", lambda body: isinstance(body["input"], list) and len(body["input"]) > 2000),
    ("missing", lambda body: body["input"] is None),
    ("number", lambda body: body["input"] == 5),
    ("mixed-list", lambda body: body["input"] == ["a", 5]),
    ("unknown-id", lambda body: body["input"] == [2_000_000_000]),
):
    broken(
        f"embeddings-{_name}-taken",
        request=take(_given(_when), EMBEDDINGS, input="a"),
    )
broken(
    "embeddings-no-dimensions-taken",
    request=take(lambda body: body.get("dimensions") == 0, EMBEDDINGS, dimensions=None),
)
broken(
    "embeddings-hex-taken",
    request=take(lambda body: body.get("encoding_format") == "hex", EMBEDDINGS,
                 encoding_format="float"),
)  # fmt: skip
_count = [0]


def _mix(data: list[Any]) -> None:
    if len(data) > 1:
        one, other = data[0], data[1]
        one["embedding"], other["embedding"] = other["embedding"], one["embedding"]


def _constant(item: Any) -> None:
    if isinstance(item["embedding"], list):
        item["embedding"] = [1.0] + [0.0] * (len(item["embedding"]) - 1)


def _floats(text: str) -> list[float]:
    return list(struct.unpack(f"<{len(base64.b64decode(text)) // 4}f", base64.b64decode(text)))


def _recode(item: Any, form: str) -> None:
    if isinstance(item["embedding"], str):
        data = b"".join(struct.pack(form, value) for value in _floats(item["embedding"]))
        item["embedding"] = base64.b64encode(data).decode()


def _counted(path: str, body: Any) -> Any:
    """Replace each embedding with a different one every time."""
    if path != EMBEDDINGS:
        return body
    _count[0] += 1
    for item in body["data"]:
        if isinstance(item["embedding"], list):
            again = {"input": json.dumps(_count), "model": "org/toy"}
            item["embedding"] = embeddings.answer(again, [again["input"]])["data"][0]["embedding"]
    return body


def _scaled(item: Any) -> None:
    if isinstance(item["embedding"], list):
        item["embedding"] = [3 * value for value in item["embedding"]]
