"""A scheduler over a real context, which a test steps in its own thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from latimer.backends.base import Event, Finish, Generation, Piece, Prompt, Sampling
from latimer.backends.errors import LatimerError
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_cpp.cache import Cache
from latimer.backends.llama_cpp.grammars import Candidates
from latimer.backends.llama_cpp.library import Context, LoadedModel
from latimer.backends.llama_cpp.loop import Loop
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.scheduler import Delivery, Scheduler
from latimer.backends.llama_cpp.states import States
from latimer.backends.llama_cpp.tasks import Task
from latimer.backends.llama_cpp.vocabulary import Vocabulary

GREEDY = Sampling(temperature=0.0)
ENDLESS = Sampling(temperature=0.0, extras={"ignore_eos": True})


class Box:
    """A mailbox that keeps its messages."""

    def __init__(self, choices: int = 1) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.close()
        self.events: list[Event] = []
        self.error: LatimerError | None = None
        self.choices = choices

    def deliver(self, events: Sequence[Event] | LatimerError) -> None:
        """Keep the events or the error."""
        if isinstance(events, LatimerError):
            self.error = events
        else:
            self.events += events

    @property
    def text(self) -> bytes:
        """The text of all pieces."""
        return b"".join(event.data for event in self.events if isinstance(event, Piece))

    @property
    def finishes(self) -> list[Finish]:
        """The finish of each choice that has ended."""
        return [event for event in self.events if isinstance(event, Finish)]

    @property
    def finished(self) -> bool:
        """True if every choice has ended."""
        return len(self.finishes) == self.choices

    def choice(self, index: int) -> bytes:
        """Return the text of one choice's pieces."""
        pieces = [event for event in self.events if isinstance(event, Piece)]
        return b"".join(piece.data for piece in pieces if piece.choice == index)


class Engine:
    """Everything that the engine's thread owns, in the test's own thread."""

    def __init__(
        self,
        limit: int,
        cells: int = 512,
        path: Path = DEMO_MODEL,
        apart: float = math.inf,
        batch: int = 64,
        drafts: bool = False,
    ) -> None:
        options = Options(parallel=limit, batch=batch)
        self.model = LoadedModel(path, options)
        self.context = Context(self.model, options, cells)
        self.vocabulary = Vocabulary(self.model)
        self.cells = cells
        model = self.model
        cuts = model.rolls_back and not self.context.window
        self.states = States(1 << 26, cuts)
        self.cache = Cache(
            self.context,
            cells,
            2 * limit,
            model.rolls_back,
            self.states,
            0 if cuts else 1 << 25,
        )
        self.posts: list[list[Delivery]] = []
        self.scheduler = Scheduler(
            self.context,
            self.vocabulary,
            self.cache,
            Candidates(self.vocabulary.size),
            limit,
            self._post,
            drafts=drafts,
            apart=apart,
        )
        self.loop = Loop([self.scheduler])

    def _post(self, deliveries: list[Delivery]) -> None:
        self.posts.append(deliveries)
        for task, events in deliveries:
            task.mailbox.deliver(events)

    def submit(
        self, prompt: str, max_tokens: int, later: bool = False, **job: object
    ) -> tuple[Task, Box]:
        """Queue a job; `later` leaves it to the loop, as other threads do."""
        ids = self.vocabulary.tokenize(prompt, add_special=True, parse_special=True)
        return self.submit_ids(ids, max_tokens, later, **job)

    def submit_ids(
        self, ids: Sequence[int], max_tokens: int, later: bool = False, **job: object
    ) -> tuple[Task, Box]:
        """Queue a job for the ids of a prompt."""
        generation = Generation(Prompt(tuple(ids)), max_tokens, **{"sampling": GREEDY, **job})  # type: ignore[arg-type]
        box = Box(len(generation.seeds))
        task = Task(generation, ids, len(ids), (), max_tokens, {}, {}, box)  # type: ignore[arg-type]
        if later:
            self.loop.submit(self.scheduler, task)
        else:
            self.scheduler.submit(task)
        return task, box

    def close(self) -> None:
        """End its threads, and free the context and the model."""
        # On a busy machine a lone sequence has more of them.
        self.scheduler._spinning.end()
        self.context.close()
        self.model.close()


def finish(engine: Engine, *boxes: Box, steps: int = 500) -> None:
    """Step until all jobs have ended."""
    for _ in range(steps):
        if all(box.finished or box.error for box in boxes):
            return
        engine.scheduler.step()
    raise AssertionError("not finished")
