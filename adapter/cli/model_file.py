"""The file of the model on this machine: its facts, and the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from ...backends.errors import LatimerError
from ...backends.llama_cpp import DEMO_MODEL
from ...backends.llama_cpp.options import parts_of
from ...backends.llama_server.command import SLOTS, SUPPORTED, default_context
from ..engines import is_elsewhere, is_in_process
from ..hub.memory import Estimate, estimate, quantization, read_metadata, trained_context
from ..hub.names import in_units, is_name, parse
from ..settings import Settings

Files: TypeAlias = Sequence[Path]


def files_of(settings: Settings) -> Files:
    """Return the files of the model, in order; empty if they are not on this machine."""
    if settings.engines or is_elsewhere(settings):
        return ()
    try:
        if is_name(settings.model):
            # It needs the hub's client.
            from ..hub.locate import Needs, cached

            found = cached(parse(settings.model or ""), Needs(), any_file=True)
            return () if found is None else found.parts
        return parts_of(DEMO_MODEL if settings.model is None else Path(settings.model))
    except LatimerError:
        return ()


def size_of(files: Files) -> int:
    """Return the bytes of files; those that are missing have none."""
    return sum(file.stat().st_size for file in files if file.is_file())


def facts_of(settings: Settings, files: Files) -> Iterator[tuple[str, str]]:
    """Yield what the file of a model says about itself."""
    metadata = read_metadata(files[0]) or {}
    parts = f", {len(files)} parts" if len(files) > 1 else ""
    yield "file", f"{files[0].name}{parts}"
    yield "size", in_units(size_of(files))
    yield "architecture", str(metadata.get("general.architecture", "unknown"))
    yield "quantization", quantization(metadata) or "unknown"
    yield "trained context", str(trained_context(metadata) or "unknown")
    yield "vocabulary", str(metadata.get("tokenizer.ggml.tokens", "unknown"))
    if settings.mmproj is not None:
        yield "projector", settings.mmproj.name


def needed_by(settings: Settings, files: Files, context: int | None) -> Estimate:
    """Return the memory that a model needs.

    Args:
        context: the context of the engine in process; None for the default one. A llama-server has
            a KV cache of its own size, of which it reports the part that one request can use.
    """
    weights = [*files]
    if is_in_process(settings):
        # An exact engine has no other.
        cache_type = "f32" if settings.exact else settings.cache_type
        supported = frozenset({"lora", "draft_model"})
    else:
        supported, cache_type = SUPPORTED, settings.cache_type
        slots = settings.parallel if "parallel" in settings.model_fields_set else SLOTS
        trained = trained_context(read_metadata(files[0]) or {})
        context = settings.context or default_context(trained, slots)
    if "lora" in supported:
        weights += [Path(path) for path, _ in settings.adapters()]
    if settings.draft_model is not None and "draft_model" in supported:
        weights.append(settings.draft_model)
    if settings.mmproj is not None:
        weights.append(settings.mmproj)
    return estimate(read_metadata(files[0]), size_of(weights), context, cache_type)


def memory_in_words(memory: Estimate) -> str:
    """Return the memory that a model needs, and what takes it."""
    return (
        f"about {in_units(memory.total)}: weights {in_units(memory.weights)}, KV cache "
        f"{in_units(memory.kv)} for {memory.context:,} tokens, compute {in_units(memory.compute)}"
    )
