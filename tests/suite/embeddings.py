"""Embeddings of the toy server: vectors of length 1, generated from the bytes of each text."""

from __future__ import annotations

import base64
import math
import random
import struct
import zlib
from typing import Any

from suite import model
from suite.rules import Refused

SIZE = 8
MOST = 2048


def check(body: dict[str, Any]) -> list[Any]:
    """Return the inputs of a request; raise `Refused` if it is invalid."""
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and _ids(given)):
        given = [given]
    if not isinstance(given, list) or not given:
        raise Refused("Invalid 'input'.", "input", "invalid_type")
    if len(given) > MOST:
        raise Refused("Invalid 'input': array too long.", "input", "array_above_max_length")
    for one in given:
        if not (isinstance(one, str) or (isinstance(one, list) and _ids(one))) or not one:
            raise Refused("Invalid 'input'.", "input", "invalid_type")
        if not isinstance(one, str) and any(not 0 <= token < model.SIZE for token in one):
            raise Refused("Invalid 'input': no such token.", "input", "invalid_value")
        if len(one) > model.CONTEXT:
            raise Refused(f"This model's maximum context length is {model.CONTEXT} tokens.",
                          "input", "context_length_exceeded")  # fmt: skip
    dimensions = body.get("dimensions")
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= SIZE):
        raise Refused("Invalid 'dimensions'.", "dimensions", "invalid_value")
    if body.get("encoding_format", "float") not in ("float", "base64"):
        raise Refused("Invalid 'encoding_format'.", "encoding_format", "invalid_value")
    return given


def _ids(given: list[Any]) -> bool:
    return bool(given) and all(type(one) is int for one in given)


def answer(body: dict[str, Any], given: list[Any]) -> dict[str, Any]:
    """Return the reply to a valid request."""
    lists = [model.tokenize(one, True) if isinstance(one, str) else one for one in given]
    count = sum(map(len, lists))
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(_vector(ids, body), body)}
        for index, ids in enumerate(lists)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}


def _vector(ids: list[int], body: dict[str, Any]) -> list[float]:
    rng = random.Random(zlib.crc32(b"".join(map(model.piece, ids))))
    values = [rng.gauss(0, 1) for _ in range(SIZE)][: body.get("dimensions") or SIZE]
    length = math.sqrt(math.fsum(value * value for value in values))
    return [value / length for value in values]


def _shown(vector: list[float], body: dict[str, Any]) -> Any:
    if body.get("encoding_format") != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
