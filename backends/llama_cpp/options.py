"""The options of the in-process engine, and the files of a model."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from ..base import Pooling
from ..errors import EngineError, shortened
from ..pooling import check_pooling

CacheType: TypeAlias = Literal[
    "f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"
]

ENGINE = "llama.cpp in process"
# The modules that the extra installs.
EXTRA = frozenset({"llama_cpp", "llguidance", "numpy"})
MISSING = (
    "llama.cpp in process requires the extra 'llama-cpp': run pip install '.[llama-cpp]' in a "
    "clone of Latimer. Without it, 'latimer serve' uses a llama-server: from llama.cpp, or of "
    "pip install xllamacpp. An app uses one that runs: LlamaServer(URL)."
)
# What to do about a file that llama.cpp cannot load.
INCOMPLETE = (
    "Compare the size of the file with that of its source, since a download can be incomplete. A "
    "new kind of model needs a newer llama.cpp."
)
# The error of requests that the end of the engine cuts, or comes before.
SHUT_DOWN = "The engine was shut down."
PARALLEL = 16
BATCH = 512
# The maximum in llama.cpp (`llama_max_parallel_sequences`).
MOST_SEQUENCES = 256
CACHE_DISK = 8 << 30
# The least and the largest value of each number that is the same in a setting. llama.cpp aborts
# with more than 512 threads (GGML_MAX_N_THREADS).
BOUNDS = {
    "context": (1, 2**24),
    "parallel": (1, MOST_SEQUENCES),
    "batch": (1, 2**20),
    "threads": (1, 512),
    "gpu_layers": (-1, 2**20),
}
# Seconds that writing saved sequences may take at shutdown.
CLOSE_SECONDS = 60
DEFAULT_CONTEXT = 8192

_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class ModelNotFound(EngineError):
    """A path at which there is no file of a model."""


def default_cache_memory() -> int:
    """Return the bytes for saved sequences: a quarter of the free memory, at most 8 GiB.

    If the system does not report its free memory, return 1 GiB.
    """
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 30
    return min(free // 4, 8 << 30)


def default_threads() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an engine, which `LlamaCpp` documents.

    Raises:
        EngineError: an option is wrong, or two contradict each other.
    """

    context: int | None = None
    parallel: int = PARALLEL
    batch: int = BATCH
    threads: int = field(default_factory=default_threads)
    gpu_layers: int = -1
    cache_type: CacheType | None = None
    cache_memory: int = field(default_factory=default_cache_memory)
    cache_dir: Path | None = None
    cache_disk: int = CACHE_DISK
    flash_attention: bool | None = None
    mmap: bool | None = None
    mlock: bool = False
    lora: tuple[tuple[Path, float], ...] = ()
    mmproj: Path | None = None
    exact: bool = False
    embeddings: bool | None = None
    pooling: Pooling | None = None
    trace: Path | None = None
    prompt_lookup: bool = True
    draft_model: Path | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if value is None and name == "context":
                continue
            if type(value) is not int or not least <= value <= most:
                raise EngineError(
                    f"'{name}' must be a whole number from {least} to {most}, not "
                    f"{shortened(repr(value))}."
                )
        if self.cache_type is not None and self.cache_type not in get_args(CacheType):
            raise EngineError(
                f"'cache_type' must be one of {', '.join(get_args(CacheType))}, not "
                f"{shortened(repr(self.cache_type))}."
            )
        if self.exact and self.flash_attention:
            raise EngineError("'exact' does not support flash attention. Omit one of them.")
        if self.exact and self.cache_type not in (None, "f32"):
            raise EngineError(
                f"'exact' requires the KV cache type f32, not {self.cache_type}. Omit one of them."
            )
        if self.exact and self.draft_model is not None:
            raise EngineError("'exact' does not support a draft model. Omit one of them.")
        check_pooling(self.embeddings, self.pooling)
        if self.exact:
            object.__setattr__(self, "cache_memory", 0)
        if self.cache_dir is not None and not self.cache_memory:
            reason = "'exact' is true" if self.exact else "'cache_memory' is 0"
            raise EngineError(
                f"'cache_dir' requires host memory for saved prompts, and {reason}. Omit one of "
                "the two."
            )

    @property
    def has_quantized_cache(self) -> bool:
        """True if the KV cache is quantized, which needs flash attention."""
        return self.cache_type not in (None, "f32", "f16", "bf16")

    @property
    def limit(self) -> int:
        """The number of choices that run in parallel; 1 with `exact`.

        Other sequences in the batch or the KV cache change the last digits of a logit, and more
        than those with quantised weights. Without it, each step has a token of every choice, so the
        batch is a limit as well.
        """
        return 1 if self.exact else min(self.parallel, self.batch)

    @property
    def slots(self) -> int:
        """The number of sequences in the KV cache: those that run, and as many idle ones."""
        return 1 if self.exact else min(2 * self.limit, MOST_SEQUENCES)


def parts_of(path: Path) -> Sequence[Path]:
    """Return the files of a model in order; `path` may be any of its parts.

    Raises:
        ModelNotFound: none of the files exists.
        EngineError: some of the files do not exist.
        OSError: the system does not say: a name is too long, or a folder may not be searched.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        parts = [path]
    else:
        count = int(match["count"])
        names = [f"{match['prefix']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
        parts = [path.with_name(name) for name in names]
    missing = [part for part in parts if not part.is_file()]
    if missing == parts:
        # From Python 3.14 on, `is_file` is False for every error, also for a file that exists.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            missing[0].stat()
        raise ModelNotFound(f"There is no model at {path}.")
    if missing:
        listed = ", ".join(part.name for part in missing)
        raise EngineError(
            f"The model at {path} has {len(parts)} parts; missing: {listed}. Put all parts into "
            "one folder."
        )
    return parts


def name_of(path: Path) -> str:
    """Return a model's name: its file name without the part number and the extension."""
    match = _PART.fullmatch(path.name)
    return match["prefix"] if match is not None else path.stem
