"""The ctypes layer: loading, decoding and memory, with checks for everything that would abort.

A failed GGML_ASSERT ends the process. So ids, positions and batch sizes are validated before
llama.cpp sees them (`llama_batch_allocr::init` in src/llama-batch.cpp lists what it rejects).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from ..pooling import purpose_of
from .huge_pages import StateMemory, huge_pages
from .options import INCOMPLETE, MOST_SEQUENCES, SHUT_DOWN, CacheType, Options


class Batch:
    """A batch of at most `size` tokens; `native` is llama.cpp's view of its arrays."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._token = np.zeros(size, np.int32)
        self._position = np.zeros(size, np.int32)
        self._sequence = np.zeros(size, np.int32)
        self._output = np.zeros(size, np.int8)
        ones = np.ones(size, np.int32)
        # Each token's list of sequences has one entry: a pointer to its own element.
        pointers = (self._sequence.ctypes.data + np.arange(size, dtype=np.uint64) * 4).astype(
            np.uint64
        )
        self._keep: list[NDArray[np.generic]] = [ones, pointers]
        self._native = llama_cpp.llama_batch(
            0,
            as_pointer(self._token, ctypes.c_int32),
            None,
            as_pointer(self._position, ctypes.c_int32),
            as_pointer(ones, ctypes.c_int32),
            ctypes.cast(pointers.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            as_pointer(self._output, ctypes.c_int8),
        )
        self.used = 0

    @property
    def native(self) -> Any:
        """The `llama_batch` with the tokens that have been added."""
        self._native.n_tokens = self.used
        return self._native

    @property
    def room(self) -> int:
        """The number of tokens that still fit."""
        return self._size - self.used

    def add(self, sequence: int, position: int, tokens: Sequence[int], outputs: int) -> None:
        """Add consecutive tokens of a sequence; the last `outputs` are outputs."""
        start, end = self.used, self.used + len(tokens)
        if not start < end <= self._size:
            raise ValueError(f"{len(tokens)} tokens do not fit into a batch with {self.room} left")
        self.used = end
        if len(tokens) == 1:
            # Most steps have no others, and slices take five times as long.
            self._token[start], self._position[start] = tokens[0], position
            self._sequence[start], self._output[start] = sequence, outputs
            return
        self._token[start:end] = tokens
        self._position[start:end] = np.arange(position, position + len(tokens), dtype=np.int32)
        self._sequence[start:end] = sequence
        self._output[start:end] = 0
        self._output[end - outputs : end] = 1

    def clear(self) -> None:
        """Remove all tokens."""
        self.used = 0


def as_pointer(array: NDArray[np.generic], kind: type) -> object:
    """Return an array's data as a pointer to elements of a C type."""
    return array.ctypes.data_as(ctypes.POINTER(kind))


# Seconds between looks for calls that still run.
_LOOK = 0.005


class Calls:
    """The calls of worker threads, which outlive a shutdown, to what llama.cpp frees then.

    They take no lock, which `offload.Abandoned` could leave taken; a set changes in one step.
    """

    def __init__(self) -> None:
        self._running = set[object]()
        self._is_closed = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call while it runs.

        Raises:
            EngineError: the engine was shut down.
        """
        call = object()
        try:
            self._running.add(call)
            if self._is_closed:
                raise EngineError(SHUT_DOWN)
            yield
        finally:
            self._running.discard(call)

    def close(self) -> None:
        """Wait for the calls that run, and reject later ones."""
        self._is_closed = True
        while self._running:
            time.sleep(_LOOK)


_START = threading.Lock()
_messages: list[str] = []
_started = False


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def keep_errors(level: int, text: bytes, _data: object) -> None:
    """Keep the errors in llama.cpp's log for `last_error`, and ignore its other lines."""
    # GGML_LOG_LEVEL_ERROR is 4; the rest would fill the user's terminal.
    if level == 4:
        _messages.append(text.decode(errors="replace").strip())
        del _messages[:-20]


CACHE_TYPES: dict[CacheType, int] = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "bf16": 30,  # GGML_TYPE_BF16, which llama-cpp-python does not name
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
    "iq4_nl": llama_cpp.GGML_TYPE_IQ4_NL,
}
_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
# Bytes of logits in one batch: those of all tokens would take gigabytes with a large vocabulary.
MAX_LOGITS = 64 * 1024 * 1024


def start() -> None:
    """Initialise llama.cpp once for the process, and keep it from writing to the terminal."""
    global _started
    with _START:
        if not _started:
            llama_cpp.llama_log_set(keep_errors, None)
            llama_cpp.llama_backend_init()
            _started = True


class LoadedModel:
    """A model's weights and vocabulary, as llama.cpp's pointers.

    Raises:
        EngineError: llama.cpp cannot load the file, the model is of a kind that cannot be served,
            or a LoRA adapter does not fit the model.
    """

    def __init__(
        self, path: Path, options: Options, progress: Callable[[float], None] | None = None
    ) -> None:
        start()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = options.gpu_layers
        params.load_mode = _load_mode(options)

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _data: object) -> bool:
            if progress is not None:
                progress(fraction)
            return True

        params.progress_callback = report
        _messages.clear()
        with huge_pages():
            self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise EngineError(f"llama.cpp cannot load {path}: {last_error()}. {INCOMPLETE}")
        self.has_decoder: bool = llama_cpp.llama_model_has_decoder(self.pointer)
        self.vocab = llama_cpp.llama_model_get_vocab(self.pointer)
        reason = self._refusal()
        if reason:
            self.close()
            raise EngineError(f"{path} {reason}")
        self.architecture = self._fact("general.architecture")
        self.purpose = purpose_of(self._fact)
        self.trained_context: int = llama_cpp.llama_model_n_ctx_train(self.pointer)
        recurrent = llama_cpp.llama_model_is_recurrent(self.pointer)
        try:
            self.adapters = [(self._adapter(file), scale) for file, scale in options.lora]
        except EngineError:
            self.close()
            raise
        # The tokens that a layer with a sliding window sees; 0 for none.
        self.window: int = llama_cpp.llama_model_n_swa(self.pointer)
        # A recurrent state cannot go back to an earlier position.
        self.rolls_back: bool = not (recurrent or llama_cpp.llama_model_is_hybrid(self.pointer))

    def _refusal(self) -> str:
        """Return why the model cannot be served; empty if it can."""
        if llama_cpp.llama_model_has_encoder(self.pointer) and self.has_decoder:
            return "has an encoder and a decoder, which is not supported."
        if llama_cpp.llama_model_is_diffusion(self.pointer):
            # It has no memory, so each token would be generated from the last one alone.
            return "is a diffusion model, which is not supported."
        if llama_cpp.llama_vocab_type(self.vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            # llama.cpp aborts if it has to look up a token.
            return "has no vocabulary. Choose a file of the model that has its tokenizer."
        return ""

    @property
    def has_window(self) -> bool:
        """True if some layers have a sliding window."""
        return self.window > 0

    @property
    def attention(self) -> int:
        """The width of all heads, summed over the layers; 0 for a model without heads."""
        heads: int = llama_cpp.llama_model_n_head(self.pointer)
        if not heads:
            return 0
        layers: int = llama_cpp.llama_model_n_layer(self.pointer)
        known = self._fact(f"{self.architecture}.attention.key_length")
        if known.isdigit():
            return heads * int(known) * layers
        return int(llama_cpp.llama_model_n_embd(self.pointer) * layers)

    def _fact(self, key: str) -> str:
        """Return a value of the file's metadata as text; empty if it is missing."""
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if size >= 0 else ""

    def _adapter(self, path: Path) -> object:
        """Load a LoRA adapter; it is freed with the model."""
        if not path.is_file():
            raise EngineError(f"There is no LoRA adapter at {path}.")
        _messages.clear()
        adapter = llama_cpp.llama_adapter_lora_init(self.pointer, str(path).encode())
        if not adapter:
            raise EngineError(f"llama.cpp cannot apply {path} to this model: {last_error()}")
        return adapter

    def sizes(self) -> dict[str, int]:
        """Return the model's sizes, by llama-server's names for them."""
        return {
            "vocab_type": llama_cpp.llama_vocab_type(self.vocab),
            "n_vocab": llama_cpp.llama_vocab_n_tokens(self.vocab),
            "n_ctx_train": self.trained_context,
            "n_embd": llama_cpp.llama_model_n_embd(self.pointer),
            "n_params": llama_cpp.llama_model_n_params(self.pointer),
            "size": llama_cpp.llama_model_size(self.pointer),
        }

    def template(self, name: str | None = None) -> str | None:
        """Return the chat template, or one of another name; None if the file has none."""
        known = None if name is None else name.encode()
        template = llama_cpp.llama_model_chat_template(self.pointer, known)
        return template.decode(errors="replace") if template else None

    def describe(self) -> str:
        """Return the architecture, size and quantisation in one line."""
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    def close(self) -> None:
        """Free the weights; contexts must be closed first."""
        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None


class DecodeFailed(Exception):
    """A non-zero status from `llama_decode`, `llama_encode` or mtmd."""

    def __init__(self, status: int) -> None:
        super().__init__(f"llama_decode returned {status}: {last_error()}")


class Context:
    """A llama.cpp context, and one batch that is refilled for each decode.

    Only one thread may use it.

    Attributes:
        pads: True if batches can have a token that belongs to no sequence of the caller.
        swa_full: False if layers with a sliding window have cells for the windows only. Then each
            sequence must have cells of its own there; see `copy`.
        window: the tokens that a layer with a sliding window sees; 0 for none.
        copies: False if sequences cannot be copied. For DeepSeek V4 llama.cpp ends the process if
            a part is to be copied, and copies a whole sequence only when the next batch comes.
        threads: the number of threads that evaluate a batch.
    """

    def __init__(self, model: LoadedModel, options: Options, length: int) -> None:
        # A batch cannot have more tokens than the KV cache has cells.
        size = min(options.batch, length)
        params = context_params(options, length)
        # A sequence for `pad`, which only a memory that removes single tokens gets.
        self.pads = model.rolls_back and not model.has_window and not options.exact
        self.pads = self.pads and options.slots < MOST_SEQUENCES
        self._spare = options.slots
        sequences = params.n_seq_max = options.slots + self.pads
        self._vocabulary: int = llama_cpp.llama_vocab_n_tokens(model.vocab)
        most = max(MAX_LOGITS // (4 * self._vocabulary), sequences)
        self._max_outputs = min(most, size)
        # llama.cpp aborts if these are smaller than the number of sequences.
        params.n_outputs_max = max(self._max_outputs, sequences)
        params.n_batch = params.n_ubatch = max(size, sequences)
        # llama.cpp's size of the smaller cache, which must be worth its copies of windows.
        windows = model.window * sequences + params.n_ubatch
        self.swa_full = not model.has_window or 2 * windows > length
        params.swa_full = self.swa_full
        self.copies = model.architecture != "deepseek4"
        self.pointer = new_context(model, params)
        self.window = model.window
        if model.rolls_back and self._size(0, 0) == self._size(0, _PARTIAL):
            # An EXAONE 4 without such layers can have the size of a window in its file.
            self.window, self.swa_full = 0, True
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._batch = Batch(size)
        self._states = StateMemory()
        self.outputs = 0
        self._is_padded = False
        self.threads = options.threads
        # The logits of the last decode; None until somebody reads them.
        self._logits: NDArray[np.float32] | None = None
        self._decoded = 0
        # The same of an earlier decode, with the address and the number of its rows.
        self._known: tuple[tuple[int, int], NDArray[np.float32]] | None = None

    @property
    def room(self) -> int:
        """The number of tokens that still fit into the batch."""
        return self._batch.room

    @property
    def size(self) -> int:
        """The number of tokens in the batch."""
        return self._batch.used

    @property
    def is_empty(self) -> bool:
        """True if the batch has no tokens."""
        return self._batch.used == 0

    @property
    def output_room(self) -> int:
        """The number of tokens with logits that still fit into the batch."""
        room: int = self._max_outputs - self.outputs
        return room

    def add(self, sequence: int, position: int, tokens: Sequence[int], outputs: int) -> int:
        """Add consecutive tokens of a sequence to the batch; the last `outputs` get logits.

        Returns:
            The first row of these logits, for `logits`.
        """
        self._batch.add(sequence, position, tokens, outputs)
        row = self.outputs
        self.outputs += outputs
        return row

    def pad(self) -> None:
        """Add a token whose result nobody reads; it needs a free cell until `decode` returns."""
        if not self.pads or self._is_padded:
            raise ValueError("this batch cannot be padded")
        self.add(self._spare, 0, [0], 1)
        self._is_padded = True

    def use_threads(self, count: int) -> None:
        """Let a number of threads evaluate the next batches."""
        llama_cpp.llama_set_n_threads(self.pointer, count, count)
        self.threads = count

    def decode(self) -> int:
        """Evaluate the batch, empty it, and return the number of its tokens without padding.

        Raises:
            DecodeFailed: llama.cpp failed; the sequences of the batch must be removed.
        """
        batch, size = self._batch.native, self._batch.used
        self._decoded, self._logits = self.outputs, None
        is_padded = self._is_padded
        self.clear()
        status = llama_cpp.llama_decode(self.pointer, batch)
        if is_padded:
            self.remove(self._spare)
        if status:
            raise DecodeFailed(status)
        return size - is_padded

    def clear(self) -> None:
        """Empty the batch."""
        self._batch.clear()
        self.outputs = 0
        self._is_padded = False

    def logits(self, start: int, count: int) -> NDArray[np.float32]:
        """Return logits of the last decode, shape (count, vocabulary); valid until the next one."""
        if not 0 <= start < start + count <= self._decoded:
            raise ValueError(f"rows {start} to {start + count} of {self._decoded} with logits")
        if self._logits is None:
            self._logits = self._found()
        return self._logits[start : start + count]

    def _found(self) -> NDArray[np.float32]:
        """Return llama.cpp's array; a new view of it takes as long as to find the largest logit."""
        pointer, rows = llama_cpp.llama_get_logits(self.pointer), self._decoded
        place = ctypes.addressof(pointer.contents), rows
        if self._known is None or self._known[0] != place:
            shape = (rows, self._vocabulary)
            self._known = place, np.ctypeslib.as_array(pointer, shape=shape)
        return self._known[1]

    def remove(self, sequence: int, start: int = 0) -> None:
        """Remove a sequence's tokens from a position on.

        Every kind of memory can remove a whole sequence. It can remove a part only if the model
        rolls back (`LoadedModel.rolls_back`).
        """
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start or -1, -1):
            raise ValueError(f"sequence {sequence} cannot be cut at {start}")

    def first(self, sequence: int) -> int:
        """Return the first position of a sequence that layers with a window still have."""
        found: int = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        return found

    def copy(self, source: int, target: int, end: int) -> None:
        """Copy another sequence up to a position into an empty one; both share all cells.

        A shared cell is not free when the token has left both windows. So without `swa_full` a
        `restore` of the target's windows must follow.
        """
        llama_cpp.llama_memory_seq_cp(self._memory, source, target, 0, end)

    def save(self, sequence: int, part: int = 0) -> NDArray[Any]:
        """Return a sequence's state as bytes; an empty array means failure.

        Args:
            part: save only the recurrent state or the windows, if they have at most so many bytes;
                0 for the whole state.
        """
        flags = _PARTIAL if part else 0
        size = self._size(sequence, flags)
        if part and size > part:
            return np.empty(0, np.uint8)
        begun = time.perf_counter()
        data = self._states.new(size)
        pointer = as_pointer(data, ctypes.c_uint8)
        written = llama_cpp.llama_state_seq_get_data_ext(
            self.pointer, pointer, size, sequence, flags
        )
        self._states.add(size, time.perf_counter() - begun)
        return data if written == size else data[:0]

    def restore(self, sequence: int, data: NDArray[Any], is_part: bool = False) -> bool:
        """Restore a saved state, bit by bit, into an empty sequence; return True on success.

        Args:
            is_part: True for a recurrent state or windows, which replace those of the sequence.
        """
        flags = _PARTIAL if is_part else 0
        pointer = as_pointer(data, ctypes.c_uint8)
        read = llama_cpp.llama_state_seq_set_data_ext(
            self.pointer, pointer, data.size, sequence, flags
        )
        # Nothing at all is what `save` returns if it fails.
        return bool(read == data.size > 0)

    def _size(self, sequence: int, flags: int) -> int:
        found: int = llama_cpp.llama_state_seq_get_size_ext(self.pointer, sequence, flags)
        return found

    def close(self) -> None:
        """Free the context."""
        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None


def _load_mode(options: Options) -> int:
    if options.mlock:
        mapped = options.mmap is not False
        return llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if mapped else llama_cpp.LLAMA_LOAD_MODE_MLOCK
    if options.mmap is None:
        return llama_cpp.LLAMA_LOAD_MODE_AUTO
    return llama_cpp.LLAMA_LOAD_MODE_MMAP if options.mmap else llama_cpp.LLAMA_LOAD_MODE_NONE


def new_context(model: LoadedModel, params: Any) -> Any:
    """Return a new context with the model's LoRA adapters.

    Raises:
        EngineError: llama.cpp cannot create it.
    """
    _messages.clear()
    pointer = llama_cpp.llama_init_from_model(model.pointer, params)
    if not pointer:
        raise EngineError(f"llama.cpp cannot create a context: {last_error()}")
    if model.adapters:
        adapters, scales = zip(*model.adapters, strict=True)
        llama_cpp.llama_set_adapters_lora(
            pointer,
            (llama_cpp.llama_adapter_lora_p_ctypes * len(adapters))(*adapters),
            len(adapters),
            (ctypes.c_float * len(scales))(*scales),
        )
    return pointer


def context_params(options: Options, length: int) -> Any:
    """Return the parameters that all contexts of an engine share."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = length
    params.n_seq_max = options.slots
    params.n_threads = params.n_threads_batch = options.threads
    params.kv_unified = True
    params.no_perf = True
    params.flash_attn_type = flash_attention(options)
    cache = CACHE_TYPES[options.cache_type or ("f32" if options.exact else "f16")]
    params.type_k = params.type_v = cache
    return params


def flash_attention(options: Options) -> int:
    """Return llama.cpp's number for the use of flash attention, in the model and its projector."""
    return {
        None: llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
        False: llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
        True: llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    }[False if options.exact else options.flash_attention]


def has_gpu() -> bool:
    """Return True if this build of llama.cpp can compute layers on a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())


def last_error() -> str:
    """Return the last error that llama.cpp logged."""
    return _messages[-1] if _messages else "no reason given"
