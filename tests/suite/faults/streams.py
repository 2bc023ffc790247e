"""Faults in streams, and faults under load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suite.faults.base import (
    broken,
    choices,
    usage,
)
from suite.work import CHAT


def _deltas(change: Callable[[int, dict[str, Any]], None]) -> Callable[..., Any]:
    def hook(path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        for number, chunk in enumerate(chunks):
            for choice in chunk["choices"]:
                if path == CHAT:
                    change(number, choice)
        return chunks

    return hook


broken("role-in-every-chunk", chunks=_deltas(lambda n, c: c["delta"].update(role="assistant")))
broken("no-role", chunks=_deltas(lambda n, c: c["delta"].pop("role", None)))
broken("null-deltas", chunks=_deltas(
    lambda n, c: c.update(delta=None) if c["finish_reason"] else None))  # fmt: skip
broken("last-delta-with-text", chunks=_deltas(
    lambda n, c: c["delta"].update(content="") if c["finish_reason"] else None))  # fmt: skip
broken("two-finishes", chunks=lambda path, chunks, sent: (
    [c for one in chunks for c in ([one, one] if one["choices"]
     and one["choices"][0]["finish_reason"] else [one])]))  # fmt: skip
broken("no-finish", chunks=choices(lambda choice: choice.update(finish_reason=None)))
broken(
    "chunk-ids-differ",
    chunks=lambda path, chunks, sent: [
        {**chunk, "id": f"{chunk['id']}-{number}"} for number, chunk in enumerate(chunks)
    ],
)
broken("chunks-of-another-object", chunks=lambda path, chunks, sent: [
    {**chunk, "object": "chunk"} for chunk in chunks])  # fmt: skip
broken("chunk-created-float", chunks=lambda path, chunks, sent: [
    {**chunk, "created": 1.5} for chunk in chunks])  # fmt: skip
broken("stream-loses-text", chunks=lambda path, chunks, sent: (
    chunks[:2] + chunks[3:] if len(chunks) > 8 else chunks))  # fmt: skip
broken("all-in-one-chunk", chunks=lambda path, chunks, sent: _joined(path, chunks, sent))
broken("usage-in-last-choice", chunks=lambda path, chunks, sent: (
    [*chunks[:-2], {**chunks[-2], "usage": chunks[-1]["usage"]}]
    if not chunks[-1]["choices"] else chunks))  # fmt: skip
broken(
    "usage-key-missing",
    chunks=lambda path, chunks, sent: [
        {k: v for k, v in chunk.items() if k != "usage" or v} for chunk in chunks
    ],
)
broken("usage-always", chunks=lambda path, chunks, sent: (
    chunks if sent.get("stream_options") else
    [*chunks, {**chunks[-1], "choices": [], "usage": {}}]))  # fmt: skip
broken("usage-of-stream-differs", chunks=lambda path, chunks, sent: (
    [*chunks[:-1], {**chunks[-1], "usage": usage(chunks[-1]["usage"], 1)}]
    if sent.get("stream_options") else chunks))  # fmt: skip
broken(
    "second-choice-first",
    chunks=lambda path, chunks, sent: sorted(
        chunks, key=lambda c: -c["choices"][0]["index"] if c["choices"] else 1
    ),
)
broken("choices-in-one-chunk", chunks=lambda path, chunks, sent: (
    [{**chunks[0], "choices": [{**chunks[0]["choices"][0], "index": i} for i in (0, 1)]},
     *chunks[1:]] if sent.get("n") == 2 and path == CHAT else chunks))  # fmt: skip
broken("second-choice-cut", chunks=lambda path, chunks, sent: [
    c for c in chunks if not c["choices"] or c["choices"][0]["index"] == 0
    or c["choices"][0]["finish_reason"] is None])  # fmt: skip
broken("half-characters", chunks=lambda path, chunks, sent: [
    one for chunk in chunks for one in _halves(path, chunk)])  # fmt: skip
broken("no-done", event=lambda data: b"" if b"[DONE]" in data else data)
broken("two-dones", event=lambda data: data * 2 if b"[DONE]" in data else data)
broken("single-newlines", event=lambda data: data[:-1])
broken("no-last-blank-line", event=lambda data: data[:-1] if b"[DONE]" in data else data)
broken("indented-json", event=lambda data: data.replace(b", ", b",\n"))
broken("event-lines", event=lambda data: b"event: message\n" + data)
broken("stays-after-disconnect", stays=5.0)
broken("lingers", lingers=True)
broken("waits-till-the-end", buffers=True)
broken("load-is-500", request=lambda path, body: body, crowded=500)
broken("load-without-retry", crowded=503)
broken("answers-mixed", mixes=True)


def _joined(path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
    if path != CHAT or sent.get("n", 1) != 1 or sent.get("logprobs"):
        return chunks
    texts = [c for c in chunks if c["choices"] and c["choices"][0]["delta"].get("content")]
    if not texts:
        return chunks
    whole = "".join(c["choices"][0]["delta"]["content"] for c in texts)
    texts[0]["choices"][0]["delta"]["content"] = whole
    return [chunk for chunk in chunks if chunk not in texts[1:]]


def _halves(path: str, chunk: Any) -> list[Any]:
    for choice in chunk["choices"]:
        text = choice["delta"].get("content") if path == CHAT else None
        if text and len(text.encode()) > 2:
            half = {**choice, "delta": {"content": "\ufffd"}}
            return [{**chunk, "choices": [half]}]
    return [chunk]
