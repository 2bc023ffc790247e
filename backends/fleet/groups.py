"""Process groups of engines: signals, memory, and groups that an earlier Latimer left behind.

An engine that Latimer starts ends with it: by `aclose`, or by the kernel (`launch.py`). A record of
each group is a file in the state folder. A Latimer that starts ends the groups of others that no
longer run: a script may have started programs that the kernel does not know about.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

# The variable in the environment of an engine, and of everything that it starts.
MARK = "LATIMER_ENGINE"
_PROC = Path("/proc")
_HAS_PROC = sys.platform == "linux"
_SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
# Seconds that orphans get to end after SIGKILL.
_LAST = 5.0
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


def state_folder() -> Path:
    """Return the folder for what Latimer knows from one run to the next."""
    own = os.environ.get("XDG_STATE_HOME")
    if own:
        return Path(own) / "latimer"
    try:
        return _folder_at_home()
    except RuntimeError:
        # The user has no home directory, as in a container with a numeric user.
        return _temporary_folder()


def _folder_at_home() -> Path:
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "latimer"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "latimer"
    return Path.home() / ".local" / "state" / "latimer"


def _temporary_folder() -> Path:
    """Return a folder that only this user can write, for a user without a home directory."""
    if sys.platform == "win32":
        return Path(tempfile.gettempdir()) / "latimer"
    folder = Path(tempfile.gettempdir()) / f"latimer-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
        return folder
    # Another user has made it.
    return Path(tempfile.mkdtemp(prefix="latimer-"))


class Group:
    """A process group, and the record of it; on Windows one process without a record.

    Args:
        pid: the process that leads the group.
        mark: the value of `MARK` in the environment of its processes.
        record: the file with its record, or None.
    """

    def __init__(self, pid: int, mark: str, record: Path | None) -> None:
        self.pid = pid
        self._mark = mark
        self._record = record
        _running.add(self)

    @classmethod
    def started(cls, pid: int, mark: str, name: str, folder: Path) -> Group:
        """Return the group of a process that was just started, and write its record."""
        if sys.platform == "win32":
            return cls(pid, mark, None)
        record: Path | None = folder / "engines" / f"{_UNSAFE.sub('_', name)}-{mark}.json"
        assert record is not None
        facts = {
            "name": name,
            "pid": pid,
            "started": start_of(pid),
            "mark": mark,
            "parent": os.getpid(),
            "parent_started": start_of(os.getpid()),
        }
        try:
            record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = record.with_suffix(".draft")
            draft.write_bytes(orjson.dumps(facts))
            draft.replace(record)
        except OSError:
            # Without a folder, only the kernel ends the engine of a killed Latimer.
            record = None
        return cls(pid, mark, record)

    def members(self) -> list[int]:
        """Return the running processes of the group; only the leader where others are unknown."""
        if not _HAS_PROC:
            return [self.pid] if _responds(self.pid) else []
        return [pid for pid, group, state in _processes() if group == self.pid and state != "Z"]

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill every process of the group."""
        self.signal(_SIGKILL)

    def memory(self) -> int:
        """Return the resident memory of the group in bytes, weights of mapped files included."""
        return sum(map(_resident, self.members()))

    def forget(self) -> None:
        """Delete the record of a group that has ended."""
        _running.discard(self)
        if self._record is not None:
            with contextlib.suppress(OSError):
                self._record.unlink(missing_ok=True)

    def is_own(self) -> bool:
        """Return True if a process of the group has its mark, so that the number is not reused."""
        wanted = f"{MARK}={self._mark}".encode()
        for pid in self.members():
            with contextlib.suppress(OSError):
                if wanted in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                    return True
        return False


# The groups that this process has started.
_running: set[Group] = set()


def new_mark() -> str:
    """Return a mark for the environment of an engine."""
    return secrets.token_hex(8)


def kill_all() -> None:
    """Kill the engines of this process, which is about to end."""
    for group in [*_running]:
        group.kill()


def end_orphans(folder: Path) -> list[str]:
    """Kill the groups of processes that have ended without ending their engines.

    Returns:
        The names of the engines.
    """
    ended: list[tuple[str, Group]] = []
    for record in sorted((folder / "engines").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            facts = orjson.loads(record.read_bytes())
            if start_of(facts["parent"]) == facts["parent_started"]:
                # It still runs, or it is this process.
                continue
            group = Group(facts["pid"], facts["mark"], record)
            same = start_of(group.pid) == facts["started"]
            if group.is_own() if _HAS_PROC else same:
                group.kill()
                ended.append((str(facts["name"]), group))
            else:
                group.forget()
    end = time.monotonic() + _LAST
    for _, group in ended:
        while group.members() and time.monotonic() < end:
            time.sleep(0.02)
        group.forget()
    return [name for name, _ in ended]


def start_of(pid: int) -> str | None:
    """Return when a process started, which distinguishes it from others of its number."""
    if _HAS_PROC:
        try:
            fields = _stat(pid)
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return None
        return None if fields[0] == "Z" else f"{boot} {fields[19]}"
    if sys.platform == "win32":
        return None
    command = ["ps", "-o", "lstart=", "-p", str(pid)]
    found = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
    return found.stdout.decode(errors="replace").strip() or None


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; its name before them may have spaces."""
    return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2].split()


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield the number, the group and the state of each process."""
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError, LookupError, ValueError):
                fields = _stat(int(entry))
                yield int(entry), int(fields[2]), fields[0]


def _resident(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if unknown."""
    try:
        if _HAS_PROC:
            pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        found = subprocess.run(command, capture_output=True, check=False)  # noqa: S603
        return int(found.stdout) * 1024
    except (OSError, ValueError, LookupError):
        return 0


def _responds(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
