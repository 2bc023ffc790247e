"""A fake koboldcpp that answers every prompt with one text."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from faults.fake_koboldcpp import FakeKoboldcpp
from faults.wire import Answer
from faults.words import Model, Task
from latimer.backends.koboldcpp import KoboldCpp


@dataclass
class ScriptedKoboldcpp(FakeKoboldcpp):
    """A koboldcpp whose model always generates `script`."""

    script: str = ""

    def _generation(self, path: str, body: dict[str, Any]) -> Answer:
        task = Task(self.script, False, 0.0)
        if path.endswith("stream"):
            events = self._events(body, task)
            return Answer(events, kind=b"text/event-stream", streamed=True, chunked=False)
        return Answer(self._whole(body, task), chunked=False)


@contextlib.asynccontextmanager
async def koboldcpp(
    template: str, script: str
) -> AsyncIterator[tuple[ScriptedKoboldcpp, KoboldCpp]]:
    """Return a fake koboldcpp with a template and a script, and its backend."""
    model = Model("koboldcpp/fake", 65_536, template)
    fake = ScriptedKoboldcpp(model=model, script=script)
    await fake.start()
    backend = KoboldCpp(fake.url)
    try:
        yield fake, backend
    finally:
        await backend.aclose()
        await fake.stop()
