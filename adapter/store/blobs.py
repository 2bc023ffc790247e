"""The media of objects: a row for each, and its bytes in the database, in a folder, or on S3."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, exists, func, select
from sqlalchemy.dialects import postgresql, sqlite

from . import media as places
from .errors import StoreError, StoreUnavailable
from .media import Medium, Restored
from .schema import media, uses

# The name of a blob: a SHA-256 in hexadecimal digits. Other names belong to somebody else.
HASH = re.compile(r"[0-9a-f]{64}")


class Blob(NamedTuple):
    """A stored blob: its hash, the seconds since it was last put, and its bytes."""

    hash: str
    age: float
    size: int


FOLDER_MODE, FILE_MODE = 0o700, 0o600
# The beginning of the names of files that are being written, and the seconds after which such a
# file is of a process that was killed.
UNFINISHED, ABANDONED = ".unfinished-", 3600.0


class Folder:
    """Blobs in the files `ab/cd/abcd…` of a folder.

    Calls block, so they belong in a thread; any thread may call. Every method raises
    `StoreUnavailable` if the storage fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def check(self) -> None:
        """Check that the folder can be written, or made.

        Raises:
            StoreError: it cannot.
        """
        check_folder(next(filter(os.path.lexists, (self.path, *self.path.parents))), "store_media")

    def put(self, digest: str, data: bytes) -> None:
        """Store a blob durably, or make it new again if it is stored."""
        path = self._path(digest)
        with _folder_errors():
            with suppress(FileNotFoundError):
                if path.stat().st_size == len(data):
                    # Only its age changes, so that no removal of unused files takes it.
                    os.utime(path)
                    return
            self._write(path, data)

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is not stored."""
        with _folder_errors():
            try:
                return self._path(digest).read_bytes()
            except FileNotFoundError:
                return None

    def delete(self, hashes: Iterable[str]) -> None:
        """Delete blobs; those that are not stored are ignored."""
        with _folder_errors():
            for path in map(self._path, hashes):
                # Its folders stay, because another thread may be writing into them.
                path.unlink(missing_ok=True)

    def hashes(self) -> Iterator[Blob]:
        """Yield every stored blob, and delete what killed processes have not finished."""
        now = time.time()
        with _folder_errors():
            for folder, _, names in os.walk(self.path, onerror=_unless_deleted):
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        age = now - status.st_mtime
                        if HASH.fullmatch(name) and path == self._path(name):
                            yield Blob(name, age, status.st_size)
                        elif name.startswith(UNFINISHED) and age > ABANDONED:
                            path.unlink()

    def _path(self, name: str) -> Path:
        if not HASH.fullmatch(name):
            raise ValueError("a hash has 64 hexadecimal digits")
        return self.path / name[:2] / name[2:4] / name

    def _write(self, path: Path, data: bytes) -> None:
        """Write a file that has its name only when it is whole and on the disk."""
        for folder in (self.path, path.parent.parent, path.parent):
            if not folder.is_dir():
                folder.mkdir(FOLDER_MODE, parents=folder == self.path, exist_ok=True)
                _sync(folder.parent)
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


def check_folder(folder: Path, name: str, writes: bool = True) -> None:
    """Check that a folder can be used.

    Args:
        name: of what it is the folder, for the message.
        writes: also check that files can be made in it.

    Raises:
        StoreError: it does not exist, or this process has no permission.
    """
    try:
        os.stat(os.path.join(folder, "."))
    except OSError as error:
        is_closed = isinstance(error, PermissionError)
        reason = "cannot be entered" if is_closed else "does not exist"
    else:
        if not writes or os.access(folder, os.W_OK):
            return
        reason = "cannot be written"
    raise StoreError(f"The folder of {name} {reason}: {folder}.")


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk, where the system can."""
    with suppress(PermissionError, FileNotFoundError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _unless_deleted(error: OSError) -> None:
    """Raise the error of a folder that exists."""
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _folder_errors() -> Iterator[None]:
    """Turn errors of the file system into one that shows no path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise StoreUnavailable(f"the folder of media failed with '{reason}'") from None


MISSING = (
    "store_media on S3 requires the extra 's3': run pip install '.[s3]' in a clone of Latimer."
)
# Seconds to connect and for each read, and attempts: a dead server fails a call within about 20 s.
CONNECT, READ, ATTEMPTS = 3, 10, 2
# Keys that one request deletes at most (S3's limit).
DELETED = 1000
# The variables that name a server other than AWS.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")

# The reasons for errors of botocore, by the name of the class. Their messages can have the text of
# headers.
_REASONS = {
    "ConnectTimeoutError": "S3 does not answer",
    "EndpointConnectionError": "S3 cannot be reached",
    "NoCredentialsError": "there are no credentials for S3",
    "PartialCredentialsError": "the credentials for S3 are incomplete",
    "ReadTimeoutError": "S3 does not answer",
}
_CODE = re.compile(r"\w{1,64}", re.ASCII)


class S3:
    """Blobs as objects `PREFIX/HASH` of a bucket; see `Folder`.

    boto3 finds the endpoint and the credentials. Other objects of the bucket are ignored.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        if find_spec("boto3") is None:
            raise StoreError(MISSING)
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/".lstrip("/")
        self._lock = threading.Lock()
        self._known: Any = None

    def put(self, digest: str, data: bytes) -> None:
        """Store a blob durably, or make it new again if it is stored."""
        # Also if it is stored: its age begins again, so that no removal of unused objects takes it.
        key = self._key(digest)
        with self._calls() as client:
            client.put_object(Bucket=self._bucket, Key=key, Body=data)

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is not stored."""
        key = self._key(digest)
        with self._calls() as client:
            try:
                reply = client.get_object(Bucket=self._bucket, Key=key)
            except client.exceptions.NoSuchKey:
                return None
            with reply["Body"] as body:
                data: bytes = body.read()
            return data

    def delete(self, hashes: Iterable[str]) -> None:
        """Delete blobs; those that are not stored are ignored."""
        keys = [{"Key": self._key(one)} for one in hashes]
        with self._calls() as client:
            for at in range(0, len(keys), DELETED):
                some = {"Objects": keys[at : at + DELETED], "Quiet": True}
                reply = client.delete_objects(Bucket=self._bucket, Delete=some)
                for error in reply.get("Errors", ())[:1]:
                    raise StoreUnavailable(_answered(error.get("Code", "")))

    def hashes(self) -> Iterator[Blob]:
        """Yield every stored blob, in any order."""
        with self._calls() as client:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            now = datetime.now(UTC)
            for page in pages:
                for known in page.get("Contents", ()):
                    name = known["Key"].removeprefix(self._prefix)
                    if HASH.fullmatch(name):
                        age = (now - known["LastModified"]).total_seconds()
                        yield Blob(name, age, known["Size"])

    def _key(self, name: str) -> str:
        if not HASH.fullmatch(name):
            raise ValueError("a hash has 64 hexadecimal digits")
        return self._prefix + name

    @contextmanager
    def _calls(self) -> Iterator[Any]:
        """Yield the client, and turn its errors into one without secrets."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            with self._lock:
                if self._known is None:
                    self._known = _client()
            yield self._known
        except ClientError as error:
            raise StoreUnavailable(_answered(error.response["Error"].get("Code", ""))) from None
        # A ValueError is an invalid endpoint.
        except (BotoCoreError, ValueError) as error:
            name = type(error).__name__
            raise StoreUnavailable(_REASONS.get(name, f"S3 failed with {name}")) from None


def _client() -> Any:
    """Return a client, which any thread may use."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT,
        read_timeout=READ,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        # Other servers may not know the checksums that AWS introduced in 2025.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    if any(os.environ.get(name) for name in ENDPOINTS):
        # Few servers have a host name for each bucket.
        config = config.merge(Config(s3={"addressing_style": "path"}))
    return Session().client("s3", config=config)


def _answered(code: str) -> str:
    """Return the reason for an error that the server answered with a code."""
    return f"S3 answered {code}" if _CODE.fullmatch(code) else "S3 answered with an error"


Blobs: TypeAlias = Folder | S3


def of(place: str) -> Blobs:
    """Return the storage at a place: a folder, or `s3://BUCKET/PREFIX`.

    Raises:
        StoreError: the place is not valid, or S3 requires an extra that is not installed.
    """
    scheme, separator, rest = place.partition("://")
    bucket, _, prefix = rest.partition("/")
    if separator and scheme == "s3" and bucket:
        return S3(bucket, prefix)
    if separator or not place:
        raise StoreError("Media can be stored in a folder or in s3://BUCKET/PREFIX.")
    return Folder(Path(place).expanduser())


# The largest number of values in one statement.
MANY = 500

_INSERT: Mapping[str, Callable[..., Any]] = {
    "postgresql": postgresql.insert,
    "sqlite": sqlite.insert,
}

# The reason for clients. The log has the hash.
MISSING_MEDIUM = "an image, audio or file of the request is missing or damaged"


class Files:
    """The media of a store; every function runs in the transaction of the caller.

    A row is locked while its bytes are added or deleted. So a process that deletes a medium and
    another one that stores it at the same time run one after the other. Bytes are added before
    their row is committed, and deleted after its deletion is committed: a process can be killed
    between the two.

    Args:
        blobs: takes the bytes by their hash; None to keep them in the database.

    Attributes:
        unused: the hashes of media whose bytes can be deleted after the transaction.
        has_evicted: True after objects were deleted to make room, until a checkpoint is planned.
        shares: the bytes of each owner with objects, as far as this process knows, without the
            changes of the transaction that runs.
        shares_until: the time (`time.monotonic`) until which these are used.
        changes: the bytes by which the transaction that writes has changed them.
    """

    def __init__(self, blobs: Blobs | None) -> None:
        self.blobs = blobs
        self.unused: set[str] = set()
        self.has_evicted = False
        self.shares = Counter[str]()
        self.shares_until = 0.0
        self.changes = Counter[str]()

    def grow(self, owner: str, size: int) -> None:
        """Add to the share of an owner, if the transaction is committed."""
        self.changes[owner] += size

    def add(self, connection: Connection, found: Sequence[tuple[str, Medium]]) -> int:
        """Store the media of objects; return the bytes that were not stored before."""
        data = {medium.place.hash: medium.data for _, medium in found}
        added = 0
        # Every process locks rows in the same order.
        for name in sorted(data):
            added += self._add(connection, name, data[name])
        rows = {(medium.place.hash, object_id) for object_id, medium in found}
        # A conversation can already have a medium of its new items.
        connection.execute(
            _INSERT[connection.dialect.name](uses).on_conflict_do_nothing(),
            [{"hash": name, "id": object_id} for name, object_id in sorted(rows)],
        )
        return added

    def remove(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete the media that only these objects have; return the number of bytes."""
        hashes = {*connection.scalars(select(uses.c.hash).where(uses.c.id.in_(ids)))}
        if not hashes:
            return 0
        connection.execute(uses.delete().where(uses.c.id.in_(ids)))
        return self._remove(connection, hashes)

    def drop(self, connection: Connection, object_id: str, hashes: Collection[str]) -> int:
        """Take some media from an object, and delete those that no other one has; see `remove`."""
        same = uses.c.id == object_id, uses.c.hash.in_(hashes)
        connection.execute(uses.delete().where(*same))
        return self._remove(connection, hashes)

    def own(self, connection: Connection, ids: Sequence[str]) -> dict[str, int]:
        """Return the bytes of the media that each object has alone, by its id."""
        if not ids:
            return {}
        other = uses.alias()
        shared = exists().where(other.c.hash == uses.c.hash, other.c.id != uses.c.id)
        rows = connection.execute(
            select(uses.c.id, func.sum(media.c.size))
            .join(media, media.c.hash == uses.c.hash)
            .where(uses.c.id.in_(ids), ~shared)
            .group_by(uses.c.id)
        )
        return {name: int(size) for name, size in rows}

    def known(self, connection: Connection, hashes: Sequence[str]) -> set[str]:
        """Return those of some hashes that are media of the store."""
        return {*connection.scalars(select(media.c.hash).where(media.c.hash.in_(hashes)))}

    def clean(self, connection: Connection) -> set[str]:
        """Delete the bytes of unused media, in a transaction of its own; return their hashes.

        A row that is inserted makes other processes that store the same medium wait.
        """
        names = sorted(self.unused)
        if self.blobs is None or not names:
            return set()
        free = [name for name in names if self._reserve(connection, name, 0)]
        self.blobs.delete(free)
        for start in range(0, len(free), MANY):
            some = free[start : start + MANY]
            connection.execute(media.delete().where(media.c.hash.in_(some)))
        self.unused.difference_update(names)
        return {*free}

    def whole(
        self, connection: Connection, request: dict[str, Any], extracted: str | None
    ) -> dict[str, Any]:
        """Return a request with all its media; see `restored`.

        Raises:
            StoreUnavailable: a medium is missing or damaged.
        """
        found = self.restored(connection, request, extracted)
        if found.missing:
            # An empty image would be a wrong answer.
            hashes = {place.hash for place in found.missing}
            detail = f"the medium {min(hashes)} is missing or damaged"
            if len(hashes) > 1:
                detail = f"{detail}, and {len(hashes) - 1} more of the same request"
            raise StoreUnavailable(MISSING_MEDIUM, detail)
        return found.request

    def restored(
        self, connection: Connection, request: dict[str, Any], extracted: str | None
    ) -> Restored:
        """Return a request with its media, and the places of those that are missing.

        Args:
            extracted: the JSON of the places of media that were extracted from it.
        """
        if extracted is None:
            return Restored(request, [])
        read = partial(self._read, connection)
        return places.restore(request, places.loads(extracted), read)

    def _add(self, connection: Connection, name: str, data: bytes) -> int:
        """Store a medium and lock its row; return its size if it was not stored before."""
        inside = data if self.blobs is None else None
        for _ in range(3):
            if self._reserve(connection, name, len(data), inside):
                if self.blobs is not None:
                    self.blobs.put(name, data)
                return len(data)
            lock = select(media.c.hash).where(media.c.hash == name).with_for_update()
            if connection.scalar(lock) is not None:
                return 0
            # Another process deleted it between the two statements.
        raise StoreUnavailable("other processes store and delete the same media")

    def _reserve(
        self, connection: Connection, name: str, size: int, data: bytes | None = None
    ) -> bool:
        """Insert the row of a medium; return False if there is one."""
        insert = (
            _INSERT[connection.dialect.name](media)
            .on_conflict_do_nothing()
            .execution_options(preserve_rowcount=True)
        )
        return connection.execute(insert.values(hash=name, size=size, data=data)).rowcount == 1

    def _remove(self, connection: Connection, hashes: Collection[str]) -> int:
        """Delete the rows of media that no object has; return their bytes.

        Their bytes are deleted by `clean`, after the transaction.
        """
        locked = select(media.c.hash, media.c.size).where(media.c.hash.in_(hashes))
        sizes = {
            row.hash: row.size
            for row in connection.execute(locked.order_by(media.c.hash).with_for_update())
        }
        # A new statement also sees what others committed before the rows were locked.
        kept = {*connection.scalars(select(uses.c.hash).where(uses.c.hash.in_(hashes)))}
        gone = [name for name in sizes if name not in kept]
        if gone:
            connection.execute(media.delete().where(media.c.hash.in_(gone)))
            if self.blobs is not None:
                self.unused.update(gone)
        return sum(sizes[name] for name in gone)

    def _read(self, connection: Connection, name: str) -> bytes | None:
        row = connection.execute(
            select(media.c.data, media.c.hash).where(media.c.hash == name)
        ).one_or_none()
        if row is None:
            return None
        if row.data is None and self.blobs is not None:
            return self.blobs.get(name)
        data: bytes | None = row.data
        return data
