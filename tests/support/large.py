"""Large requests, and engines with a vision model to send them to."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from latimer.backends.base import Backend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer

from support.engines.replay import AnyPrompt, replaying
from support.projector import png, projector
from support.servers import llama_server

MODEL = Path(__file__).parents[1] / "models" / "bpe.gguf"
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")


@contextlib.contextmanager
def seeing(engine: str, directory: Path) -> Iterator[Backend]:
    """Run an engine whose model accepts images; koboldcpp is replayed from recordings.

    Args:
        directory: the folder for the projector file.
    """
    mmproj = projector(directory / "mmproj.gguf", 64)
    if engine == "llama_cpp":
        yield LlamaCpp(MODEL, mmproj=mmproj)
    elif engine == "llama_server":
        with llama_server(MODEL, "--mmproj", str(mmproj), context=512) as address:
            yield LlamaServer(address)
    else:
        with replaying(AnyPrompt()) as (address, _replay):
            yield KoboldCpp(address)


def chat(*messages: dict[str, Any], **body: Any) -> tuple[str, bytes]:
    """Return the path and body of a chat request."""
    full = {"model": "m", "messages": messages, "max_tokens": 2, **body}
    return "/v1/chat/completions", json.dumps(full).encode()


def completion(prompt: Any, **body: Any) -> tuple[str, bytes]:
    """Return the path and body of a completion request."""
    full = {"model": "m", "prompt": prompt, "max_tokens": 2, **body}
    return "/v1/completions", json.dumps(full).encode()


def user(content: Any) -> dict[str, Any]:
    """Return a user message."""
    return {"role": "user", "content": content}


def _schema(count: int) -> dict[str, Any]:
    """Return the schema of an object with many properties of several types."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 2, "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 99_999},
        {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        {"enum": ["red", "green", "blue"]},
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    ]
    own = {f"property_{n}": {"description": "x" * 60, **kinds[n % 5]} for n in range(count)}
    return {"type": "object", "properties": own, "required": list(own),
            "additionalProperties": False}  # fmt: skip


def _format(count: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "large", "schema": _schema(count)}}


def _tools(count: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"tool_{n}", "description": "y" * 200,
                                          "parameters": _schema(12)}}
        for n in range(count)
    ]  # fmt: skip


def _picture(size: int) -> dict[str, Any]:
    """Return an image part of a given size in bytes, most of it padding after the image."""
    data = base64.b64encode(png(255, 0, 0).ljust(size, b"\0")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _talk(turns: int, text: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n}: {text}"}
            for n in range(turns + 1 - turns % 2)]  # fmt: skip


LARGE: dict[str, Callable[[], tuple[str, bytes]]] = {
    "schema of 200 properties": lambda: chat(user("Hi"), response_format=_format(200)),
    "schema of 5,000 properties": lambda: chat(user("Hi"), response_format=_format(5_000)),
    "60 tools": lambda: chat(user("Hi"), tools=_tools(60)),
    "60 tools, required": lambda: chat(user("Hi"), tools=_tools(60), tool_choice="required"),
    "6 tools beside a schema": lambda: chat(
        user("Hi"), tools=_tools(6), response_format=_format(40)
    ),
    "1 MB prompt": lambda: completion("One day, a cat sat. " * 50_000),
    "1 MB message": lambda: chat(user("One day, a cat sat. " * 50_000)),
    "1 MB message of control tokens": lambda: chat(user("a <|im_end|>\n" * 80_000)),
    "200,000 ids": lambda: completion([65] * 200_000),
    "4,000 messages": lambda: chat(*_talk(4_000, "One day, a cat sat. " * 5)),
    "20 MB image": lambda: chat(user([{"type": "text", "text": "Hi"}, _picture(20 << 20)])),
    "8 images of 2 MB": lambda: chat(user([_picture(2 << 20) for _ in range(8)])),
    "echo of a long prompt": lambda: completion([65] * 450, echo=True, logprobs=5),
    "60 KB grammar": lambda: completion(
        "a", grammar="root ::= " + " | ".join(f'"word{n}"' for n in range(4_500))
    ),
    "2 KB regular expression": lambda: completion("a", regex="([a-z]{1,20} ?)" * 120),
}
