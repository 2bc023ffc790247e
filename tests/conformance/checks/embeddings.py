"""`POST /embeddings` (contract 6)."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Body, Diverges, check, expect
from ..target import Api, expect_model, only

E = "/embeddings"
TEXTS = ("The sky is blue.", "A cat sleeps.", "1, 2, 3")


async def embed(api: Api, given: Any, **body: Any) -> Any:
    """Return the body of a reply with embeddings that the server must support."""
    full = {"model": api.model, "input": given, **body}
    found = (await api.post(E, full)).ok()
    empty = not found["data"] or any(not item["embedding"] for item in found["data"])
    expect(not empty, f"expected embeddings, but got {str(found)[:200]}")
    return found


async def _vectors(api: Api, given: Any, **body: Any) -> list[Any]:
    return [item["embedding"] for item in (await embed(api, given, **body))["data"]]


def _close(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return True if two vectors are equal except for the rounding errors of batching."""
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-3) for a, b in zip(one, other, strict=True)
    )


@check("embeddings.shape",
       "One input returns a list object with the model and one embedding, a list of floats, at "
       "index 0.",
       "must", "6 10.82")  # fmt: skip
async def shape(api: Api) -> None:
    body = await embed(api, TEXTS[0])
    expect(body["object"] == "list", f"expected object list, but got {body['object']!r}")
    item = only(body["data"], "embedding")
    valid = item["object"] == "embedding" and item["index"] == 0
    expect(valid, f"expected object embedding and index 0, but got {str(item)[:200]}")
    vector = item["embedding"]
    numbers = isinstance(vector, list) and vector and all(type(x) is float for x in vector)
    expect(numbers, f"expected a list of floats, but got {str(vector)[:200]}")
    expect_model(api, body.get("model"))


@check("embeddings.usage",
       "The usage of embeddings has equal prompt_tokens and total_tokens, which count every input.",
       "must", "6 10.82")  # fmt: skip
async def usage(api: Api) -> None:
    one = (await embed(api, TEXTS[0]))["usage"]
    two = (await embed(api, [TEXTS[0], TEXTS[0]]))["usage"]
    for counts in (one, two):
        positive = type(counts["prompt_tokens"]) is int and counts["prompt_tokens"] > 0
        equal = counts["prompt_tokens"] == counts["total_tokens"]
        expect(positive and equal, f"expected two equal counts above 0, but got {counts}")
    doubled = two["prompt_tokens"] == 2 * one["prompt_tokens"]
    expect(doubled, f"expected twice the tokens for two inputs, but got {one} and {two}")


@check("embeddings.order",
       "Embeddings are in the order of their inputs, with index 0, 1, 2 and so on.",
       "must", "6 10.82")  # fmt: skip
async def order(api: Api) -> None:
    alone = [(await _vectors(api, text))[0] for text in TEXTS]
    body = await embed(api, list(TEXTS))
    indices = [item["index"] for item in body["data"]]
    expect(indices == [0, 1, 2], f"expected indices 0, 1, 2, but got {indices}")
    for vector, item in zip(alone, body["data"], strict=True):
        expect(
            _close(vector, item["embedding"]),
            f"expected the embedding of input {item['index']}, but got another",
        )


@check("embeddings.distinct",
       "Embeddings of different texts differ and have the same number of dimensions.",
       "must", "6 10.82")  # fmt: skip
async def distinct(api: Api) -> None:
    one, two, three = await _vectors(api, list(TEXTS))
    sizes = [len(vector) for vector in (one, two, three)]
    expect(len(set(sizes)) == 1, f"expected vectors of one length, but got lengths {sizes}")
    different = not _close(one, two) and not _close(two, three)
    expect(different, "expected different embeddings, but got equal ones for different texts")


@check("embeddings.ids", "A list of token ids is one input and returns one embedding.",
       "must", "6 10.82")  # fmt: skip
async def ids(api: Api) -> None:
    found = await _vectors(api, [5, 6, 7])
    expect(len(found) == 1, f"expected one embedding, but got {len(found)}")


@check("embeddings.id-lists",
       "A list of lists of token ids is several inputs, each with its own embedding.",
       "must", "6 10.82")  # fmt: skip
async def id_lists(api: Api) -> None:
    found = await _vectors(api, [[5, 6, 7], [8, 9]])
    alone = await _vectors(api, [8, 9])
    expect(len(found) == 2, f"expected two embeddings, but got {len(found)}")
    expect(
        _close(found[1], alone[0]),
        "expected the embedding of the second list alone, but got another",
    )


@check("embeddings.base64",
       "With encoding_format base64, an embedding is the same numbers as 32-bit little-endian "
       "floats.",
       "must", "6 10.82 [SPEC]")  # fmt: skip
async def as_base64(api: Api) -> None:
    plain = (await _vectors(api, TEXTS[0], encoding_format="float"))[0]
    text = (await _vectors(api, TEXTS[0], encoding_format="base64"))[0]
    expect(isinstance(text, str), f"expected a base64 string, but got {str(text)[:80]}")
    data = base64.b64decode(text)
    count = len(plain)
    expect(len(data) == 4 * count, f"expected {4 * count} bytes, but got {len(data)}")
    equal = _close(plain, struct.unpack(f"<{count}f", data))
    expect(equal, "expected the numbers of encoding_format float, but got others")


@check("embeddings.same", "The same text has the same embedding in each request.", "should", "6")
async def same(api: Api) -> None:
    one, two = [(await _vectors(api, TEXTS[1]))[0] for _ in range(2)]
    expect(_close(one, two), "expected the same embedding twice, but got two different ones")


@check("embeddings.unit", "The Euclidean norm of an embedding is 1.", "may", "6")
async def unit(api: Api) -> None:
    vector = (await _vectors(api, TEXTS[0]))[0]
    norm = math.sqrt(math.fsum(x * x for x in vector))
    if not 0.99 < norm < 1.01:
        raise Diverges(f"the norm of the embedding is {norm:.3f}")


@check("embeddings.dimensions",
       "The dimensions field sets the size of an embedding, or is rejected with a 400 error that "
       "names it.",
       "should", "6 [SPEC]")  # fmt: skip
async def dimensions(api: Api) -> None:
    whole = len((await _vectors(api, TEXTS[0]))[0])
    wanted = max(1, whole // 2)
    reply = await api.post(E, {"model": api.model, "input": TEXTS[0], "dimensions": wanted})
    if reply.status == 400:
        error = str(reply.error(400))
        expect("dimensions" in error, f"expected an error that names dimensions, but got {error}")
        return
    found = len(reply.ok()["data"][0]["embedding"])
    expect(found == wanted, f"expected {wanted} numbers, but got {found}")


@check("embeddings.user", "An embeddings request with a user is accepted.", "must", "6")
async def user(api: Api) -> None:
    await embed(api, TEXTS[0], user="someone")


@check("embeddings.many", "An embeddings request may have two hundred inputs.",
       "should", "6", seconds=60)  # fmt: skip
async def many(api: Api) -> None:
    found = await _vectors(api, [f"text {i}" for i in range(200)])
    expect(len(found) == 200, f"expected 200 embeddings, but got {len(found)}")


@check("embeddings.context",
       "An input that exceeds the context length is rejected with 400, not truncated.",
       "should", "6 1.4")  # fmt: skip
async def context(api: Api) -> None:
    await embed(api, "a")
    reply = await api.post(E, {"model": api.model, "input": "a b " * 1_000_000})
    if reply.status == 413:
        raise Diverges("the server rejects the body before it counts the tokens")
    reply.error(400)


# Each row: the id, the invalid fields, level, source, the word that the error must contain.
WRONG: Sequence[tuple[str, Mapping[str, Any], str, str, str]] = (
    ("empty-string", {"input": ""}, "should", "6 10.83", "input"),
    ("empty-list", {"input": []}, "should", "6 10.83", "input"),
    ("empty-item", {"input": ["a", ""]}, "should", "6", "input"),
    ("too-many", {"input": ["a"] * 2049}, "should", "6 10.83", "input"),
    ("input-missing", {"input": None}, "must", "6 1.2", "input"),
    ("input-number", {"input": 5}, "must", "6 1.2", "input"),
    ("input-mixed", {"input": ["a", 5]}, "must", "6 1.2", "input"),
    ("id-unknown", {"input": [2_000_000_000]}, "must", "6 2.2", "input"),
    ("dimensions-zero", {"dimensions": 0}, "should", "6 10.83", "dimensions"),
    ("encoding-unknown", {"encoding_format": "hex"}, "must", "6", "encoding_format"),
)


def _rejected(changes: Mapping[str, Any], word: str) -> Body:
    async def run(api: Api) -> None:
        await embed(api, "a")
        body = {"model": api.model, "input": "a", **changes}
        full = {name: value for name, value in body.items() if value is not None}
        error = (await api.post(E, full)).error(400)
        named = word in str(error["param"] or error["message"])
        expect(named, f"expected an error that names {word!r} in param or message, but got {error}")

    return run


def _shown(changes: Mapping[str, Any]) -> str:
    if None in changes.values():
        return f"without {', '.join(changes)}"
    text = json.dumps(changes)
    return f"with {text}" if len(text) < 60 else "with more than 2,048 inputs"


for _name, _changes, _level, _source, _word in WRONG:
    _changed = _shown(_changes)
    _promise = (
        f"An embeddings request {_changed} is rejected with a 400 error that names {_word!r}."
    )
    check(f"embeddings.{_name}", _promise, _level, _source)(_rejected(_changes, _word))  # type: ignore[arg-type]
