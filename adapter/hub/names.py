"""Names of models on a hub, and the files that a name chooses.

The rules are those of llama-server's `-hf` (`common/download.cpp`), so that both serve the same
file for the same name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ...backends.errors import LatimerError

PREFIX = "hf:"
SYNTAX = "hf:ORG/REPO, hf:ORG/REPO:QUANT or hf:ORG/REPO/PATH.gguf, each with @REVISION if needed"
MAIN = "main"
# The quantizations of a name without one, in the order of preference.
PREFERRED = ("Q4_K_M", "Q8_0")
# The longest repository id.
_LONGEST = 256
# The most names in a message.
_SHOWN = 40

_ID = re.compile(r"[A-Za-z0-9_]+(?:[.-]+[A-Za-z0-9_]+)*")
_QUANT = re.compile(r"[A-Za-z0-9_.-]+")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_PART = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_TAG = re.compile(r"[-.]([A-Za-z0-9_]+)$")
# Words in the names of files that are no models themselves.
_OTHERS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


class HubError(LatimerError):
    """A model that cannot be found or downloaded; `message` says what to do."""


class HubName(NamedTuple):
    """The name of a model on a hub.

    Args:
        repo: `ORG/REPO`.
        quant: the quantization, or an empty text.
        path: the path of the file in the repository, or an empty text.
        revision: a branch, a tag or a commit.
    """

    repo: str
    quant: str = ""
    path: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        path = f"/{self.path}" if self.path else ""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{PREFIX}{self.repo}{quant}{path}{revision}"


class HubFile(NamedTuple):
    """A file of a repository.

    Args:
        oid: the name of its blob: the SHA-256 of a large file, or the git object id.
        is_large: True if `oid` is a SHA-256.
        xet: its hash in the hub's other store, which the cache keeps for the hub's own client.
        blob_id: its git object id.
    """

    path: str
    size: int
    oid: str = ""
    is_large: bool = False
    xet: str | None = None
    blob_id: str = ""

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition("/")[2]


class Choice(NamedTuple):
    """The files that a name chooses.

    Args:
        parts: the model; several files if it is split.
        projector: the multimodal projector that belongs to it.
        others: the first files of other models that the name matches too.
    """

    parts: tuple[HubFile, ...]
    projector: HubFile | None
    others: tuple[str, ...] = ()

    @property
    def files(self) -> Sequence[HubFile]:
        """All files of the choice."""
        return self.parts if self.projector is None else (*self.parts, self.projector)

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


Files: TypeAlias = Sequence[HubFile]


def is_name(model: str | None) -> bool:
    """Return True if a model is a name on a hub, and neither a file nor an address."""
    return model is not None and model.startswith(PREFIX)


def parse(text: str) -> HubName:
    """Return the parts of a name; the prefix `hf:` may be missing.

    Raises:
        HubError: it is not a name of a model on a hub.
    """
    body, at, revision = text.removeprefix(PREFIX).partition("@")
    organization, _, rest = body.partition("/")
    repo, _, path = rest.partition("/")
    repo, colon, quant = repo.partition(":")
    is_valid = (
        len(f"{organization}/{repo}") <= _LONGEST
        and all(map(_ID.fullmatch, (organization, repo)))
        and (not colon or (not path and _QUANT.fullmatch(quant)))
        and (not at or (_REVISION.fullmatch(revision) and ".." not in revision))
        and (not path or (path.lower().endswith(".gguf") and is_safe(path)))
        and (bool(path) or rest.count("/") == 0)
    )
    if not is_valid:
        raise HubError(f"'{text[:200]}' is not a name of a model on a hub. Write {SYNTAX}.")
    return HubName(f"{organization}/{repo}", quant, path, revision or MAIN)


def is_safe(path: str) -> bool:
    """Return True if a path of a repository stays in its folder."""
    parts = path.split("/")
    return "\\" not in path and "\0" not in path and not {"", ".", ".."} & {*parts}


def models_of(files: Files) -> list[HubFile]:
    """Return the models among files, in their order; of a split model the first part."""
    found = []
    for file in files:
        name = file.name
        part = _PART.fullmatch(name)
        if not name.endswith(".gguf") or any(word in name for word in _OTHERS):
            continue
        if part is None or int(part["number"]) == 1:
            found.append(file)
    return found


def choose(name: HubName, files: Files) -> Choice:
    """Return the files that a name chooses among those of a repository.

    Raises:
        HubError: there is no such file; the message lists the models with their sizes.
    """
    models = models_of(files)
    found = _matches(name, files, models)
    if not found:
        raise HubError(_not_there(name, files, models))
    parts = parts_of(found[0], files)
    others = tuple(file.path for file in found[1:])
    return Choice(parts, _projector(found[0], files), others)


def _matches(name: HubName, files: Files, models: Files) -> Sequence[HubFile]:
    if name.path:
        return [file for file in files if file.path == name.path]
    for quant in (name.quant,) if name.quant else PREFERRED:
        pattern = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
        found = [file for file in models if pattern.search(file.path)]
        if found:
            return found
    return [] if name.quant else models[:1]


def parts_of(first: HubFile, files: Files) -> tuple[HubFile, ...]:
    """Return all files of a model, in order.

    Raises:
        HubError: the repository has only some of them.
    """
    part = _PART.fullmatch(first.path)
    if part is None:
        return (first,)
    known = {file.path: file for file in files}
    count = int(part["count"])
    names = [f"{part['prefix']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]
    missing = [path for path in names if path not in known]
    if missing:
        raise HubError(
            f"{first.path} has {count} parts, and these are missing: "
            f"{', '.join(missing[:_SHOWN])}. Choose another file."
        )
    return tuple(known[path] for path in names)


def tag_of(path: str) -> str:
    """Return the quantization in a file's name, in capitals; empty if it has none."""
    part = _PART.fullmatch(path)
    stem = part["prefix"] if part is not None else path.removesuffix(".gguf")
    found = _TAG.search(stem.rpartition("/")[2])
    return found[1].upper() if found else ""


def _bits(path: str) -> int:
    found = re.search(r"\d+", tag_of(path))
    return int(found[0]) if found else 0


def _projector(model: HubFile, files: Files) -> HubFile | None:
    """Return the projector next to a model or above it: the nearest folder, then nearest bits."""
    folder = model.path.split("/")[:-1]
    best: tuple[tuple[int, int], HubFile] | None = None
    for file in files:
        its = file.path.split("/")[:-1]
        if "mmproj" not in file.name or not file.path.endswith(".gguf"):
            continue
        if file == model or folder[: len(its)] != its:
            continue
        rank = (-len(its), abs(_bits(file.path) - _bits(model.path)))
        if best is None or rank < best[0]:
            best = rank, file
    return None if best is None else best[1]


def label_of(repo: str, model: HubFile, files: Files, revision: str = MAIN) -> HubName:
    """Return a name that chooses a model: by its quantization if that is clear, else its path."""
    name = HubName(repo, tag_of(model.path), revision=revision)
    if name.quant and _matches(name, files, models_of(files))[:1] == [model]:
        return name
    return HubName(repo, path=model.path, revision=revision)


def listed(files: Files) -> str:
    """Return the models among files with their sizes, for messages."""
    rows = []
    tags = [tag_of(model.path) for model in models_of(files)]
    for model, tag in zip(models_of(files), tags, strict=True):
        try:
            size = sum(part.size for part in parts_of(model, files))
        except HubError:
            continue
        label = tag if tag and tags.count(tag) == 1 else model.path
        rows.append(f"{label} ({in_units(size)})")
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return ", ".join(rows[:_SHOWN]) + more


def _not_there(name: HubName, files: Files, models: Files) -> str:
    if not models:
        return (
            f"{PREFIX}{name.repo} has no GGUF file. Look for a repository with GGUF files of this "
            "model; their names often end in -GGUF."
        )
    wanted = f"the file {name.path}" if name.path else f"a file for {name.quant!r}"
    return f"{PREFIX}{name.repo} does not have {wanted}. It has: {listed(files)}."


def in_units(size: int) -> str:
    """Return a number of bytes in decimal units, as the hub shows them."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            break
        amount /= 1000
    return f"{size} B" if unit == "B" else f"{amount:.{0 if amount >= 100 else 1}f} {unit}"
