"""Voices on a hub: a folder of a repository, or a file with its settings next to it.

`hf:ORG/REPO/FOLDER` has the files of a voice that are directly in a folder, and
`hf:ORG/REPO/VOICE.onnx` has that file and `VOICE.onnx.json`; each with `@REVISION` if needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cache import Repo
from .download import Hub, Report, Unreachable, free_disk, is_offline, left_of, missing_of
from .locate import listing
from .names import PREFIX, HubError, HubFile, HubName, in_units, is_name, is_safe, parse

SYNTAX = "hf:ORG/REPO, hf:ORG/REPO/FOLDER or hf:ORG/REPO/VOICE.onnx, each with @REVISION if needed"
# The ends of names of files that a voice can need.
_ENDS = (".onnx", ".onnx.json", ".txt", ".bin", ".fst", ".far")


def placed(value: str, report: Report, *, offline: bool) -> str:
    """Return a value of `--speech` with the path of a model that is named `LIBRARY:hf:ORG/REPO`.

    Its files are downloaded, unless they are in the hub's cache. This blocks.

    Raises:
        HubError: there is no such voice, no permission, or too little disk.
    """
    library, _, model = value.partition(":")
    if not is_name(model):
        return value
    return f"{library}:{locate(name_of(model), report, offline=offline)}"


def name_of(text: str) -> HubName:
    """Return the parts of a voice's name; `path` is the folder or the file.

    Raises:
        HubError: it is not a name of a voice.
    """
    body, at, revision = text.removeprefix(PREFIX).partition("@")
    organization, _, rest = body.partition("/")
    repo, _, path = rest.partition("/")
    path = path.rstrip("/")
    try:
        name = parse(f"{organization}/{repo}{at}{revision}")
    except HubError:
        name = HubName("", quant="-")
    if name.quant or (path and not is_safe(path)):
        raise HubError(f"'{text[:200]}' is not a name of a voice on a hub. Write {SYNTAX}.")
    return name._replace(path=path)


def locate(name: HubName, report: Report, *, offline: bool) -> Path:
    """Return the folder or the file of a voice; what the cache lacks is downloaded.

    Raises:
        HubError: there is no such voice, no permission, or too little disk.
    """
    repo = Repo(name.repo)
    is_alone = offline or is_offline()
    found = _cached(repo, name, any_file=is_alone)
    if found is None and is_alone:
        raise HubError(
            f"{name} is not in the cache, and Latimer is offline. Start once without --offline "
            "and HF_HUB_OFFLINE to download it."
        )
    return found or _download(repo, name, report)


def _cached(repo: Repo, name: HubName, *, any_file: bool) -> Path | None:
    """Return the folder or the file of a voice if the cache has all of it.

    Args:
        any_file: True if those in the cache are enough: not all clients keep the list of all files.
    """
    commit = repo.commit(name.revision)
    if commit is None:
        return None
    known = repo.tree(commit)
    if known is None and any_file:
        known = repo.files(commit)
    files = _chosen(name, known or ())
    if not files or missing_of(repo, commit, files):
        return None
    return repo.snapshot(commit) / name.path


def _download(repo: Repo, name: HubName, report: Report) -> Path:
    """Download the files of a voice at its newest commit; without the hub, use the cache."""
    with Hub() as hub:
        try:
            commit, every = listing(hub, name)
        except Unreachable as error:
            found = _cached(repo, name, any_file=True)
            if found is None:
                raise HubError(f"{name} is not in the cache. {error.message}") from None
            report.say(f"{error.message} Latimer uses the cache.")
            return found
        files = _chosen(name, every)
        if not files:
            raise HubError(
                f"{name} has no voice: no file VOICE.onnx is directly in that folder. Name the "
                f"folder of one, as {SYNTAX}."
            )
        missing = missing_of(repo, commit, files)
        left = sum(left_of(repo, file) for file in missing)
        if left > free_disk(repo.root):
            raise HubError(f"{name} needs {in_units(left)} of disk, and fewer are free.")
        report.say(f"{name}: {len(files)} files ({in_units(sum(one.size for one in files))}).")
        repo.keep(name.revision, commit, every)
        for number, file in enumerate(missing, 1):
            label = f"{file.name} ({number} of {len(missing)})"
            hub.fetch(repo, name, commit, file, report, label)
    return repo.snapshot(commit) / name.path


def _chosen(name: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files of a voice; none if no model is among them."""
    if name.path.endswith(".onnx"):
        wanted = {name.path, f"{name.path}.json"}
        found = [one for one in files if one.path in wanted]
    else:
        folder = f"{name.path}/" if name.path else ""
        found = [one for one in files if one.path == folder + one.name and one.name.endswith(_ENDS)]
    return found if any(one.name.endswith(".onnx") for one in found) else []
