"""Embeddings in the engine's thread: each step evaluates one batch of the inputs of all tasks."""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ..base import Pooling, TokenIds
from ..errors import EngineError, LatimerError
from .library import Batch, DecodeFailed, LoadedModel, context_params, new_context
from .loop import Worker
from .options import DEFAULT_CONTEXT, ENGINE, Options
from .threads import Threads
from .vocabulary import Vocabulary

# The tokens in a batch of several inputs of a narrow model.
USUAL = 192
# The inputs in one batch. More gain nothing, and pooling takes memory for each.
SEQUENCES = 128
# The same for a model whose state is not a KV cache, but has a fixed size for each input.
RECURRENT = 8
# Bytes of logits in one batch: llama.cpp computes those of all tokens, although nothing needs them.
MAX_LOGITS = 256 * 1024 * 1024
_TYPES: dict[Pooling, int] = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
    "rank": llama_cpp.LLAMA_POOLING_TYPE_RANK,
}


class EmbeddingContext:
    """A llama.cpp context that pools the tokens of each input, and its batch.

    Only one thread may use it.

    Attributes:
        length: the largest number of tokens in an input.
        dimensions: the length of a vector; for pooling `rank`, the number of scores.
        splits: True if an input may be split across batches.
        size: the largest number of tokens in a batch.
        usual: the largest number of tokens in a batch of several inputs.
    """

    def __init__(self, model: LoadedModel, options: Options, pooling: Pooling) -> None:
        self.pooling = pooling
        is_causal = model.purpose.is_causal
        self.length = min(options.context or DEFAULT_CONTEXT, model.trained_context)
        # Mean and CLS need all tokens of an input at once, as attention in both directions does.
        self.splits = is_causal and pooling in ("last", "rank")
        # Attention covers all inputs of a batch, so a large batch of a narrow model costs more.
        width: int = llama_cpp.llama_model_n_embd(model.pointer)
        usual = min(max(USUAL, width // 2), options.batch)
        if self.splits:
            logits = MAX_LOGITS // (4 * llama_cpp.llama_vocab_n_tokens(model.vocab))
            self.size: int = max(min(self.length, usual, logits), 1)
        else:
            self.size = self.length if is_causal else max(self.length, options.batch)
        self.usual = min(usual, self.size)
        # llama.cpp aborts if a batch holds fewer tokens than there are sequences.
        most = SEQUENCES if model.rolls_back else RECURRENT
        self.sequences = 1 if options.exact else min(most, self.size)
        # One input may be evaluated in part, while others have whole batches.
        params = context_params(options, self.length + self.size if self.splits else self.length)
        params.embeddings = True
        if self.splits and options.flash_attention is None and not options.has_quantized_cache:
            # ggml's flash attention on CPUs is less exact for fewer than 64 tokens, so that vectors
            # would depend on the batches of an input.
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.pooling_type = _TYPES[pooling]
        params.n_batch = params.n_ubatch = self.size
        params.n_seq_max = self.sequences
        self.pointer = new_context(model, params)
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._run = llama_cpp.llama_decode if model.has_decoder else llama_cpp.llama_encode
        ranks = pooling == "rank"
        count = llama_cpp.llama_model_n_cls_out if ranks else llama_cpp.llama_model_n_embd_out
        self.dimensions: int = count(model.pointer)
        self._batch = Batch(self.size)
        self._threads = Threads(options.threads)

    @property
    def used(self) -> int:
        """The number of tokens in the batch."""
        return self._batch.used

    def add(self, sequence: int, position: int, tokens: Sequence[int]) -> None:
        """Add consecutive tokens of an input to the batch."""
        self._batch.add(sequence, position, tokens, len(tokens))

    def decode(self) -> None:
        """Evaluate the batch, on the cores that other programs leave, and empty it.

        Raises:
            DecodeFailed: llama.cpp failed; the sequences of the batch must be removed.
        """
        batch, threads = self._batch.native, self._threads
        self._batch.clear()
        count = threads.known(time.perf_counter())
        llama_cpp.llama_set_n_threads(self.pointer, count, count)
        begun, on_cores = time.perf_counter(), time.process_time()
        status = self._run(self.pointer, batch)
        if count == threads.most:
            ended = time.perf_counter()
            threads.measure(ended - begun, time.process_time() - on_cores, ended)
        if status:
            raise DecodeFailed(status)

    def vector(self, sequence: int) -> NDArray[np.float32]:
        """Return a copy of the pooled vector of an input whose last token was just evaluated."""
        pointer = llama_cpp.llama_get_embeddings_seq(self.pointer, sequence)
        return np.ctypeslib.as_array(pointer, shape=(self.dimensions,)).copy()

    def remove(self, sequence: int) -> None:
        """Remove an input; a model without a KV cache keeps none."""
        if self._memory:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def clear(self) -> None:
        """Remove all inputs, and empty the batch."""
        self._batch.clear()
        if self._memory:
            llama_cpp.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context."""
        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None


# Seconds of a batch while the thread also generates: at most, since it delays a first token, and at
# least. In between, it takes as long as this number of the generator's steps.
MOST_SECONDS, LEAST_SECONDS, STEPS = 0.04, 0.005, 20
# Tokens of the first batch, before the speed is known, and of the smallest one.
FIRST, LEAST = 16, 8

Vector: TypeAlias = "array[float]"


class Mailbox:
    """The vectors of one task, as a future."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.found: asyncio.Future[list[Vector]] = loop.create_future()

    def deliver(self, found: list[Vector] | LatimerError) -> None:
        """Receive the vectors, or the error that ended the task; called in the event loop."""
        if self.found.done():
            return
        if isinstance(found, LatimerError):
            self.found.set_exception(found)
        else:
            self.found.set_result(found)


@dataclass(eq=False, slots=True)
class EmbeddingTask:
    """The inputs of a job; for pooling `rank`, each vector has one element: the score.

    Args:
        cancelled: True to drop the inputs that are not evaluated yet; any thread may set it.
        begun: the number of inputs that are in the context or have left it.
        found: the vectors by the index of their input.
    """

    inputs: Sequence[TokenIds]
    mailbox: Mailbox
    cancelled: bool = False
    begun: int = 0
    found: dict[int, Vector] = field(default_factory=dict)


Delivery: TypeAlias = tuple[EmbeddingTask, "list[Vector] | LatimerError"]


@dataclass(eq=False, slots=True)
class Input:
    """An input in the context; `done` of its tokens are evaluated."""

    task: EmbeddingTask
    index: int
    sequence: int
    done: int = 0

    @property
    def ids(self) -> TokenIds:
        """The tokens of the input."""
        return self.task.inputs[self.index]


class Embedder:
    """A scheduler of inputs over an embedding context; tasks take turns, input by input.

    Args:
        post: receives everything that a step delivers, in one call.
        generator: the worker that generates in the same thread, so that a batch must be short.
    """

    def __init__(
        self,
        context: EmbeddingContext,
        post: Callable[[list[Delivery]], None],
        generator: Worker | None,
    ) -> None:
        self.context = context
        self._most = context.usual
        self._post = post
        self._generator = generator
        self.seconds = 0.0
        self._wanted = self._most if generator is None else min(FIRST, self._most)
        self._tasks: deque[EmbeddingTask] = deque()
        self._running: list[Input] = []
        self._free = list(range(context.sequences))
        self._outbox: list[Delivery] = []

    @property
    def is_busy(self) -> bool:
        """True if inputs are evaluated or wait, or vectors are not delivered."""
        return bool(self._tasks or self._running or self._outbox)

    def submit(self, task: EmbeddingTask) -> None:
        """Queue a task."""
        self._tasks.append(task)

    def abandon(self, error: EngineError) -> None:
        """End all tasks with an error."""
        tasks = {id(task): task for task in self._all()}.values()
        self._outbox += [(task, error) for task in tasks if not task.cancelled]
        self._tasks.clear()
        self._running.clear()
        self._free = list(range(self.context.sequences))
        self.context.clear()
        self._flush()

    def step(self) -> None:
        """Evaluate one batch, and complete the tasks whose inputs are all evaluated."""
        self._drop_cancelled()
        batch = self._fill()
        count = self.context.used
        # Delivery wakes the event loop, which then runs while the next batch is evaluated.
        self._flush()
        if not batch:
            return
        begun = time.perf_counter()
        try:
            self.context.decode()
        except DecodeFailed as error:
            # The tasks of the batch end; the others continue.
            for one in batch:
                self._end(one.task, EngineError(f"{ENGINE} failed: {error}."))
            self._drop_cancelled()
            self._flush()
            return
        self._collect([one for one in batch if one.done == len(one.ids)])
        if self._generator is not None:
            speed = count / (time.perf_counter() - begun)
            seconds = min(max(STEPS * self._generator.seconds, LEAST_SECONDS), MOST_SECONDS)
            wanted = max(min(int(speed * seconds), 2 * self._wanted), LEAST)
            self._wanted = min(wanted, self._most)
        if self._generator is not None or not (self._tasks or self._running):
            self._flush()

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._post(outbox)

    def _all(self) -> list[EmbeddingTask]:
        return [*self._tasks, *(one.task for one in self._running)]

    def _fill(self) -> list[Input]:
        """Add tokens to the batch: those of inputs that have begun, then whole inputs in turn."""
        batch = [one for one in self._running if self._add(one)]
        while self._free and self._tasks and self.context.used < self._wanted:
            task = self._tasks[0]
            one = Input(task, task.begun, self._free[-1])
            if not self._add(one):
                break
            self._free.pop()
            self._running.append(one)
            batch.append(one)
            task.begun += 1
            self._tasks.popleft()
            if task.begun < len(task.inputs):
                self._tasks.append(task)
        return batch

    def _add(self, one: Input) -> bool:
        """Add as many tokens of an input as fit; all of them if it cannot be split."""
        context = self.context
        left, room = len(one.ids) - one.done, self._wanted - context.used
        count = min(left, max(room, 0))
        if count < left and not context.splits:
            # A long input has a batch of its own.
            count = 0 if context.used else left
        if count:
            context.add(one.sequence, one.done, one.ids[one.done : one.done + count])
            one.done += count
        return count > 0

    def _collect(self, done: Sequence[Input]) -> None:
        if not done:
            return
        rows = np.stack([self.context.vector(one.sequence) for one in done])
        ranks = self.context.pooling == "rank"
        vectors = [array("f", row.tobytes()) for row in (rows if ranks else _normalised(rows))]
        for one, vector, row in zip(done, vectors, rows, strict=True):
            self._leave(one)
            task = one.task
            if not np.isfinite(row).all() or not (ranks or row.any()):
                self._end(task, EngineError(f"{ENGINE} computed an embedding without a direction."))
                continue
            task.found[one.index] = vector
            if len(task.found) == len(task.inputs):
                self._outbox.append((task, [task.found[at] for at in range(len(task.inputs))]))

    def _end(self, task: EmbeddingTask, error: LatimerError) -> None:
        """Deliver an error to a task once; the next step drops its inputs."""
        if not task.cancelled:
            task.cancelled = True
            self._outbox.append((task, error))

    def _leave(self, one: Input) -> None:
        self._running.remove(one)
        self._free.append(one.sequence)
        self.context.remove(one.sequence)

    def _drop_cancelled(self) -> None:
        if any(task.cancelled for task in self._all()):
            self._tasks = deque(task for task in self._tasks if not task.cancelled)
            for one in [one for one in self._running if one.task.cancelled]:
                self._leave(one)


def _normalised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of unit length; a zero vector stays as it is."""
    wide = rows.astype(np.float64)
    norms = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    norms[norms == 0] = 1.0
    result: NDArray[np.float32] = (wide / norms).astype(np.float32)
    return result


_PLACE = re.compile(r"\{(query|document)\}")


class RankPrompts:
    """The prompts of a reranker for one query, as llama.cpp's server writes them.

    Args:
        template: the model's template, with the places `{query}` and `{document}`; without one, a
            prompt is the query and the document between BOS, SEP and EOS.
    """

    def __init__(self, vocabulary: Vocabulary, template: str | None, query: str) -> None:
        self._vocabulary = vocabulary
        self._query = query
        self._template = template
        self._query_ids = self._plain(query)
        self.ids: Callable[[str], tuple[TokenIds, int]] = (
            self._between if template is None else self._filled
        )

    def _plain(self, text: str) -> TokenIds:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)

    def _between(self, document: str) -> tuple[TokenIds, int]:
        """Return the tokens of a prompt, and the number of those of query and document."""
        vocabulary = self._vocabulary
        pointer, own = vocabulary.pointer, self._plain(document)
        with vocabulary.calls.counted():
            eos, sep = llama_cpp.llama_vocab_eos(pointer), llama_cpp.llama_vocab_sep(pointer)
            end = [eos if eos >= 0 else sep] if llama_cpp.llama_vocab_get_add_eos(pointer) else []
            middle = [*end, sep] if llama_cpp.llama_vocab_get_add_sep(pointer) else end
        begin = [vocabulary.bos_id] if vocabulary.adds_bos else []
        ids = (*begin, *self._query_ids, *middle, *own, *end)
        return ids, len(self._query_ids) + len(own)

    def _filled(self, document: str) -> tuple[TokenIds, int]:
        """Return the tokens of a filled template, and their number.

        Control tokens in query and document are text, so texts that spell some are tokenized apart
        from the template.
        """
        texts = {"query": self._query, "document": document}
        vocabulary = self._vocabulary
        if not any(map(self._spells, texts.values())):
            text = _PLACE.sub(lambda place: texts[place[1]], self._template or "")
            ids = vocabulary.tokenize(text, add_special=False, parse_special=True)
            return ids, len(ids)
        found: list[int] = []
        for number, part in enumerate(_PLACE.split(self._template or "")):
            if number % 2:
                found += self._plain(texts[part])
            else:
                found += vocabulary.tokenize(part, add_special=False, parse_special=True)
        return tuple(found), len(found)

    def _spells(self, text: str) -> bool:
        """Return True if a text spells a control token."""
        parsed = self._vocabulary.tokenize(text, add_special=False, parse_special=True)
        return parsed != self._plain(text)
