"""Faults in embeddings."""

from __future__ import annotations

import base64
import itertools
import struct
from typing import Any

from suite import embeddings
from suite.faults.edits import Edit, drop, has, longer, put, refuses, reply, takes, turn, valid
from suite.server import EMBEDDINGS, Fault


def _reply(*edits: Edit) -> Fault:
    return reply(*edits, at=EMBEDDINGS)


def _valid(*edits: Edit) -> Fault:
    return valid(*edits, at=EMBEDDINGS)


def _floats(change: Edit) -> Fault:
    """Return a fault that changes embeddings that are lists."""
    return _reply(turn("data.*.embedding", lambda found: (
        change(found) if isinstance(found, list) else found)))  # fmt: skip


def _recoded(form: str) -> Fault:
    """Return a fault that encodes embeddings in base64 as other numbers."""

    def change(found: Any) -> Any:
        if not isinstance(found, str):
            return found
        numbers = struct.iter_unpack("<f", base64.b64decode(found))
        return base64.b64encode(b"".join(struct.pack(form, *one) for one in numbers)).decode()

    return _reply(turn("data.*.embedding", change))


def _mixed(data: list[Any]) -> list[Any]:
    """Return embeddings of which the first two are swapped."""
    swapped = [one["embedding"] for one in (*data[1::-1], *data[2:])]
    return [{**one, "embedding": other} for one, other in zip(data, swapped, strict=True)]


def _others(data: list[Any]) -> list[Any]:
    """Replace the embeddings of a reply by one that is different every time."""
    new = embeddings.answer({"model": "org/toy"}, [f"[{next(_numbers)}]"])["data"][0]
    return [
        {**one, "embedding": new["embedding"]} if isinstance(one["embedding"], list) else one
        for one in data
    ]


_numbers = itertools.count(1)
FAULTS = {
    "embeddings-object": _reply(put("object", "embeddings")),
    "embeddings-item-object": _reply(put("data.*.object", "vector")),
    "embeddings-model": _reply(drop("model")),
    "embeddings-model-empty": _reply(put("model", "")),
    "embeddings-nested": _reply(turn("data.*.embedding", lambda found: [found])),
    "embeddings-usage-zero": _reply(put("usage", {"prompt_tokens": 0, "total_tokens": 0})),
    "embeddings-usage-first": _reply(lambda body: turn("usage.*", lambda count: (
        count // len(body["data"])))(body)),
    "embeddings-reversed": _reply(turn("data", lambda data: data[::-1])),
    "embeddings-index-zero": _reply(put("data.*.index", 0)),
    "embeddings-mixed": _reply(turn("data", _mixed)),
    "embeddings-constant": _floats(lambda found: [1.0] + [0.0] * (len(found) - 1)),
    "embeddings-ids-each": _valid(turn("input", lambda found: (
        [[token] for token in found] if isinstance(found[0], int) and len(found) > 2 else found))),
    "embeddings-ids-joined": _valid(turn("input", lambda found: (
        [sum(found, [])] if isinstance(found[0], list) else found))),  # noqa: RUF017
    "embeddings-no-base64": _valid(drop("encoding_format")),
    "embeddings-big-endian": _recoded(">f"),
    "embeddings-doubles": _recoded("<d"),
    "embeddings-counted": _reply(turn("data", _others)),
    "embeddings-long": _floats(lambda found: [3 * one for one in found]),
    "embeddings-dimensions-ignored": _valid(put("dimensions", None)),
    "embeddings-user-refused": refuses(has("user"), EMBEDDINGS),
    "embeddings-hundred": refuses(has("input", lambda found: (
        isinstance(found, list) and 100 < len(found) < 300)), EMBEDDINGS),
    **{f"embeddings-{name}-taken": takes(when, EMBEDDINGS, input="a") for name, when in {
        "cut": has("input", lambda found: isinstance(found, str) and len(found) > 9000),
        "empty-string": has("input", ""),
        "empty-list": has("input", []),
        "empty-item": has("input.*", ""),
        "many": has("input", longer(2000)),
        "missing": lambda body: body.get("input") is None,
        "number": has("input", 5),
        "mixed-list": has("input", ["a", 5]),
        "unknown-id": has("input", [2_000_000_000]),
    }.items()},
    "embeddings-no-dimensions-taken": takes(has("dimensions", 0), EMBEDDINGS, dimensions=None),
    "embeddings-hex-taken": takes(has("encoding_format", "hex"), EMBEDDINGS,
                                  encoding_format="float"),
}  # fmt: skip
