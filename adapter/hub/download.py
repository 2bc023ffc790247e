"""Downloads from a hub into its cache, over the hub's HTTP interface.

huggingface_hub deletes an unfinished file, and does not check SHA-256, so this is Latimer's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import quote, urljoin, urlsplit

import httpx2

from ...backends.http import shown_address
from .cache import UNFINISHED, Repo, home, is_commit, writing
from .memory import metadata_of
from .names import HubError, HubFile, HubName, in_units, is_safe

HUB = "https://huggingface.co"
_TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
_CHUNK = 1 << 20
# Attempts to continue a download that made no progress.
_ATTEMPTS = 3
# Seconds between looks at a download that another process makes.
_LOOK = 0.5
# The bytes at the beginning of a file that are read for its metadata, and the most.
_HEAD, _MOST_HEAD = 1 << 18, 1 << 23
# The most pages of a list of files.
_PAGES = 100
_FALSE = ("", "0", "false", "no", "off")
# The beginning of the text of a system's error.
_NUMBER = re.compile(r"^\[Errno -?\d+\] ")
# A redirect without end, and a body that cannot be decoded, are no errors of the transport.
_TRANSIENT = (httpx2.RequestError,)


class Report(Protocol):
    """Receiver of what is said and shown while a model is found and downloaded."""

    def say(self, line: str) -> None:
        """Show a line."""

    def show(self, label: str, done: int, total: int) -> None:
        """Show how many bytes of a file are there."""


class Unreachable(HubError):
    """The hub did not answer."""


def is_offline() -> bool:
    """Return True if the variables of the hub's own programs forbid the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() not in _FALSE for name in names)


def endpoint() -> str:
    """Return the address of the hub, in llama-server's order of variables."""
    found = os.environ.get("MODEL_ENDPOINT") or os.environ.get("HF_ENDPOINT") or HUB
    return found.rstrip("/")


def token() -> str | None:
    """Return the token of the user, from `HF_TOKEN` or the file of `hf auth login`."""
    if os.environ.get("HF_TOKEN"):
        return os.environ["HF_TOKEN"].strip()
    place = os.environ.get("HF_TOKEN_PATH")
    try:
        return (Path(place) if place else home() / "token").read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


class Hub:
    """A client of a hub; a context manager.

    Raises:
        HubError: the token or the address cannot be used.
        Unreachable: a proxy or certificates of the environment cannot be used.
    """

    def __init__(self) -> None:
        self.address, self.token = endpoint(), token()
        # The address in messages.
        self.place = shown_address(self.address)
        headers = {"user-agent": "latimer", "accept-encoding": "identity"}
        if self.token is not None:
            if not (self.token.isascii() and self.token.isprintable()):
                raise HubError("HF_TOKEN contains characters that no token has. Copy it again.")
            headers["authorization"] = f"Bearer {self.token}"
        if not _is_address(self.address):
            raise HubError(
                f"HF_ENDPOINT must be an address such as {HUB}, not '{self.place[:200]}'."
            )
        try:
            self._client = httpx2.Client(headers=headers, timeout=_TIMEOUT, follow_redirects=True)
        except ImportError:
            raise Unreachable(
                "A SOCKS proxy, as in ALL_PROXY, needs another package: run pip install socksio, "
                "or unset the variable."
            ) from None
        except (httpx2.InvalidURL, OSError, ValueError) as error:
            raise Unreachable(
                "The proxy or the certificates that environment variables name cannot be used: "
                f"{_reason(error)} Correct or unset ALL_PROXY, HTTPS_PROXY and SSL_CERT_FILE."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._client.close()

    def commit_of(self, name: HubName) -> str:
        """Return the commit of a name's revision.

        Raises:
            HubError: there is no such repository or revision, or no permission.
            Unreachable: the hub does not answer.
        """
        revision = quote(name.revision, safe="")
        data = self._json(name, f"/api/models/{name.repo}/revision/{revision}")
        commit = data.get("sha") if isinstance(data, Mapping) else None
        if not isinstance(commit, str) or not is_commit(commit):
            raise _not_a_hub(self.place)
        return commit

    def files_of(self, name: HubName, commit: str) -> list[HubFile]:
        """Return the files of a commit, in the hub's order.

        Raises:
            HubError, Unreachable: as `commit_of`.
        """
        url: str | None = f"/api/models/{name.repo}/tree/{commit}?recursive=true"
        found = []
        for _ in range(_PAGES):
            if url is None:
                break
            response = self._get(name, url)
            try:
                found += [_file_of(row) for row in _read(response) if row["type"] == "file"]
            except (AttributeError, KeyError, TypeError, ValueError):
                raise _not_a_hub(self.place) from None
            following = response.links.get("next", {}).get("url")
            url = None if following is None else urljoin(str(response.url), following)
        return [file for file in found if is_safe(file.path)]

    def metadata(self, name: HubName, commit: str, file: HubFile) -> dict[str, Any] | None:
        """Return a file's metadata from its beginning, as `memory.metadata_of`.

        Raises:
            HubError, Unreachable: as `commit_of`.
        """
        size = _HEAD
        while size <= _MOST_HEAD:
            headers = {"range": f"bytes=0-{size - 1}"}
            data = b""
            try:
                with self._stream(name, commit, file, headers) as response:
                    for chunk in response.iter_bytes(_HEAD):
                        data += chunk
                        if len(data) >= size:
                            break
            except httpx2.RequestError as error:
                raise self._unreachable(error) from None
            found = metadata_of(data)
            if found is not None or not data.startswith(b"GGUF") or size >= file.size:
                return found
            size *= 8
        return None

    def fetch(
        self, repo: Repo, name: HubName, commit: str, file: HubFile, report: Report, label: str
    ) -> Path:
        """Download a file, unless its content is there, and return its path in the cache.

        A download that was cut is continued, also by another process. One that another process
        makes is waited for.

        Raises:
            HubError: the content is not that of the checksum, the disk is full, or no permission.
            Unreachable: the hub does not answer.
        """
        blob = repo.blob(file)
        draft = blob.with_name(blob.name + UNFINISHED)
        has_waited = False
        with writing(repo.root):
            blob.parent.mkdir(parents=True, exist_ok=True)
            while not (blob.is_file() and blob.stat().st_size == file.size):
                with draft.open("a+b", buffering=0) as output:
                    is_alone = _is_alone(output)
                    if is_alone:
                        self._complete(name, commit, file, draft, output, report, label)
                if is_alone:
                    with contextlib.suppress(FileNotFoundError):
                        # One that has waited for this process may have renamed it.
                        draft.replace(blob)
                    continue
                if not has_waited:
                    report.say(f"Another process downloads {file.name}; this one waits for it.")
                    has_waited = True
                time.sleep(_LOOK)
        return repo.link(commit, file)

    def _complete(
        self, name: HubName, commit: str, file: HubFile, draft: Path, output: Any, report: Report,
        label: str,
    ) -> None:  # fmt: skip
        """Append to a draft what is missing, and check the whole."""
        digest, done = _digest(file), 0
        if os.fstat(output.fileno()).st_size > file.size:
            output.truncate(0)
        output.seek(0)
        while chunk := output.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
        if done:
            report.say(f"Continues {file.name} at {in_units(done)} of {in_units(file.size)}.")
        report.show(label, done, file.size)
        failures = 0
        while done < file.size:
            before = done
            try:
                headers = {"range": f"bytes={done}-"} if done else {}
                with self._stream(name, commit, file, headers) as response:
                    if done and response.status_code != httpx2.codes.PARTIAL_CONTENT:
                        output.truncate(0)
                        digest, done = _digest(file), 0
                    for chunk in response.iter_bytes():
                        output.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        report.show(label, done, file.size)
                        if done > file.size:
                            break
            except (Unreachable, *_TRANSIENT) as error:
                reason = error.message if isinstance(error, HubError) else _reason(error)
                failures = 0 if done > before else failures + 1
                if failures >= _ATTEMPTS:
                    raise Unreachable(
                        f"The download of {file.name} stopped at {in_units(done)} of "
                        f"{in_units(file.size)}: {reason} The next start continues it."
                    ) from None
            else:
                failures = 0 if done > before else failures + 1
                if failures >= _ATTEMPTS:
                    break
        if done != file.size or digest.hexdigest() != file.oid:
            output.truncate(0)
            draft.unlink(missing_ok=True)
            raise HubError(
                f"{file.name} from {self.place} does not have its checksum: it was changed on "
                "the way, or the hub is damaged. It was deleted; try again."
            )

    @contextlib.contextmanager
    def _stream(
        self, name: HubName, commit: str, file: HubFile, headers: Mapping[str, str]
    ) -> Iterator[httpx2.Response]:
        url = f"{self.address}/{name.repo}/resolve/{commit}/{quote(file.path)}"
        try:
            with self._client.stream("GET", url, headers=dict(headers)) as response:
                if response.is_error:
                    response.read()
                self._check(name, response)
                yield response
        except httpx2.ConnectError as error:
            raise self._unreachable(error) from None

    def _get(self, name: HubName, url: str) -> httpx2.Response:
        try:
            response = self._client.get(urljoin(self.address + "/", url))
        except httpx2.RequestError as error:
            raise self._unreachable(error) from None
        self._check(name, response)
        return response

    def _json(self, name: HubName, path: str) -> Any:
        return _read(self._get(name, self.address + path))

    def _unreachable(self, error: Exception) -> Unreachable:
        return Unreachable(
            f"The hub at {self.place} does not answer: {_reason(error)} Check the network and "
            "HF_ENDPOINT."
        )

    def _check(self, name: HubName, response: httpx2.Response) -> None:
        """Raise the error that an answer means."""
        status, code = response.status_code, response.headers.get("x-error-code", "")
        if not response.is_error:
            return
        if code == "GatedRepo":
            does = "Accept its terms on the hub's page of the model"
            token = "and set HF_TOKEN" if self.token is None else "with the account of your token"
            raise HubError(f"hf:{name.repo} is gated. {does}, {token}.")
        if code == "RevisionNotFound":
            raise HubError(
                f"hf:{name.repo} has no revision '{name.revision}'. Write another one after @, or "
                "omit it."
            )
        if code == "EntryNotFound":
            raise HubError(f"{response.url.path} is not on the hub any more. Try again.")
        if status in (401, 403, 404) and "invalid credentials" not in response.text.lower():
            hint = (
                "set HF_TOKEN"
                if self.token is None
                else "use the token of an account that may read it"
            )
            raise HubError(
                f"There is no model {name.repo} at {self.place}, or it is private. Check the "
                f"name; for a private or gated model, {hint}."
            )
        if status == httpx2.codes.UNAUTHORIZED:
            raise HubError("The hub rejects the token of HF_TOKEN. Create a new one, or unset it.")
        error = f"The hub at {self.place} answered {status}"
        if status == httpx2.codes.TOO_MANY_REQUESTS:
            raise Unreachable(f"{error}: too many requests. Try again later, or set HF_TOKEN.")
        raise Unreachable(f"{error}. Try again later.")


def missing_of(repo: Repo, commit: str, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files that are not whole in the cache."""
    return [file for file in files if repo.path(commit, file) is None]


def left_of(repo: Repo, file: HubFile) -> int:
    """Return the bytes of a file that are still to be downloaded."""
    blob = repo.blob(file)
    for path in (blob, blob.with_name(blob.name + UNFINISHED)):
        with contextlib.suppress(OSError):
            return max(file.size - path.stat().st_size, 0)
    return file.size


def free_disk(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _is_alone(output: Any) -> bool:
    """Return False if another process appends to the same file; else this one holds its lock."""
    try:
        import fcntl
    except ImportError:
        # Windows.
        return True
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks.
        return True
    return True


def _digest(file: HubFile) -> Any:
    if file.is_large:
        return hashlib.sha256()
    # Git's object id: the hub has no SHA-256 of small files.
    return hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)


def _file_of(row: Mapping[str, Any]) -> HubFile:
    lfs = row.get("lfs") or {}
    blob_id = str(row.get("oid", ""))
    oid = str(lfs.get("oid") or blob_id)
    if not oid.isalnum():
        raise HubError("The hub's list of files has an object id that is no number.")
    size = int(lfs.get("size") or row.get("size") or 0)
    return HubFile(str(row["path"]), size, oid, bool(lfs), row.get("xetHash"), blob_id)


def _read(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise _not_a_hub(response.url.host) from None


def _not_a_hub(place: str) -> HubError:
    return HubError(f"{place} does not answer like a hub. Check HF_ENDPOINT.")


def _is_address(text: str) -> bool:
    try:
        url = httpx2.URL(text)
        # The client splits it once more, with other rules.
        return url.scheme in ("http", "https") and bool(url.host and urlsplit(text).netloc)
    except (httpx2.InvalidURL, ValueError):
        return False


def _reason(error: Exception) -> str:
    """Return the reason of a failed connection, without the number of the system's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, socket.gaierror):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return "its name cannot be resolved, so there is no network, or the name is wrong."
    return f"{_NUMBER.sub('', str(error)).rstrip('.') or type(error).__name__}."
