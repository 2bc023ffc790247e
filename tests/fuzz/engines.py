"""The engines under test: real ones, and ones whose responses are edited."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fuzz.front import Front, fronting
from latimer.backends.llama_cpp import DEMO_MODEL
from support.large import AnyPrompt
from support.replay import GENERATE, Replay, replaying
from support.servers import llama_server

TARGETS = ("llama_cpp", "llama_server", "llama_server_edited", "koboldcpp_edited")


class AnyAnswer(AnyPrompt):
    """A koboldcpp that responds to an unknown prompt with any recorded response."""

    def _find(self, method: str, path: str, body: Any) -> dict[str, Any] | None:
        found = Replay._find(self, method, path, body)
        if found is not None or not isinstance(body, dict):
            return found
        if path in GENERATE:
            same = [one for one in self._plain.values() if one["path"] == path]
            digest = hashlib.sha256(str(body.get("prompt")).encode("utf-8", "replace")).digest()
            return same[digest[0] % len(same)]
        return super()._find(method, path, body)


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
            address, _ = stack.enter_context(replaying(AnyAnswer()))
        if not name.endswith("_edited"):
            yield Engine(name, address)
            return
        front = stack.enter_context(fronting(address))
        yield Engine(name, front.address, front)
