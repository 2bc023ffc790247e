"""The in-process backend: load a model in a thread and run jobs from the event loop on it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from .. import offload
from ..base import (
    LLAMA_CPP_EXTRAS,
    Backend,
    Batch,
    Capabilities,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Generation,
    Load,
    Model,
    Pooling,
    Ranking,
    Scores,
    Special,
    TokenIds,
)
from ..errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    LatimerError,
    check_ids,
    ends_with_media,
)
from ..pooling import not_generated
from ..queue import QUEUE, Ticket, check_room
from ..streams import end_at_once
from .embeddings import embed, facts_of, rank
from .options import (
    BATCH,
    CACHE_DISK,
    CLOSE_SECONDS,
    ENGINE,
    EXTRA,
    MISSING,
    PARALLEL,
    CacheType,
    Options,
    default_cache_memory,
    default_threads,
)
from .prompts import TokenizedPrompt, prompt_of, size_of

if TYPE_CHECKING:
    from .grammars import Constraint
    from .loading import Engine
    from .projector import Chunk
    from .tasks import Mailbox, Task
    from .trace import Trace
    from .vocabulary import Vocabulary

DEMO_MODEL = Path(__file__).with_name("demo.gguf")

CAPABILITIES = Capabilities(
    engine=ENGINE,
    extras=LLAMA_CPP_EXTRAS | {"min_tokens"},
    grammars=frozenset({"gbnf", "json_schema", "regex", "lark"}),
    refused={
        "oai_compat": "The in-process engine has no native response. Omit it.",
    },
    native=False,
    own_caches=True,
)


class LlamaCpp(Backend):
    """A GGUF model in this process.

    Args:
        path: the model file; the bundled demo model by default.
        context: size of the KV cache in tokens, which all running choices share for prompts and
            completions; by default the model's training context length, at most 8192.
        parallel: the number of choices that run in parallel, at most `batch`.
        batch: the maximum number of tokens in one batch.
        threads: CPU threads; by default one for each core that this process may use.
        gpu_layers: layers to offload to the GPU; a negative number (the default) offloads all of
            them. Ignored without a GPU.
        cache_type: type of the KV cache; f16 by default, f32 with `exact`.
        cache_memory: host memory in bytes for saved sequences, which later prompts can reuse; by
            default a quarter of the free memory, at most 8 GiB.
        cache_dir: folder for saved sequences that leave host memory, also at shutdown. Later
            prompts can reuse them, also after a restart. None to discard them.
        cache_disk: the bytes that the files in `cache_dir` may take.
        flash_attention: True to use flash attention; by default llama.cpp decides.
        mmap: True to map the file into memory; False to read it, on Linux into huge pages. By
            default llama.cpp decides.
        mlock: True to keep the weights from being swapped out.
        lora: LoRA adapters, each a file, or a file and its scale.
        mmproj: a projector file, which lets the model take images or audio.
        exact: True to make log-probabilities independent of concurrent requests: no flash
            attention, an f32 KV cache, one choice at a time, and no prompt cache.
        embeddings: True to embed with a model that also generates, in a context of its own. By
            default a model embeds only if it is made for embeddings, and then it does not generate.
        pooling: how the vectors of an input's tokens become one; by default as the model's file
            says, or else `last`. It implies `embeddings`.
        max_waiting: the number of requests that may wait, in addition to those that run; further
            requests fail with `Busy`.
        prompt_lookup: False to draft no tokens from what the prompt and the answer so far repeat.
            Drafts make edits and quotations faster, and change no answer.
        draft_model: a smaller model with the same vocabulary, which drafts the other tokens.
        trace: a file for a trace of the engine's steps, which Perfetto opens; it is overwritten.
        progress: called while the model loads with the fraction that is done, from 0 to 1.
    """

    capabilities: Capabilities = CAPABILITIES

    loads_here = True

    def __init__(
        self,
        path: str | Path = DEMO_MODEL,
        *,
        context: int | None = None,
        parallel: int = PARALLEL,
        batch: int = BATCH,
        threads: int | None = None,
        gpu_layers: int = -1,
        cache_type: CacheType | None = None,
        cache_memory: int | None = None,
        cache_dir: str | Path | None = None,
        cache_disk: int = CACHE_DISK,
        flash_attention: bool | None = None,
        mmap: bool | None = None,
        mlock: bool = False,
        lora: Sequence[str | Path | tuple[str | Path, float]] = (),
        mmproj: str | Path | None = None,
        exact: bool = False,
        embeddings: bool | None = None,
        pooling: Pooling | None = None,
        max_waiting: int = QUEUE,
        prompt_lookup: bool = True,
        draft_model: str | Path | None = None,
        trace: str | Path | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        # The working directory can change before the model is loaded, and errors show the path.
        self._path = Path(path).absolute()
        self._options = Options(
            context=context,
            parallel=parallel,
            batch=batch,
            threads=default_threads() if threads is None else threads,
            gpu_layers=gpu_layers,
            cache_type=cache_type,
            cache_memory=default_cache_memory() if cache_memory is None else cache_memory,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            cache_disk=cache_disk,
            flash_attention=flash_attention,
            mmap=mmap,
            mlock=mlock,
            lora=tuple(
                (Path(one[0]), one[1]) if isinstance(one, tuple) else (Path(one), 1.0)
                for one in lora
            ),
            mmproj=None if mmproj is None else Path(mmproj),
            exact=exact,
            embeddings=embeddings,
            pooling=pooling,
            prompt_lookup=prompt_lookup,
            draft_model=None if draft_model is None else Path(draft_model),
            trace=None if trace is None else Path(trace),
        )
        self._max_waiting = max_waiting
        self._progress = progress
        self._requests = 0
        self._loaded: Future[Engine] | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    async def model(self) -> Model:
        """Load the model on the first call; see `Backend.model`."""
        return (await self._engine()).model

    @asynccontextmanager
    @override
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        engine = await self._engine()
        generator = engine.generator
        if generator is None:
            assert engine.embedder is not None
            raise not_generated(ENGINE, engine.embedder.context.pooling)
        constraint = None
        if job.grammar is not None:
            constraint = await generator.grammars.compile(job.grammar)
        await self._prepare_dry(job, engine.vocabulary, generator.scheduler.size)
        parts: list[list[int | Chunk]] = []
        if generator.projector is not None:
            # Decoding an image is slow; the event loop and the engine keep running meanwhile.
            read = generator.projector.read
            parts = [await asyncio.to_thread(read, one) for one in job.prompt.media]
        size = size_of(job, engine.vocabulary)
        prompt = await offload.run(
            size, prompt_of, job, engine.vocabulary, parts, engine.model.context
        )
        task, mailbox = self._task(job, engine, constraint, prompt)
        if task.max_tokens == 0 and task.job.prompt.logprobs is None:
            yield end_at_once(job, task.prompt_tokens)
            return
        with self._let_in(task.ticket):
            if generator.recall is not None:
                await asyncio.to_thread(generator.recall, job.owner, prompt.ids)
            engine.loop.submit(generator.scheduler, task)
            try:
                yield mailbox
            except BaseException:
                task.note_tokens()
                raise
            finally:
                task.cancelled = True
                # They refer to it.
                task.runs = []

    @override
    async def check(self, job: Generation) -> None:
        engine = await self._engine()
        if engine.generator is not None and not job.prompt.media:
            vocabulary, context = engine.vocabulary, engine.model.context
            size = size_of(job, vocabulary)
            prompt = await offload.run(size, prompt_of, job, vocabulary, (), context)
            self._task(job, engine, None, prompt)

    async def _prepare_dry(self, job: Generation, vocabulary: Vocabulary, context: int) -> None:
        """Create a job's DRY sampler in a worker thread, which does not block the engine's."""
        if not job.sampling.extras.get("dry_multiplier"):
            return
        from .chain import dry_of, prepare

        dry = dry_of(job.sampling.extras_within(context), context)
        if dry is not None:
            await offload.run(offload.UNKNOWN, prepare, vocabulary, dry)

    @contextlib.contextmanager
    def _let_in(self, ticket: Ticket) -> Iterator[None]:
        """Count a job of a request while it runs.

        Raises:
            Busy: too many requests wait. A request that was admitted before never gets this error.
        """
        waiting = self._requests - self._options.limit
        check_room(waiting, self._max_waiting, ticket, 1.0)
        ticket.admitted = True
        self._requests += not ticket.jobs
        ticket.jobs += 1
        try:
            yield
        finally:
            ticket.jobs -= 1
            self._requests -= not ticket.jobs

    @override
    async def embedding_model(self) -> EmbeddingModel | None:
        return facts_of(await self._engine())

    @override
    async def embed(self, job: Embedding) -> Embeddings:
        """Inputs of several jobs are evaluated together."""
        engine = await self._engine()
        with self._let_in(job.ticket or Ticket()):
            return await embed(engine, job)

    @override
    async def rank(self, job: Ranking) -> Scores:
        engine = await self._engine()
        with self._let_in(job.ticket or Ticket()):
            return await rank(engine, job)

    @override
    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> TokenIds:
        vocabulary = (await self._engine()).vocabulary

        def ids() -> TokenIds:
            return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)

        return await offload.run(vocabulary.weight(text), ids)

    @override
    async def detokenize(self, ids: TokenIds) -> bytes:
        vocabulary = (await self._engine()).vocabulary

        def text() -> bytes:
            check_ids("prompt", ids, vocabulary.size)
            return vocabulary.detokenize(ids)

        return await offload.run(len(ids), text)

    @override
    async def token_bytes(self) -> Sequence[bytes]:
        return (await self._engine()).vocabulary.pieces

    @override
    async def special_tokens(self) -> Sequence[Special]:
        vocabulary = (await self._engine()).vocabulary
        return await offload.run(vocabulary.size, lambda: vocabulary.specials)

    @override
    def load(self) -> Load | None:
        loaded = self._loaded
        if loaded is None or not loaded.done() or loaded.exception() is not None:
            return None
        generator = loaded.result().generator
        return Load(0, 0) if generator is None else generator.scheduler.load()

    @override
    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the engine's thread and free its memory."""
        thread, loaded = self._thread, self._loaded
        self._thread = self._loaded = None
        atexit.unregister(self.close)
        if thread is None or loaded is None:
            return
        if loaded.exception() is None:
            loaded.result().loop.stop()
        thread.join(timeout=5 if self._options.cache_dir is None else 5 + CLOSE_SECONDS)

    async def _engine(self) -> Engine:
        loaded = self._loaded
        if loaded is None:
            with self._starting:
                if self._loaded is None:
                    self._loaded = Future()
                    # A request that is cancelled must not cancel the load that others wait for.
                    self._loaded.set_running_or_notify_cancel()
                    arguments = (self._loaded, threading.get_ident())
                    self._thread = threading.Thread(
                        target=self._run, args=arguments, name="latimer-engine", daemon=True
                    )
                    # A daemon thread that is in llama.cpp during shutdown would crash Python.
                    atexit.register(self.close)
                    self._thread.start()
                loaded = self._loaded
        if not loaded.done():
            await asyncio.wrap_future(loaded)
        try:
            return loaded.result()
        except Exception as error:
            # Each request would add its frames, which hold it, to those of the error.
            error.__traceback__ = None
            raise

    def _run(self, loaded: Future[Engine], event_loop: int) -> None:
        """Load the model, run the scheduler until it stops, and free everything.

        Args:
            event_loop: the identifier of the event loop's thread.
        """
        try:
            from .loading import load
        except Exception as error:
            missing = isinstance(error, ImportError) and str(error.name).partition(".")[0] in EXTRA
            loaded.set_exception(EngineError(MISSING if missing else repr(error)))
            return
        with contextlib.ExitStack() as stack:
            try:
                trace = _trace_of(self._options, event_loop, stack)
                post = _post if trace is None else functools.partial(_post_traced, trace)
                engine = load(self._path, self._options, self._progress, post, stack, trace)
            except Exception as error:
                loaded.set_exception(
                    error if isinstance(error, LatimerError) else EngineError(repr(error))
                )
                return
            loaded.set_result(engine)
            engine.loop.run()

    def _task(
        self,
        job: Generation,
        engine: Engine,
        constraint: Constraint | None,
        read: TokenizedPrompt,
    ) -> tuple[Task, Mailbox]:
        from .tasks import Mailbox, Task

        model, vocabulary = engine.model, engine.vocabulary
        prompt, count, chunks, shown, prediction = read
        check_ids("logit_bias", [i for i, _ in job.sampling.logit_bias], vocabulary.size)
        if not prompt:
            raise EmptyPrompt
        if prompt[-1] < 0:
            raise ends_with_media(ENGINE)
        room = model.context - len(prompt)
        wanted = 0 if job.clips else job.max_tokens or 0
        if room < 0 or wanted > room or (room == 0 and job.max_tokens != 0):
            raise ContextExceeded(model.context, len(prompt), job.max_tokens or 0)
        if job.prompt.logprobs is not None and not count:
            # The prompt is only a BOS token, so there is nothing to score.
            job = replace(job, prompt=replace(job.prompt, logprobs=None))
        stop_tokens = {
            token: stop
            for stop in job.stops.for_engine
            if (token := vocabulary.control_token(stop)) is not None
        }
        preserved = {
            token: marker.encode()
            for marker in job.preserved_tokens
            if (token := vocabulary.special_token(marker)) is not None
            and token not in vocabulary.ends
        }
        mailbox = Mailbox(asyncio.get_running_loop(), len(job.seeds))
        max_tokens = room if job.max_tokens is None else min(job.max_tokens, room)
        ticket = job.ticket or Ticket()
        ticket.input = count
        task = Task(
            job, prompt, count, shown, max_tokens, stop_tokens, preserved, mailbox, constraint,
            chunks, ticket, not (job.streamed or job.stops.by_reader), prediction,
        )  # fmt: skip
        return task, mailbox


def _trace_of(options: Options, event_loop: int, stack: contextlib.ExitStack) -> Trace | None:
    if options.trace is None:
        return None
    from .trace import Trace

    try:
        trace = Trace(options.trace, event_loop)
    except OSError as error:
        raise EngineError(f"Cannot write the trace: {error}. Choose another file.") from error
    stack.callback(trace.close)
    return trace


def _post(
    deliveries: Sequence[tuple[Any, Any]],
    deliver: Callable[[list[tuple[Any, Any]]], None] | None = None,
) -> None:
    """Deliver what a step found, with one callback for each event loop that waits for some."""
    deliver = deliver or _deliver
    loops: dict[asyncio.AbstractEventLoop, list[tuple[Any, Any]]] = {}
    for delivery in deliveries:
        loops.setdefault(delivery[0].mailbox.loop, []).append(delivery)
    for loop, batch in loops.items():
        try:
            loop.call_soon_threadsafe(deliver, batch)
        except RuntimeError:
            # A closed event loop has no readers.
            continue


def _post_traced(trace: Trace, deliveries: Sequence[tuple[Any, Any]]) -> None:
    posted = time.perf_counter_ns()

    def deliver(batch: list[tuple[Any, Any]]) -> None:
        begun = time.perf_counter_ns()
        _deliver(batch)
        trace.deliver(posted, begun)

    _post(deliveries, deliver)


def _deliver(deliveries: list[tuple[Any, Any]]) -> None:
    for task, found in deliveries:
        task.mailbox.deliver(found)
