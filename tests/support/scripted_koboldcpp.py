"""A fake koboldcpp that answers every prompt with one text, or by its last character."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.fake_koboldcpp import FakeKoboldcpp
from faults.wire import Answer
from faults.words import Model, Task
from latimer.backends.koboldcpp import KoboldCpp


@dataclass
class ScriptedKoboldcpp(FakeKoboldcpp):
    """A koboldcpp whose model always generates `script`.

    Args:
        others: further texts, by the character at the end of the prompts that they follow.

    Attributes:
        prompts: the prompts of all generations.
    """

    script: str = ""
    others: Mapping[str, str] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)

    def _generation(self, path: str, body: dict[str, Any]) -> Answer:
        self.prompts.append(body["prompt"])
        text = self.others.get(body["prompt"][-1:], self.script)
        task = Task(text, False, 0.0)
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
