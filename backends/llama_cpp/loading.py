"""Loading of a model file into an engine that is ready to run."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llama_cpp

from ..base import MediaKind, Model, Pooling, TokenIds
from ..errors import EngineError
from ..pooling import pooling_of
from .cache import Cache
from .draft_model import DraftModel
from .embedder import Embedder, EmbeddingContext
from .grammars import Candidates, Grammars
from .library import Context, LoadedModel
from .loop import Loop
from .options import DEFAULT_CONTEXT, Options, name_of, parts_of
from .projector import Projector
from .scheduler import Delivery, Scheduler
from .state_files import StateFiles
from .states import States
from .tiles import least_cells
from .trace import Trace
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a loaded engine.

    Args:
        loop: the loop of the engine's thread.
        generator: what generates; None for a model that only embeds.
        embedder: what embeds and ranks; None for a model that only generates.
        rerank: the template of a reranker's prompts, if the file has one.
    """

    model: Model
    vocabulary: Vocabulary
    loop: Loop
    generator: Generator | None
    embedder: Embedder | None
    rerank: str | None


@dataclass(frozen=True, slots=True)
class Generator:
    """The parts of an engine that generate.

    Args:
        recall: moves the state of an owner's prompt from disk to memory; see `StateFiles.recall`.
    """

    scheduler: Scheduler
    grammars: Grammars
    projector: Projector | None
    recall: Callable[[str, TokenIds], None] | None


def load(
    path: Path,
    options: Options,
    progress: Callable[[float], None] | None,
    post: Callable[[Sequence[tuple[Any, Any]]], None],
    stack: contextlib.ExitStack,
    trace: Trace | None = None,
) -> Engine:
    """Load a model.

    Args:
        progress: called with the fraction that is done, from 0 to 1.
        post: receives what the workers deliver: tasks, and what their mailboxes receive.
        stack: receives the callbacks that free everything, in the right order.
        trace: receives the spans of the scheduler's steps.

    Raises:
        EngineError: the model cannot be loaded, or not with these options.
    """
    parts = parts_of(path)
    model = LoadedModel(parts[0], options, progress)
    stack.callback(model.close)
    length = options.context or min(model.trained_context, DEFAULT_CONTEXT)
    pooling = pooling_of(
        parts[0], model.purpose, options.embeddings, options.pooling, options.mmproj
    )
    only_embeds = pooling is not None and model.purpose.only_embeds
    if options.draft_model is not None and only_embeds:
        raise EngineError(f"{path} is an embedding model, without drafts. Omit --draft-model.")
    vocabulary = Vocabulary(model)
    stack.callback(vocabulary.close)
    generator = embedder = None
    media: frozenset[MediaKind] = frozenset()
    if not only_embeds:
        generator = _generator(parts, model, vocabulary, options, length, post, stack, trace)
        media = frozenset() if generator.projector is None else generator.projector.kinds
    if pooling is not None:
        context = EmbeddingContext(model, options, pooling)
        stack.callback(context.close)
        embedder = Embedder(context, post, None if generator is None else generator.scheduler)
        length = context.length if generator is None else length
    workers = (None if generator is None else generator.scheduler, embedder)
    return Engine(
        _model(parts, model, vocabulary, options, length, media, pooling),
        vocabulary,
        Loop([worker for worker in workers if worker is not None]),
        generator,
        embedder,
        model.template("rerank"),
    )


def _generator(
    parts: Sequence[Path],
    model: LoadedModel,
    vocabulary: Vocabulary,
    options: Options,
    length: int,
    post: Callable[[list[Delivery]], None],
    stack: contextlib.ExitStack,
    trace: Trace | None,
) -> Generator:
    projector = None
    if options.mmproj is not None:
        projector = Projector(options.mmproj, model, options)
        stack.callback(projector.close)
    context = Context(model, options, length)
    stack.callback(context.close)
    candidates = Candidates(vocabulary.size)
    grammars = Grammars(vocabulary, candidates)
    stack.callback(grammars.close)
    # A saved sliding window lacks the tokens that have left it, so it cannot be cut anywhere.
    cuts = model.rolls_back and not context.window
    files, waiting = None, 0
    if options.cache_dir is not None:
        # A part of the host memory is for states that are being written.
        waiting = options.cache_memory // 4
        identity = _identity(parts, model, options)
        files = StateFiles(options.cache_dir, options.cache_disk, waiting, identity, cuts)
    evicted = None if files is None else files.put
    memory = options.cache_memory - waiting
    # And a part is for the checkpoints of sequences in the KV cache.
    kept = 0 if cuts else memory // 3
    states = States(memory - kept, cuts, evicted=evicted)
    cache = Cache(context, length, options.slots, model.rolls_back, states, kept)
    # A recurrent state cannot remove the tokens of a draft again. A window can: what a batch
    # overwrites had left it before. A larger batch changes the last digits of logits.
    can_draft = model.rolls_back and not options.exact
    draft_model = None
    if options.draft_model is not None:
        if not can_draft:
            raise EngineError(
                f"llama.cpp cannot remove the tokens of a draft from the memory of {parts[0]}. "
                "Omit --draft-model."
            )
        draft_model = DraftModel(options.draft_model, options, length, vocabulary)
        stack.callback(draft_model.close)
    scheduler = Scheduler(
        context, vocabulary, cache, candidates, options.limit, post, projector, trace,
        can_draft and options.prompt_lookup, draft_model, least_cells(model, options),
    )  # fmt: skip
    if files is None:
        return Generator(scheduler, grammars, projector, None)
    stack.callback(files.close, cache)
    return Generator(scheduler, grammars, projector, partial(files.recall, cache))


def _identity(parts: Sequence[Path], model: LoadedModel, options: Options) -> str:
    """Return everything that decides what the bytes of a saved state mean."""
    files = [*parts, *(path for path, _ in options.lora)]
    if options.mmproj is not None:
        files.append(options.mmproj)
    facts = [
        llama_cpp.__version__,
        llama_cpp.llama_version(),
        llama_cpp.LLAMA_STATE_SEQ_VERSION,
        model.describe(),
        [_identity_of(file) for file in files],
        [scale for _, scale in options.lora],
        options.cache_type,
        options.flash_attention,
    ]
    return repr(facts)


def _identity_of(file: Path) -> tuple[int, int, str]:
    """Return a file's size, its time, and a digest of its beginning and its end.

    Two fine-tuned models can have the same size and, in an image of a container, the same time.
    """
    with file.open("rb") as opened:
        stat = os.fstat(opened.fileno())
        digest = hashlib.sha256(opened.read(1 << 20))
        opened.seek(max(stat.st_size - (1 << 20), 0))
        digest.update(opened.read())
    return stat.st_size, stat.st_mtime_ns, digest.hexdigest()


def _model(
    parts: Sequence[Path],
    model: LoadedModel,
    vocabulary: Vocabulary,
    options: Options,
    length: int,
    media: frozenset[MediaKind],
    pooling: Pooling | None,
) -> Model:
    mmproj = None if options.mmproj is None else options.mmproj.name
    adapters = tuple(f"{path.name}:{scale:g}" for path, scale in options.lora)
    shape = (options.exact, options.cache_type, adapters, mmproj)
    size = sum(part.stat().st_size for part in parts)
    facts = f"{model.describe()}\n{parts[0].name}\n{size}\n{length}\n{shape}"
    if pooling is not None:
        facts += f"\n{pooling}"
    return Model(
        name=name_of(parts[0]),
        context=length,
        template=model.template(),
        bos_token=vocabulary.bos,
        eos_token=vocabulary.eos,
        adds_bos=vocabulary.adds_bos,
        fingerprint="fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10],
        modified=int(parts[0].stat().st_mtime),
        media=media,
        adapters=adapters,
        sizes=model.sizes(),
        places=options.limit,
        build=f"llama-cpp-python {llama_cpp.__version__}",
    )
