"""The engines under test: real ones, and ones whose responses are edited."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from fuzz.edits import edited
from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.front import Front, fronting
from support.engines.replay import AnyPrompt, replaying
from support.servers import llama_server

TARGETS = ("llama_cpp", "llama_server", "llama_server_edited", "koboldcpp_edited")


@dataclass(frozen=True)
class Engine:
    """An engine under test.

    Args:
        name: one of `TARGETS`.
        address: the engine's address, empty in process.
        front: the server that edits its responses, or None.
    """

    name: str
    address: str = ""
    front: Front | None = None


@contextlib.contextmanager
def engine(name: str) -> Iterator[Engine]:
    """Run an engine."""
    if name == "llama_cpp":
        yield Engine(name)
        return
    with contextlib.ExitStack() as stack:
        if name.startswith("llama_server"):
            address = stack.enter_context(llama_server(DEMO_MODEL, slots=4, context=512))
        else:
            address, _ = stack.enter_context(replaying(AnyPrompt(varied=True)))
        if not name.endswith("_edited"):
            yield Engine(name, address)
            return
        front = stack.enter_context(fronting(address, edited))
        yield Engine(name, front.url, front)
