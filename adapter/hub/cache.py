"""The hub's cache on disk, which `hf`, llama-server and Latimer share.

models--ORG--REPO/refs/REVISION            the commit of a branch or a tag
models--ORG--REPO/blobs/OID                the content of a file
models--ORG--REPO/snapshots/COMMIT/PATH    a link to it
models--ORG--REPO/trees/COMMIT.json        the list of all files, as huggingface_hub 2 writes it
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from .names import MAIN, HubError, HubFile, HubName, is_safe, label_of, models_of

# The name of a part of a download; llama-server's own, which continues it.
UNFINISHED = ".downloadInProgress"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TREE_VERSION = 1
# What the clients of the hub keep in the folder of a repository.
_FOLDERS = ("snapshots", "blobs", "refs", "trees", ".no_exist")


def folder() -> Path:
    """Return the folder of the cache, in llama-server's order of variables."""
    for variable in ("LLAMA_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    return home() / "hub"


def home() -> Path:
    """Return the folder of the hub's own programs, with the token and the cache."""
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface"


def is_commit(revision: str) -> bool:
    """Return True if a revision is a commit, which never changes."""
    return _COMMIT.fullmatch(revision) is not None


class Repo:
    """The part of the cache for one repository, `ORG/REPO`."""

    def __init__(self, name: str, cache: Path | None = None) -> None:
        self.name = name
        self.root = (cache or folder()) / ("models--" + name.replace("/", "--"))

    def commit(self, revision: str) -> str | None:
        """Return the commit that a revision had when it was last looked up; None if never."""
        if is_commit(revision):
            return revision
        try:
            found = (self.root / "refs" / revision).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        return found if is_commit(found) else None

    def snapshot(self, commit: str) -> Path:
        """Return the folder with the files of a commit."""
        return self.root / "snapshots" / commit

    def path(self, commit: str, file: HubFile) -> Path | None:
        """Return where a file is; None if it is not there, or not whole."""
        found = self.snapshot(commit) / file.path
        try:
            return found if found.stat().st_size == file.size else None
        except OSError:
            return None

    def blob(self, file: HubFile) -> Path:
        """Return the place of a file's content."""
        return self.root / "blobs" / file.oid

    def files(self, commit: str) -> list[HubFile]:
        """Return the files of a commit that are in the cache, in the order of the hub's list."""
        root = self.snapshot(commit)
        found = []
        for path in root.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file():
                    relative = path.relative_to(root).as_posix()
                    oid = path.resolve().name if path.is_symlink() else ""
                    found.append(HubFile(relative, path.stat().st_size, oid, len(oid) == 64))
        return sorted(found, key=lambda file: file.path)

    def tree(self, commit: str) -> list[HubFile] | None:
        """Return the list of all files of a commit; None if no client has kept it."""
        try:
            data = orjson.loads((self.root / "trees" / f"{commit}.json").read_bytes())
            if data["format_version"] != _TREE_VERSION:
                return None
            return [_file_of(path, row) for path, row in data["files"].items() if is_safe(path)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def keep(self, revision: str, commit: str, files: Sequence[HubFile]) -> None:
        """Write the commit of a revision, and the list of its files.

        Raises:
            HubError: the cache cannot be written.
        """
        rows = {"format_version": _TREE_VERSION, "files": {one.path: _row(one) for one in files}}
        with writing(self.root):
            _write(self.root / "trees" / f"{commit}.json", orjson.dumps(rows))
            if not is_commit(revision):
                _write(self.root / "refs" / revision, commit.encode())

    def link(self, commit: str, file: HubFile) -> Path:
        """Give a blob its name in the snapshot, and return that.

        Raises:
            HubError: the cache cannot be written.
        """
        place, blob = self.snapshot(commit) / file.path, self.blob(file)
        with writing(self.root):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            try:
                place.symlink_to(os.path.relpath(blob, place.parent))
            except OSError:
                # Windows without the right to make links.
                shutil.move(blob, place)
        return place

    def remove(self, files: Sequence[HubFile]) -> int:
        """Delete files from all snapshots, and blobs without a link; return the bytes freed."""
        freed = 0
        snapshots = self.root / "snapshots"
        with writing(self.root):
            for commit in self.commits():
                for file in files:
                    place = self.snapshot(commit) / file.path
                    if place.is_file() and not place.is_symlink():
                        freed += place.stat().st_size
                    place.unlink(missing_ok=True)
            linked = {path.resolve() for path in snapshots.rglob("*") if path.is_symlink()}
            for file in files:
                blob = self.blob(file)
                if file.oid and blob.is_file() and blob.resolve() not in linked:
                    freed += blob.stat().st_size
                    blob.unlink()
            if not any(path.is_file() for path in snapshots.rglob("*")):
                self._remove_all()
        return freed

    def _remove_all(self) -> None:
        """Delete the repository, but nothing else in a folder of the user that it is a link to."""
        if not self.root.is_symlink():
            shutil.rmtree(self.root)
            return
        place = self.root.resolve()
        for name in _FOLDERS:
            if (place / name).is_dir():
                shutil.rmtree(place / name)
        self.root.unlink()
        with contextlib.suppress(OSError):
            # The user has more in it.
            place.rmdir()

    def commits(self) -> Mapping[str, str]:
        """Return the commits with files in the cache, and the revision that names each."""
        found = {}
        with contextlib.suppress(OSError):
            for path in sorted((self.root / "snapshots").iterdir()):
                if path.is_dir() and is_commit(path.name):
                    found[path.name] = path.name
        refs = self.root / "refs"
        for path in sorted(refs.rglob("*"), key=lambda path: path.name == MAIN):
            revision = path.relative_to(refs).as_posix()
            commit = self.commit(revision) if path.is_file() else None
            if commit in found:
                found[commit or ""] = revision
        return found


def repos() -> Iterator[Repo]:
    """Yield the repositories in the cache, by name."""
    try:
        names = sorted(path.name for path in folder().iterdir() if path.is_dir())
    except OSError:
        return
    for name in names:
        kind, _, rest = name.partition("--")
        if kind == "models" and rest.count("--") == 1:
            yield Repo(rest.replace("--", "/"))


def names_of_models() -> Iterator[HubName]:
    """Yield the names of the models in the cache."""
    for repo in repos():
        for commit, revision in repo.commits().items():
            files = repo.files(commit)
            for model in models_of(files):
                yield label_of(repo.name, model, files, revision)


def _file_of(path: str, row: Mapping[str, object]) -> HubFile:
    sha256, size = row.get("lfs_sha256"), row["size"]
    oid = str(sha256 or row["blob_id"])
    xet = row.get("xet_hash")
    if not isinstance(size, int):
        raise TypeError("a size is not a number")
    return HubFile(path, size, oid, sha256 is not None, None if xet is None else str(xet),
                   str(row["blob_id"]))  # fmt: skip


def _row(file: HubFile) -> dict[str, object]:
    row: dict[str, object] = {"size": file.size, "blob_id": file.blob_id or file.oid}
    if file.is_large:
        row.update(lfs_sha256=file.oid, lfs_size=file.size)
    if file.xet is not None:
        row["xet_hash"] = file.xet
    return row


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(data)
    draft.replace(path)


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn an error of the file system into a `HubError` that names the cache."""
    try:
        yield
    except OSError as error:
        raise HubError(
            f"The cache of models at {root.parent} cannot be written: {error.strerror or error}. "
            "Choose another folder with HF_HUB_CACHE."
        ) from None
