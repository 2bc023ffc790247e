"""Media in a folder: one file for each, named by its hash, that only the owner may read."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from .blob import HASH, Blob
from .errors import StoreUnavailable

FOLDER_MODE, FILE_MODE = 0o700, 0o600
# The beginning of the names of files that are being written, and the seconds after which such a
# file is of a process that was killed.
UNFINISHED, ABANDONED = ".unfinished-", 3600.0


class Folder:
    """Blobs in the files `ab/cd/abcd…` of a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def put(self, digest: str, data: bytes) -> None:
        path = self._path(digest)
        with _errors():
            if _is_whole(path, len(data)):
                # Only its age changes, so that no removal of unused files takes it.
                with contextlib.suppress(FileNotFoundError):
                    os.utime(path)
                    return
            self._write(path, data)

    def get(self, digest: str) -> bytes | None:
        with _errors():
            try:
                return self._path(digest).read_bytes()
            except FileNotFoundError:
                return None

    def delete(self, hashes: Iterable[str]) -> None:
        with _errors():
            for path in map(self._path, hashes):
                # Its folders stay, because another thread may be writing into them.
                path.unlink(missing_ok=True)

    def hashes(self) -> Iterator[Blob]:
        """Yield every stored blob, and delete what killed processes have not finished."""
        now = time.time()
        with _errors():
            for folder, _, names in os.walk(self.path, onerror=_unless_deleted):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        age = now - status.st_mtime
                        if HASH.fullmatch(name) and path == self._path(name):
                            yield Blob(name, age, status.st_size)
                        elif name.startswith(UNFINISHED) and age > ABANDONED:
                            path.unlink()

    def check(self) -> None:
        with _errors():
            known = next(one for one in (self.path, *self.path.parents) if one.exists())
        if not (known.is_dir() and os.access(known, os.R_OK | os.W_OK | os.X_OK)):
            raise StoreUnavailable("the folder of media cannot be written")

    def describe(self) -> str:
        return f"folder {self.path}"

    def _path(self, name: str) -> Path:
        if not HASH.fullmatch(name):
            raise ValueError("a hash has 64 hexadecimal digits")
        return self.path / name[:2] / name[2:4] / name

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file that has its name only when it is whole and on the disk."""
        for folder in (self.path, path.parent.parent, path.parent):
            self._make(folder)
        draft = self.path / f"{UNFINISHED}{secrets.token_hex(8)}"
        try:
            number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            with open(number, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(number)
            draft.replace(path)
            _sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(FOLDER_MODE, parents=folder == self.path, exist_ok=True)
            _sync(folder.parent)


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can."""
    with contextlib.suppress(PermissionError, FileNotFoundError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _unless_deleted(error: OSError) -> None:
    """Raise the error of a folder that exists."""
    if not isinstance(error, FileNotFoundError):
        raise error


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of the file system into one that shows no path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreUnavailable(f"the folder of media failed with '{reason}'") from None
