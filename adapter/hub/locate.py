"""Find the files of a name: in the cache without the network, else on the hub."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .cache import Repo, is_commit
from .download import Hub, Report, Unreachable, free_disk, is_offline, left_of, missing_of
from .memory import Estimate, estimate, free_memory, read_metadata
from .names import (
    PREFERRED,
    Choice,
    HubError,
    HubFile,
    HubName,
    choose,
    in_units,
    listed,
    models_of,
    parts_of,
    tag_of,
)

# Bytes of the disk that stay free.
_MARGIN = 64 << 20


@dataclass(frozen=True, slots=True)
class Located:
    """The files of a model on this machine.

    Args:
        parts: the paths of the model, in order.
        projector: the path of its multimodal projector, if it has one.
    """

    name: HubName
    commit: str
    choice: Choice
    parts: tuple[Path, ...]
    projector: Path | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The files and the bytes of a download, and what the model needs.

    Args:
        missing: the files to download; `left`: their bytes.
        memory: what the model needs; `free_memory` is None where it is unknown.
    """

    name: HubName
    commit: str
    choice: Choice
    missing: tuple[HubFile, ...]
    left: int
    free_disk: int
    memory: Estimate
    free_memory: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The context of a model, and the limits of this machine.

    Args:
        context: the context length; None for the default.
        cache_type: the type of the KV cache.
        checks_memory: True if a model that does not fit in memory is an error.
        has_projector: False if no projector is wanted.
        free_disk, free_memory: what this machine has.
    """

    context: int | None = None
    cache_type: str | None = None
    checks_memory: bool = True
    has_projector: bool = True
    free_disk: Callable[[Path], int] = free_disk
    free_memory: Callable[[], int | None] = free_memory


def locate(name: HubName, report: Report, needs: Needs | None = None, *, offline: bool) -> Located:
    """Return the files of a name, which are downloaded if the cache does not have them.

    A name that is in the cache makes no request. A newer commit is found by `download` only.

    Raises:
        HubError: there is no such model, no permission, or too little disk or memory. The memory is
            checked for a model of the cache, too.
    """
    needs = needs or Needs()
    is_alone = offline or is_offline()
    found = cached(name, needs, any_file=is_alone)
    if found is None and not is_alone:
        try:
            return download(name, report, needs)
        except Unreachable as error:
            found = cached(name, needs, any_file=True)
            if found is None:
                raise
            report.say(f"{error.message} Latimer uses the cache.")
    if found is None:
        raise HubError(
            f"{name} is not in the cache, and Latimer is offline. {_here(name)} Start once without "
            "--offline and HF_HUB_OFFLINE to download it."
        )
    report.say(f"{name}: {described(found.choice)}, from the cache.")
    _check_cached(found, needs)
    return found


def cached(name: HubName, needs: Needs, *, any_file: bool) -> Located | None:
    """Return the files of a name if all are in the cache.

    Args:
        any_file: True if a file may be chosen that is only the best of those in the cache.
    """
    repo = Repo(name.repo)
    commit = repo.commit(name.revision)
    if commit is None:
        return None
    tree, files = repo.tree(commit), repo.files(commit)
    for known, is_certain in ((tree, True), (files, any_file or _is_clear(name, files))):
        if known and is_certain:
            try:
                choice = _wanted(choose(name, known), needs)
            except HubError:
                continue
            missing = missing_of(repo, commit, choice.files)
            if any_file and missing == [choice.projector]:
                choice, missing = Choice(choice.parts, None, choice.others), []
            if not missing:
                return _located(repo, name, commit, choice)
    return None


def _is_clear(name: HubName, files: Sequence[HubFile]) -> bool:
    """Return True if no file outside of the cache could be a better match."""
    try:
        first = choose(name, files).parts[0]
    except HubError:
        return False
    return bool(name.quant or name.path) or tag_of(first.path) == PREFERRED[0]


def _wanted(choice: Choice, needs: Needs) -> Choice:
    return choice if needs.has_projector else Choice(choice.parts, None, choice.others)


def _located(repo: Repo, name: HubName, commit: str, choice: Choice) -> Located:
    place = repo.snapshot(commit)
    projector = None if choice.projector is None else place / choice.projector.path
    return Located(name, commit, choice, tuple(place / one.path for one in choice.parts), projector)


def listing(hub: Hub, name: HubName) -> tuple[str, list[HubFile]]:
    """Return the newest commit of a name's revision, and its files, and keep both in the cache."""
    commit = name.revision if is_commit(name.revision) else hub.commit_of(name)
    files = hub.files_of(name, commit)
    return commit, files


def plan(hub: Hub, name: HubName, needs: Needs) -> tuple[Plan, list[HubFile]]:
    """Return what a download would do, and all files of the repository.

    Raises:
        HubError: there is no such model, or no permission.
    """
    commit, files = listing(hub, name)
    choice = _wanted(choose(name, files), needs)
    repo = Repo(name.repo)
    missing = missing_of(repo, commit, choice.files)
    left = sum(left_of(repo, file) for file in missing)
    metadata = hub.metadata(name, commit, choice.parts[0])
    memory = estimate(metadata, choice.size, needs.context, needs.cache_type)
    disk, free = needs.free_disk(repo.root), needs.free_memory()
    return Plan(name, commit, choice, tuple(missing), left, disk, memory, free), files


def download(name: HubName, report: Report, needs: Needs) -> Located:
    """Return the files of a name at its newest commit; those that are missing are downloaded.

    Raises:
        HubError: there is no such model, no permission, or too little disk or memory.
    """
    repo = Repo(name.repo)
    with Hub() as hub:
        made, files = plan(hub, name, needs)
        choice = made.choice
        report.say(f"{name}: {described(choice)}.")
        if made.missing:
            check(made, files, needs)
        repo.keep(name.revision, made.commit, files)
        for number, file in enumerate(made.missing, 1):
            count = f" ({number} of {len(made.missing)})" if len(made.missing) > 1 else ""
            hub.fetch(repo, name, made.commit, file, report, f"{file.name}{count}")
    return _located(repo, name, made.commit, choice)


def described(choice: Choice) -> str:
    """Return the files of a choice, in words."""
    first = choice.parts[0].path
    parts = f" and {len(choice.parts) - 1} more parts" if len(choice.parts) > 1 else ""
    projector = f" with {choice.projector.name}" if choice.projector is not None else ""
    others = f"; it also matches {', '.join(choice.others[:5])}" if choice.others else ""
    return f"{first}{parts}{projector} ({in_units(choice.size)}){others}"


def check(made: Plan, files: Sequence[HubFile], needs: Needs) -> None:
    """Check that a model fits on the disk and in memory.

    Raises:
        HubError: it does not; the message names the largest one that does.
    """
    what = f"{made.name} ({made.choice.parts[0].name})"
    room = made.free_disk - _MARGIN
    if made.left > room:
        fits = _largest(made, files, room)
        raise HubError(
            f"{what} needs {in_units(made.left)} of disk, and {in_units(max(room, 0))} are free at "
            f"{Repo(made.name.repo).root.parent}. {fits} Or free space with `latimer models rm`, "
            "or choose another folder with HF_HUB_CACHE."
        )
    memory, free = made.memory, made.free_memory
    if needs.checks_memory and free is not None and memory.total > free:
        fits = _largest(made, files, min(room, free - memory.total + memory.weights))
        anyway = f"download it anyway with `latimer models get {made.name}`, and serve its path"
        raise _too_large(what, memory, free, fits, anyway)


def _check_cached(found: Located, needs: Needs) -> None:
    """Check that a model of the cache fits in memory.

    Raises:
        HubError: it does not; the message names the largest one of its repository that does.
    """
    free = needs.free_memory() if needs.checks_memory else None
    metadata = read_metadata(found.parts[0])
    memory = estimate(metadata, found.choice.size, needs.context, needs.cache_type)
    if free is None or memory.total <= free:
        return
    repo = Repo(found.name.repo)
    files = repo.tree(found.commit) or repo.files(found.commit)
    fits = _largest(found, files, free - memory.total + memory.weights)
    anyway = f"serve it anyway by its path, {found.parts[0]}"
    raise _too_large(f"{found.name} ({found.parts[0].name})", memory, free, fits, anyway)


def _too_large(what: str, memory: Estimate, free: int, fits: str, anyway: str) -> HubError:
    return HubError(
        f"{what} needs about {in_units(memory.total)} of memory: {in_units(memory.weights)} "
        f"for weights, {in_units(memory.kv)} for the KV cache of {memory.context} tokens, "
        f"{in_units(memory.compute)} to compute; {in_units(free)} are free. {fits} Or use a "
        f"smaller --context, or {anyway}."
    )


def _largest(made: Plan | Located, files: Sequence[HubFile], room: int) -> str:
    """Return the largest other model that fits, in words."""
    best: tuple[int, HubFile] | None = None
    projector = made.choice.projector.size if made.choice.projector is not None else 0
    for model in models_of(files):
        try:
            size = sum(part.size for part in parts_of(model, files)) + projector
        except HubError:
            continue
        if size <= room and (best is None or size > best[0]) and model != made.choice.parts[0]:
            best = size, model
    if best is None:
        return f"No other file of it fits; it has: {listed(files)}."
    size, model = best
    tag = tag_of(model.path)
    named = f"hf:{made.name.repo}:{tag}" if tag else f"hf:{made.name.repo}/{model.path}"
    return f"The largest that fits is {named} ({in_units(size)})."


def _here(name: HubName) -> str:
    repo = Repo(name.repo)
    commit = repo.commit(name.revision)
    files = repo.files(commit) if commit is not None else []
    models = listed(files)
    return f"The cache has of it: {models}." if models else "The cache has no model of it."
