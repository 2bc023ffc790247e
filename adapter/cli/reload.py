"""Follow the changes of the settings file of a running server, and of its file of keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...backends.errors import LatimerError
from ...backends.fleet.groups import end_orphans, state_folder
from ..app import OpenAIAdapter
from ..auth import UnusableKey
from ..engines import starts_engines
from ..option import option_of
from ..settings import OF_ENGINE, OF_MODEL, Settings
from ..settings_file import WrongSettings
from .listener import Door
from .sharing import check_shared
from .terminal import say

if TYPE_CHECKING:
    from ..fleet import Fleet

log = logging.getLogger("latimer")

# Seconds between looks at the files.
_LOOK = 2.0
# The looks in a row without a file after which a line says that it is gone.
_GONE = 2
# The settings that engines and models without their own get again with the file.
_FOLLOWED = {*OF_ENGINE, *OF_MODEL, "queue"}


async def follow(settings: Settings, fleet: Fleet | None, app: OpenAIAdapter, door: Door) -> None:
    """Read the settings file and the keys again when one of these files has changed.

    `door` can ask for it, too. It ends when it is cancelled.
    """
    assert settings.file is not None
    files = [settings.file]
    if settings.api_key_file is not None and settings.api_key_file.is_file():
        # A pipe would look like a file that is gone.
        files.append(settings.api_key_file)
    asked, started = door.reloads(), settings
    seen, missed = [*map(_stamp, files)], 0
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), _LOOK)
        now = [*map(_stamp, files)]
        if None in now and not asked.is_set():
            # An editor replaces the file, which takes less than two looks.
            missed += 1
            if missed == _GONE:
                _miss(files[now.index(None)])
            continue
        missed = 0
        if now == seen and not asked.is_set():
            continue
        asked.clear()
        seen = now
        before, settings = settings, await reload(settings, fleet, app, started)
        if settings is not before:
            door.has_reloaded()


async def reload(
    settings: Settings, fleet: Fleet | None, app: OpenAIAdapter, started: Settings
) -> Settings:
    """Serve what the file says now; an invalid one changes nothing. Return the settings.

    Args:
        fleet: the engines and models of the file's tables; None for a server of one engine, which
            follows the keys only.
        started: the settings with which the server has started.
    """
    # It imports the schemas of all requests, which the start of a server does not need.
    from ..fleet import changes_of

    try:
        if settings.file is not None and settings.file.is_fifo():
            # To read it would stop the server until somebody writes.
            raise WrongSettings(f"{settings.file}: it is a pipe, which can be read only once.")
        # Another place of them needs a restart.
        keys = started.api_keys()
        new = settings.reloaded()
        _check(settings, new, fleet, keys)
        changes: list[str] = []
        if fleet is not None:
            if starts_engines(new) and not starts_engines(settings):
                await asyncio.to_thread(end_earlier_engines)
            changes = fleet.apply(new)
            changes += [
                f"setting {name} changed"
                for name in Settings.model_fields
                if name in _FOLLOWED and getattr(new, name) != getattr(settings, name)
            ]
    except (WrongSettings, UnusableKey) as error:
        return _kept(settings, str(error))
    except LatimerError as error:
        return _kept(settings, error.message)
    except Exception as error:
        # The file must be followed after any error: a key that it removes later has to go.
        log.exception("the settings file could not be read again")
        return _kept(settings, str(error))
    if fleet is not None:
        app.replace(fleet.entries)
        fleet.start()
    counts = app.replace_keys(keys, new.keys)
    changes += changes_of("key", settings.keys, new.keys)
    # The other keys without a table are those of the start.
    changes += [
        f"{count} key{'s' * (count > 1)} in {started.api_key_file} {word}"
        for count, word in zip(counts, ("added", "removed"), strict=True)
        if count
    ]
    same = "the same keys" if fleet is None else "the same engines, models and keys"
    words = f"Latimer has read {new.file} again: {', '.join(changes) or same}."
    say(words, "reload", changes=changes)
    fixed = fixed_in(started, new)
    if fixed:
        say(f"Start the server again to change: {', '.join(fixed)}.")
    return new


def _miss(file: Path) -> None:
    """Say that the file is gone; the server could not start with it."""
    reason = f"{file} does not exist any more."
    say(
        f"Latimer keeps its settings: {reason} The next start needs the file.",
        "reload",
        "error",
        reason=reason,
    )


def _kept(settings: Settings, reason: str) -> Settings:
    """Say why a file is not used, and return the settings that stay."""
    say(f"Latimer keeps its settings: {reason}", "reload", "error", reason=reason)
    return settings


def fixed_in(settings: Settings, new: Settings) -> list[str]:
    """Return the names of settings that differ, and that a running server does not change."""
    return [
        name
        for name, field in Settings.model_fields.items()
        if (not option_of(field).is_table or name == "admission")
        and (not settings.engines or name not in _FOLLOWED)
        and getattr(new, name) != getattr(settings, name)
    ]


def end_earlier_engines() -> None:
    """End the engines that a killed Latimer has left; this can take seconds."""
    for name in end_orphans(state_folder()):
        say(f"Ended the engine {name}, which an earlier Latimer had started.")


def _check(settings: Settings, new: Settings, fleet: Fleet | None, keys: Sequence[str]) -> None:
    """Check that the server can change to other settings while it runs.

    Args:
        keys: the keys without a table.

    Raises:
        WrongSettings: it cannot.
    """
    if fleet is not None and not new.engines:
        raise WrongSettings(f"{settings.file}: it has no table of an engine any more.")
    if fleet is None and new.engines:
        raise WrongSettings(
            f"{settings.file}: it has tables of engines now. Start the server again to serve them."
        )
    if settings.workers > 1:
        check_shared(new)
    if settings.keys and not new.keys and not keys:
        raise WrongSettings(f"{settings.file}: it has no table of a key any more.")


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
