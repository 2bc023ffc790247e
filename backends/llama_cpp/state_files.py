"""Saved sequences on disk: a folder with a file for each state that has left memory.

A file has these parts, in little-endian byte order:

    magic and version, digest of the model and the owner, digest of the tokens, four counts;
    the token ids; start, end and positions of each media span; length and bytes of each checkpoint;
    CRC-32 of all this; the bytes from `llama_state_seq_get_data_ext`, for the sequence and for each
    checkpoint; CRC-32 of these

Its name is the two digests, which are keyed with a random salt in the folder. So names do not show
which owner a file belongs to. The time of its last modification is that of its last use. Several
processes can use a folder: a file gets its name when it is complete, and all of them expect that
another one removes it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import secrets
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import EngineError
from .cache import Cache
from .options import CLOSE_SECONDS
from .states import BLOCK, Checkpoint, MediaSpan, State, covers, reusable

log = logging.getLogger("latimer")

MAGIC = b"LATIMER2"
# The numbers at the end are those of tokens, media spans, checkpoints, and bytes of the sequence.
_HEADER = struct.Struct("<8s32sQQQQ")
_CRC = struct.Struct("<I")
_NUMBER = np.dtype("<i8")
# Bytes of the salt.
SALT = 32
_PREFIX, _PART = "latimer-", ".part"
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}\.state|latimer-\w+\.part")
# A bound on the number of files, because a prompt is compared with all of its owner's.
MOST_FILES = 4096
# Seconds after which an unfinished file counts as left by a process that has ended.
STALE = 600
# The least share of a state that a prompt must gain from it. Reading takes time for all of it.
WORTH = 1 / 8
# Bytes that are read or written at once, and the pauses between; see `_in_pieces`. A request waits
# for reading, and nothing waits for writing.
PIECE = 1 << 20
REST_READING, REST_WRITING = 1, 3


Part = TypeVar("Part")


class Damaged(Exception):
    """A file that is not a complete state under its own name."""


class Header(NamedTuple):
    """The first part of a file.

    Args:
        points: the length and the number of bytes of each checkpoint.
        whole: the number of bytes for the sequence, which come first.
    """

    tokens: list[int]
    spans: tuple[MediaSpan, ...]
    points: dict[int, int]
    whole: int

    @property
    def size(self) -> int:
        """The number of bytes that follow it."""
        return self.whole + sum(self.points.values())


class StateFiles:
    """The states of a model that have left memory, within a bound for the folder.

    Args:
        folder: is created if it does not exist.
        size: the bytes that all files in the folder may take; the least recently used are removed.
        waiting: the bytes of states that may wait in memory until they are written.
        model: everything that decides what the bytes of a state mean. States of others stay.
        cuts: True if a prompt may reuse a part of a state; see `States`.
        block: the fewest tokens that a prompt reuses.

    Raises:
        EngineError: the folder cannot be used.
    """

    def __init__(
        self, folder: Path, size: int, waiting: int, model: str, cuts: bool, block: int = BLOCK
    ) -> None:
        self._folder = folder
        self._size = size
        self._most_waiting = waiting
        self._model = model
        self._cuts = cuts
        self._block = block
        self._headers: dict[str, Header] = {}
        self._queue: queue.SimpleQueue[State | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._reading = threading.Lock()
        self._has_failed = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._salt = _salt(folder)
            # The file system can be read-only.
            tempfile.TemporaryFile(dir=folder).close()
            self._make_room(0)
        except OSError as error:
            raise EngineError(
                f"The folder {folder} cannot be used for saved prompts: "
                f"{error.strerror or error}. Set --cache-dir to a folder that Latimer can write."
            ) from None
        self._writer = threading.Thread(target=self._run, name="latimer-states", daemon=True)
        self._writer.start()

    def put(self, state: State) -> None:
        """Queue a state to be written; it is lost if too many bytes wait already."""
        with self._lock:
            if self._waiting and self._waiting + state.size > self._most_waiting:
                return
            self._waiting += state.size
        self._queue.put(state)

    def recall(self, cache: Cache, owner: str, prompt: Sequence[int]) -> None:
        """Move the state of which a prompt can reuse the most tokens to memory, if that helps.

        Any thread but the engine's may call this. It takes as long as the disk.
        """
        tokens = list(prompt)
        name, length, header = self._longest(cache, owner, tokens)
        if header is None:
            return
        least = max(self._block, int(len(header.tokens) * WORTH))
        if length - cache.known(owner, tokens) < least:
            return
        # One file is read at a time, and requests with the same prompt wait for the first of them.
        with self._reading:
            if length - cache.known(owner, tokens) < least:
                return
            rest = REST_READING if cache.is_busy else 0
            found = self._read(name, partial(_read_data, rest=rest))
            if found is not None:
                whole, *others = found
                kept = tuple(map(Checkpoint, header.points, others))
                cache.states.add(State(owner, header.tokens, whole, header.spans, kept))

    def close(self, cache: Cache) -> None:
        """Write what is in memory, the most recently used first, in at most `CLOSE_SECONDS`.

        The engine's thread calls this before it frees its context.
        """
        now, room = time.time(), self._size
        end = time.monotonic() + CLOSE_SECONDS
        states = cache.empty()
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)
        for age, state in enumerate(reversed(states)):
            room -= state.size
            if room < 0 or time.monotonic() > end:
                return
            # The next process removes the least recently used first.
            self._write(state, now - age)

    def _run(self) -> None:
        while (state := self._queue.get()) is not None:
            self._write(state, time.time())
            with self._lock:
                self._waiting -= state.size

    def _write(self, state: State, used: float) -> None:
        """Write a state in place of those it covers, unless another one covers it."""
        try:
            prefix = self._prefix(state.owner)
            known = list(self._headers_of(prefix))
            cuts, block, tokens, points = self._cuts, self._block, state.tokens, state.points
            for name, header in known:
                if covers(header.tokens, tokens, cuts, block, header.points, points):
                    with suppress(FileNotFoundError):
                        os.utime(self._folder / name, (used, used))
                        return
            for name, header in known:
                if covers(tokens, header.tokens, cuts, block, points, header.points):
                    self._remove(name)
            self._write_file(prefix, state, used)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                reason = error.strerror or error
                line = "Saved prompts stay in memory only: %s cannot be written: %s."
                log.warning(line, self._folder, reason)

    def _write_file(self, prefix: str, state: State, used: float) -> None:
        kept = state.checkpoints
        points = [(one.length, one.data.nbytes) for one in kept]
        numbers = (state.tokens, state.spans, points)
        body = b"".join(np.array(part, _NUMBER).tobytes() for part in numbers)
        digest = self._digest(body)
        counts = (*map(len, numbers), state.data.nbytes)
        head = _HEADER.pack(MAGIC, bytes.fromhex(prefix + digest), *counts) + body
        if not self._make_room(len(head) + state.size + 2 * _CRC.size):
            return
        with _replacing(self._folder / f"{prefix}-{digest}.state", used) as file:
            file.write(head + _CRC.pack(zlib.crc32(head)))
            rest = REST_WRITING if threading.current_thread() is self._writer else 0
            crc = 0
            for data in (state.data, *(one.data for one in kept)):
                crc = _in_pieces(data.data, file.write, rest, crc)
            file.write(_CRC.pack(crc))

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used files until another one fits; return True if it does."""
        if size > self._size:
            return False
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        stat = entry.stat(follow_symlinks=False)
                        files.append((stat.st_mtime, stat.st_size, entry.name))
        excess = sum(bytes_ for _, bytes_, _ in files) + size - self._size
        count = len(files) + bool(size)
        for modified, bytes_, name in sorted(files):
            is_part = name.endswith(_PART)
            if modified < time.time() - STALE if is_part else excess > 0 or count > MOST_FILES:
                self._remove(name)
                excess -= bytes_
                count -= 1
        names = {name for _, _, name in files}
        for name in list(self._headers):
            if name not in names:
                self._headers.pop(name, None)
        return excess <= 0

    def _longest(
        self, cache: Cache, owner: str, tokens: list[int]
    ) -> tuple[str, int, Header | None]:
        """Return the file of which a prompt can reuse the most tokens, their number, its header."""
        best: tuple[str, int, Header | None] = ("", 0, None)
        with suppress(OSError):
            for name, header in self._headers_of(self._prefix(owner)):
                if len(header.tokens) <= cache.size and header.size <= cache.states.size:
                    known, spans, points = header.tokens, header.spans, [*header.points]
                    shared = reusable(known, tokens, self._cuts, self._block, spans, points)
                    if shared > best[1]:
                        best = (name, shared, header)
        return best

    def _headers_of(self, prefix: str) -> Iterator[tuple[str, Header]]:
        """Yield an owner's files, also those that other processes have written."""
        for name in os.listdir(self._folder):
            if name.startswith(prefix) and _NAME.fullmatch(name):
                header = self._headers.get(name)
                if header is None:
                    header = self._read(name, _read_header)
                if header is not None:
                    self._headers[name] = header
                    yield name, header

    def _read(self, name: str, read: Callable[[BinaryIO, str], Part]) -> Part | None:
        """Return what a function reads from a file; None if it fails. Remove a damaged file."""
        try:
            with open(self._folder / name, "rb") as file:
                return read(file, name)
        except Damaged:
            with suppress(OSError):
                self._remove(name)
        except (OSError, MemoryError):
            self._headers.pop(name, None)
        return None

    def _remove(self, name: str) -> None:
        self._headers.pop(name, None)
        # Another process may have removed it.
        with suppress(FileNotFoundError):
            os.unlink(self._folder / name)

    def _prefix(self, owner: str) -> str:
        return self._digest(f"{self._model}\0{owner}".encode())

    def _digest(self, data: bytes) -> str:
        return hashlib.blake2b(data, key=self._salt, digest_size=16).hexdigest()


def _read_header(file: BinaryIO, name: str) -> Header:
    """Return the header of a file.

    Raises:
        Damaged: it is not complete, or not that of a file with this name and size.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise Damaged
    magic, digests, tokens, spans, points, whole = _HEADER.unpack(head)
    length = (tokens + 3 * spans + 2 * points) * _NUMBER.itemsize
    # The comparison of sizes also bounds what is read.
    rest = size - _HEADER.size - length - 2 * _CRC.size
    if magic != MAGIC or rest < whole:
        raise Damaged
    body = file.read(length)
    if file.read(_CRC.size) != _CRC.pack(zlib.crc32(head + body)):
        raise Damaged
    if name != f"{digests.hex('-', -16)}.state":
        raise Damaged
    numbers = np.frombuffer(body, _NUMBER).tolist()
    end = tokens + 3 * spans
    found = tuple(MediaSpan(*numbers[at : at + 3]) for at in range(tokens, end, 3))
    header = Header(
        numbers[:tokens],
        found,
        dict(zip(numbers[end::2], numbers[end + 1 :: 2], strict=True)),
        whole,
    )
    if header.size != rest:
        raise Damaged
    return header


def _read_data(file: BinaryIO, name: str, rest: float) -> list[NDArray[np.uint8]]:
    """Return the bytes of a sequence and of each checkpoint, and mark the file as used.

    Each has an array of its own, so that a checkpoint can outlive the others. The file is not
    mapped into memory: if another process cut it, that would end this process.

    Raises:
        Damaged: the file is not complete.
    """
    os.utime(file.fileno())
    header = _read_header(file, name)
    found = [np.empty(size, np.uint8) for size in (header.whole, *header.points.values())]
    crc = 0
    for data in found:
        crc = _in_pieces(data.data, file.readinto, rest, crc)  # type: ignore[attr-defined]
    if file.read(_CRC.size) != _CRC.pack(crc):
        raise Damaged
    return found


def _in_pieces(
    data: memoryview, transfer: Callable[[memoryview], object], rest: float, crc: int = 0
) -> int:
    """Read or write data, and return its CRC-32.

    Args:
        crc: that of the data before it.
        rest: the pause after each piece, as a multiple of its CPU time. While the engine decodes,
            a thread that keeps a core makes all of llama.cpp's threads wait for one of them.
    """
    for start in range(0, len(data), PIECE):
        begun = time.thread_time()
        piece = data[start : start + PIECE]
        transfer(piece)
        crc = zlib.crc32(piece, crc)
        if rest:
            time.sleep((time.thread_time() - begun) * rest)
    return crc


def _salt(folder: Path) -> bytes:
    """Return the random salt of a folder, which is made if it is missing or damaged.

    If two processes make it at the same time, the states of one are not found after its restart.
    """
    path = folder / "salt"
    if not path.exists() or path.stat().st_size != SALT:
        with _replacing(path) as file:
            file.write(secrets.token_bytes(SALT))
    return path.read_bytes()


@contextmanager
def _replacing(path: Path, used: float | None = None) -> Iterator[BinaryIO]:
    """Yield a new file with mode 0600 that gets its name and its time of use when it is complete.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    descriptor, part = tempfile.mkstemp(_PART, _PREFIX, path.parent)
    try:
        with open(descriptor, "wb") as file:
            yield file
        if used is not None:
            os.utime(part, (used, used))
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise
