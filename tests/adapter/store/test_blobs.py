"""Tests of the storages of media: what each of them promises, and a folder's own promises."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from latimer.adapter.store import blobs
from latimer.adapter.store.blobs import ABANDONED, Blobs, Folder
from latimer.adapter.store.errors import StoreError, StoreUnavailable
from support.s3 import BUCKET


def name_of(data: bytes) -> str:
    """Return the hash of some bytes."""
    return hashlib.sha256(data).hexdigest()


ONE, TWO = b"\x89PNG one", b"two" * 1000
NEVER = name_of(b"never stored")


@pytest.fixture(params=["folder", "s3"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Blobs]:
    """Return each storage, empty."""
    if request.param == "folder":
        yield blobs.of(str(tmp_path / "deep" / "media"))
    else:
        for name, value in request.getfixturevalue("s3_variables").items():
            monkeypatch.setenv(name, value)
        yield blobs.of(f"s3://{BUCKET}/{tmp_path.name}/")


def put(storage: Blobs, *contents: bytes) -> list[str]:
    """Store some contents and return their hashes."""
    for data in contents:
        storage.put(name_of(data), data)
    return [name_of(data) for data in contents]


def test_a_blob_is_returned_as_it_was_put(storage: Blobs) -> None:
    """A blob is read, listed with its size, put again without effect, and deleted."""
    storage.check()
    assert list(storage.hashes()) == []
    one, two, _one = put(storage, ONE, TWO, ONE)
    assert storage.get(one) == ONE
    assert storage.get(two) == TWO
    assert storage.get(NEVER) is None
    assert {known.hash: known.size for known in storage.hashes()} == {one: len(ONE), two: len(TWO)}
    assert all(-2 < known.age < 60 for known in storage.hashes())
    storage.delete([one, NEVER])
    assert storage.get(one) is None
    assert [known.hash for known in storage.hashes()] == [two]
    storage.delete([])


def test_concurrent_puts_of_one_blob(tmp_path: Path) -> None:
    """Many threads may put and read the same blob in a folder at once."""
    storage = blobs.of(str(tmp_path))
    data = os.urandom(50_000)
    digest = name_of(data)
    seen: list[object] = []

    def work() -> None:
        try:
            storage.put(digest, data)
            seen.append(storage.get(digest))
        except Exception as error:
            seen.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [data] * 8
    assert [known.hash for known in storage.hashes()] == [digest]


@pytest.mark.parametrize("name", ["../secret", "A" * 64, "a" * 63, ""])
def test_names_are_hashes(name: str, tmp_path: Path) -> None:
    """A name that is not a hash never reaches the file system."""
    with pytest.raises(ValueError, match="64"):
        Folder(tmp_path).get(name)


@pytest.mark.parametrize("place", ["", "s3://", "s3:///prefix", "ftp://user:sesame@host/x"])
def test_places_that_are_not_valid(place: str) -> None:
    """A place that is neither a folder nor a bucket is an error that shows no secrets."""
    with pytest.raises(StoreError, match="s3://BUCKET/PREFIX") as caught:
        blobs.of(place)
    assert "sesame" not in str(caught.value)


def test_places_are_described(tmp_path: Path) -> None:
    """Each storage is described by its place."""
    assert blobs.of(str(tmp_path)).describe() == f"folder {tmp_path}"
    assert blobs.of("s3://bucket").describe() == "s3://bucket"
    assert blobs.of("s3://bucket/some/place/").describe() == "s3://bucket/some/place"


def files(folder: Path) -> list[Path]:
    """Return the files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_files_are_private(tmp_path: Path) -> None:
    """Only the owner may read the folder, the folders in it, and the files."""
    root = tmp_path / "media"
    (digest,) = put(Folder(root), ONE)
    file = root / digest[:2] / digest[2:4] / digest
    assert files(root) == [file]
    assert file.stat().st_mode & 0o777 == 0o600
    assert {path.stat().st_mode & 0o777 for path in (root, *file.parents[:2])} == {0o700}


def test_a_deletion_deletes_the_file(tmp_path: Path) -> None:
    """Deleting a blob leaves no file of it."""
    storage = Folder(tmp_path)
    storage.delete(put(storage, ONE, TWO))
    assert files(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from latimer.adapter.store.blobs import Folder
Path.replace = lambda self, path: os.kill(os.getpid(), signal.SIGKILL)
Folder(Path(sys.argv[1])).put(sys.argv[2], b"two" * 1000)
"""


def test_a_killed_write_leaves_no_blob(tmp_path: Path) -> None:
    """A process that is killed before the rename leaves a draft, which is deleted an hour later."""
    storage = Folder(tmp_path)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), name_of(TWO)])
    assert killed.returncode == -signal.SIGKILL
    (draft,) = files(tmp_path)
    assert storage.get(name_of(TWO)) is None
    assert list(storage.hashes()) == []
    assert put(storage, TWO) == [known.hash for known in storage.hashes()]
    assert draft.exists()
    long_ago = time.time() - ABANDONED - 60
    os.utime(draft, (long_ago, long_ago))
    assert len(list(storage.hashes())) == 1
    assert len(files(tmp_path)) == 1


def test_other_files_are_not_listed(tmp_path: Path) -> None:
    """A file that somebody else put into the folder is neither listed nor deleted."""
    storage = Folder(tmp_path)
    (digest,) = put(storage, ONE)
    (tmp_path / NEVER).write_bytes(b"")
    (tmp_path / digest[:2] / digest[2:4] / "notes.txt").write_bytes(b"")
    assert [known.hash for known in storage.hashes()] == [digest]
    storage.delete([digest])
    assert len(files(tmp_path)) == 2


def test_a_blob_that_is_put_again_is_young(tmp_path: Path) -> None:
    """Putting a stored blob resets its age and does not write it."""
    storage = Folder(tmp_path)
    (digest,) = put(storage, ONE)
    (file,) = files(tmp_path)
    number = file.stat().st_ino
    os.utime(file, (1, 1))
    put(storage, ONE)
    (known,) = storage.hashes()
    assert (known.hash, known.size) == (digest, len(ONE))
    assert known.age < 60
    assert file.stat().st_ino == number


def test_a_truncated_file_is_written_again(tmp_path: Path) -> None:
    """A put replaces a file whose size is wrong."""
    storage = Folder(tmp_path)
    (digest,) = put(storage, ONE)
    files(tmp_path)[0].write_bytes(ONE[:4])
    put(storage, ONE)
    assert storage.get(digest) == ONE


def test_puts_while_others_delete(tmp_path: Path) -> None:
    """Puts succeed while another thread deletes the same blob."""
    storage = Folder(tmp_path)
    over = threading.Event()

    def delete() -> None:
        while not over.is_set():
            storage.delete([name_of(ONE)])

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        for _ in range(100):
            put(storage, ONE)
    finally:
        over.set()
        thread.join()


def full(*_arguments: object) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret/path")


def a_file(path: Path, _patch: pytest.MonkeyPatch) -> None:
    """Put a file at the path."""
    path.write_bytes(b"")


def a_full_disk(path: Path, patch: pytest.MonkeyPatch) -> None:
    """Make every file fail to reach the disk."""
    path.mkdir()
    patch.setattr(os, "fsync", full)


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(a_file, "File exists|Not a directory"), (a_full_disk, "No space left on device")],
)
def test_a_folder_that_fails(
    harm: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder that cannot be written is an unavailable store, and leaves no draft behind."""
    harm(tmp_path / "media", monkeypatch)
    with pytest.raises(StoreUnavailable, match=reason) as caught:
        put(Folder(tmp_path / "media"), ONE)
    assert str(tmp_path) not in caught.value.message
    assert "/secret" not in caught.value.message
    assert [path.name for path in files(tmp_path) if path.name != "media"] == []


def test_a_folder_that_is_a_file_is_found_by_a_check(tmp_path: Path) -> None:
    """A check finds a folder that cannot be written, and does not create a missing one."""
    Folder(tmp_path / "media").check()
    assert not (tmp_path / "media").exists()
    (tmp_path / "media").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        Folder(tmp_path / "media").check()
