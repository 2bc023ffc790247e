"""`/models` (contract, section 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ..check import Skip, check, expect
from ..target import Api

# The words of a prompt where no context length is listed: more than any, and a short enough body.
_WORDS = 2_000_000


async def _listed(api: Api) -> list[Any]:
    models: list[Any] = (await api.get("/models")).ok()["data"]
    return models


@check("models.list",
       "GET /models returns a list object with at least one model, and each one once.",
       "must", "5 [SPEC]")  # fmt: skip
async def listed(api: Api) -> None:
    body = (await api.get("/models")).ok()
    expect(body.get("object") == "list", f"expected object 'list', but got {body.get('object')!r}")
    ids = [model.get("id") for model in await _listed(api)]
    expect(ids, "expected at least one model, but got an empty list")
    expect(len({*ids}) == len(ids), f"expected each model once, but got {ids}")


@check("models.created", "Every listed model has a created field with an integer.",
       "must", "5 [SPEC]")  # fmt: skip
async def created(api: Api) -> None:
    for model in await _listed(api):
        value = model.get("created")
        expect(type(value) is int, f"expected an integer for created, but got {value!r}")


@check("models.fields", "Every listed model has the object model and a string in owned_by.",
       "must", "5 [SPEC]")  # fmt: skip
async def fields(api: Api) -> None:
    for model in await _listed(api):
        expect(model.get("object") == "model", f"expected object 'model', but got {model}")
        expect(
            isinstance(model.get("owned_by"), str),
            f"expected a string in owned_by, but got {model}",
        )


@check("models.retrieve", "GET /models/{id} returns each listed model by its URL-encoded id.",
       "must", "5 1.1 [EXP]")  # fmt: skip
async def retrieve(api: Api) -> None:
    for model in await _listed(api):
        one = (await api.get("/models/" + quote(model["id"], safe=""))).ok()
        expect(one["id"] == model["id"], f"expected id {model['id']!r}, but got {one}")


@check("models.unknown", "GET /models/{id} with an unknown id returns 404 with an error object.",
       "should", "5")  # fmt: skip
async def unknown(api: Api) -> None:
    (await api.get("/models/no-such-model-anywhere")).error(404)


@check("models.accepted", "A listed model id is accepted as the model of a completion request.",
       "must", "5")  # fmt: skip
async def accepted(api: Api) -> None:
    for model in (await _listed(api))[:1]:
        body = {"model": model["id"], "prompt": "Hello", "max_tokens": 1}
        (await api.post("/completions", body)).ok()


@check("models.delete",
       "DELETE /models/{id} with an unknown id returns 403, 404 or 405 with an error object.",
       "may", "1.1 5")  # fmt: skip
async def delete(api: Api) -> None:
    reply = await api.send("DELETE", "/models/no-such-model-anywhere")
    reply.error(403, 404, 405)


def context_of(model: Mapping[str, Any]) -> int | None:
    """Return the context length in a model's entry, in any of the known spellings.

    The length with which a model was trained counts only if no other is listed.
    """
    meta = model.get("meta") if isinstance(model.get("meta"), dict) else {}
    assert isinstance(meta, dict)
    for holder, name in (
        (model, "context_length"), (model, "max_model_len"), (model, "context_window"),
        (model, "max_context_length"), (meta, "n_ctx"), (meta, "n_ctx_train"),
    ):  # fmt: skip
        value = holder.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _has_text(model: Mapping[str, Any]) -> bool:
    """Return False for a model that only speaks or transcribes, if its entry states that."""
    kinds = model.get("architecture")
    kinds = kinds if isinstance(kinds, dict) else {}
    return all("text" in kinds.get(f"{way}_modalities", ("text",)) for way in ("input", "output"))


async def too_long(api: Api) -> str:
    """Return a text with twice as many words as the context has tokens.

    Many times more would keep a busy engine from other checks for seconds.
    """
    listed = (await api.get("/models")).ok()["data"]
    sizes = [context_of(model) for model in listed if model.get("id") == api.model]
    return "a b " * (sizes[0] + 100 if sizes and sizes[0] else _WORDS // 2)


@check("models.context-length",
       "Each model lists its context length: context_length, max_model_len or meta.n_ctx.",
       "may", "5 design")  # fmt: skip
async def context_length(api: Api) -> None:
    for model in filter(_has_text, await _listed(api)):
        expect(context_of(model), f"expected a context length, but got {model}")


@check("models.context-exact",
       "The listed context length is the one that context_length_exceeded names.",
       "should", "1.4 5 design")  # fmt: skip
async def context_exact(api: Api) -> None:
    entries = [one for one in await _listed(api) if one["id"] == api.model]
    length = context_of(entries[0]) if entries else None
    if length is None:
        raise Skip("the model's entry has no context length")
    # More tokens than the context, also if a token has several words.
    messages = [{"role": "user", "content": "a b " * (2 * length)}]
    body = {"model": api.model, "messages": messages, "max_tokens": 1}
    error = (await api.post("/chat/completions", body)).error(400)
    code = "context_length_exceeded"
    expect(error["code"] == code, f"expected the code {code}, but got {error}")
    found = re.search(r"maximum context length is (\d+)", error["message"])
    expect(found and int(found[1]) == length,
           f"expected the context length {length} in the message, but got {error}")  # fmt: skip
