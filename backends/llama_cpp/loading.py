"""Loading of a model file into an engine that is ready to run."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..base import Model
from .cache import Cache
from .grammars import Candidates, Grammars
from .library import Context, LoadedModel
from .options import DEFAULT_CONTEXT, Options, name_of, parts_of
from .projector import Projector
from .scheduler import Delivery, Scheduler
from .states import States
from .vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Engine:
    """The parts of a loaded engine."""

    model: Model
    vocabulary: Vocabulary
    scheduler: Scheduler
    grammars: Grammars
    projector: Projector | None


def load(
    path: Path,
    options: Options,
    progress: Callable[[float], None] | None,
    post: Callable[[list[Delivery]], None],
    stack: contextlib.ExitStack,
) -> Engine:
    """Load a model.

    Args:
        progress: called with the fraction that is done, from 0 to 1.
        post: receives the events that the scheduler delivers.
        stack: receives the callbacks that free everything, in the right order.

    Raises:
        EngineError: the model cannot be loaded, or not with these options.
    """
    parts = parts_of(path)
    model = LoadedModel(parts[0], options, progress)
    stack.callback(model.close)
    projector = None
    if options.mmproj is not None:
        projector = Projector(options.mmproj, model, options)
        stack.callback(projector.close)
    length = options.context or min(model.trained_context, DEFAULT_CONTEXT)
    context = Context(model, options, length)
    stack.callback(context.close)
    vocabulary = Vocabulary(model)
    candidates = Candidates(vocabulary.size)
    grammars = Grammars(vocabulary, candidates)
    stack.callback(grammars.close)
    # A saved sliding window lacks the tokens that have left it, so it is reusable only as a whole.
    states = States(options.cache_memory, model.rolls_back and not model.has_window)
    cache = Cache(context, length, options.slots, model.rolls_back, states)
    scheduler = Scheduler(context, vocabulary, cache, candidates, options.limit, post, projector)
    mmproj = None if options.mmproj is None else options.mmproj.name
    adapters = [(p.name, scale) for p, scale in options.lora]
    shape = (options.exact, options.cache_type, adapters, mmproj)
    size = sum(part.stat().st_size for part in parts)
    facts = f"{model.describe()}\n{parts[0].name}\n{size}\n{length}\n{shape}"
    return Engine(
        Model(
            name=name_of(path),
            context=length,
            template=model.template(),
            bos_token=vocabulary.bos,
            eos_token=vocabulary.eos,
            adds_bos=vocabulary.adds_bos,
            fingerprint="fp_" + hashlib.sha256(facts.encode()).hexdigest()[:10],
            modified=int(parts[0].stat().st_mtime),
            media=frozenset() if projector is None else projector.kinds,
            sizes=model.sizes(),
        ),
        vocabulary,
        scheduler,
        grammars,
        projector,
    )
