"""The parent of several workers: it accepts connections, and starts, drains and replaces workers.

The parent gives each connection to the worker that has the fewest. Workers that accepted from one
socket themselves would share unevenly: asyncio and libuv accept until no connection waits, so one
worker takes a burst. With SO_REUSEPORT the kernel chooses by a hash, so of four connections all go
to one of two workers in an eighth of all cases, and a worker that ends takes waiting connections
along. `uvicorn.supervisors.Multiprocess` shares a socket in the first way, and has no pause between
restarts, no end of workers whose parent was killed, and no count of what a drain waits for.

The parent has no event loop and no threads, because it forks: a worker is there at once, with the
modules and the settings of its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import multiprocessing
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..auth import UnusableKey
from ..routes import load_endpoints
from ..settings import Settings
from ..settings_file import WrongSettings
from . import serve
from .admin_socket import with_key
from .listener import Listener
from .reload import fixed_in
from .server import END, ENDS, WAITING, leaves, waits_for
from .sharing import check_shared, one_process_engine, shared
from .terminal import (
    ALL,
    EXIT_START,
    NO_FILE,
    START,
    WrongUse,
    fail,
    is_read,
    mute,
    outlives_hangups,
    say,
)
from .worker import (
    BEAT,
    CLOSED,
    CONNECTION,
    COUNTED,
    DRAIN,
    FULL,
    LEAVE,
    LEAVES,
    READY,
    REGISTER,
    RELOAD,
    RELOADED,
    RUNNING,
    STOP,
    TAKEN,
    Worker,
)

# The connections that are accepted before the parent looks at other events.
_BURST = 64
# Seconds after which a worker that ends is not one that cannot run.
_STABLE = 10.0
# Seconds before a worker starts again, by the number of its short lives in a row, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
# The beats of a worker that may be missing before it gets connections only if all others miss as
# many, and before it is ended.
_QUIET, SILENT = 3, 30
# Seconds that the lack of files or memory, of the system or of a worker, gets to end.
_SHORTAGE = 0.1
# The bytes that a folder in memory must have free for a store.
_ROOM = 256 << 20


def run(settings: Settings) -> None:
    """Serve with several workers until a signal ends them.

    Raises:
        WrongSettings: one process only can serve what the settings say.
        SystemExit: the server could not start.
    """
    check_shared(settings)
    serve.set_log(settings)
    reason = asyncio.run(one_process_engine(settings))
    if reason is not None:
        fail(reason)
    settings = with_key(settings)
    listener = Listener(settings)
    # Each worker would import them by itself.
    load_endpoints()
    folder = _folder()
    try:
        (folder / REGISTER).mkdir()
        prints_key = settings.reasoning_key is None and not is_read()
        code = _Parent(shared(settings, folder), listener, folder, prints_key).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if listener.admin is not None:
            listener.admin.close()
    if code:
        sys.exit(code)


def _folder() -> Path:
    """Make the folder that the workers share: in memory if there is room, else on disk."""
    memory = Path("/dev/shm")  # noqa: S108 (a new folder in it, for this user only)
    with contextlib.suppress(OSError):
        if shutil.disk_usage(memory).free >= _ROOM:
            return Path(tempfile.mkdtemp(prefix="latimer-", dir=memory))
    return Path(tempfile.mkdtemp(prefix="latimer-"))


class _Child:
    """A worker as its parent sees it.

    Attributes:
        connections: the number of its open connections.
        last: the number of the last connection that it got.
        running: the requests that its drain waits for, when it `has_counted` them.
        missed: the beats since its last message.
        given: the connections that were passed on to it, until it says that it has them.
        full_until: the time until which it gets no connection, because it had too many files.
    """

    def __init__(self, number: int, process: Any, channel: socket.socket) -> None:
        self.number, self.process, self.channel = number, process, channel
        self.started = time.monotonic()
        self.is_ready = self.is_leaving = self.has_counted = False
        self.connections = self.last = self.running = self.missed = 0
        self.given: deque[socket.socket] = deque()
        self.full_until = 0.0

    @property
    def name(self) -> str:
        """Its name in the log."""
        return f"Worker {self.number + 1} (process {self.process.pid})"

    def tell(self, message: bytes) -> None:
        """Send a message; a worker that has ended gets none."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def give(self, connection: socket.socket) -> bool:
        """Pass a connection on; return False if the worker does not take it now."""
        try:
            socket.send_fds(self.channel, [CONNECTION], [connection.fileno()])
        except OSError:
            return False
        self.given.append(connection)
        self.connections += 1
        return True

    def close(self) -> None:
        """Close what is open here."""
        self.channel.close()
        while self.given:
            self.given.pop().close()


class _Parent:
    """The parent process.

    The workers share `folder`: the Unix sockets of each, by which another worker reaches it, the
    register of responses in the background, and what each has counted.

    Args:
        settings: the settings that a new worker gets.
        listener: the bound sockets, which listen when the first worker is ready.
        folder: the folder that the workers share.
        prints_key: True to say that the secret of reasoning is random.
    """

    def __init__(
        self, settings: Settings, listener: Listener, folder: Path, prints_key: bool
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._folder = folder
        self._prints_key = prints_key
        self._context: Any = multiprocessing.get_context("fork")
        self._selector = selectors.DefaultSelector()
        self._children: dict[int, _Child] = {}
        # The time at which each missing worker starts, and the short lives of its predecessors.
        self._due: dict[int, float] = {0: 0.0}
        self._short: dict[int, int] = {}
        self._given = 0
        # The connections that were accepted and that no worker has.
        self._held: deque[socket.socket] = deque()
        self._accepts = self._has_started = self._is_complete = self._is_draining = False
        # The time at which the drain begins, after a signal.
        self._leaves_at = math.inf
        self._end = self._beat_at = 0.0
        self._code = 0
        self._lifeline, self._life = os.pipe()
        self._signals, self._waker = socket.socketpair()

    def run(self) -> int:
        """Run the workers until they have ended; return the exit code."""
        self._follow_signals()
        try:
            while self._due or self._children:
                now = time.monotonic()
                for number in [number for number, due in self._due.items() if due <= now]:
                    del self._due[number]
                    self._start(number)
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                self._count_beats()
                if self._has_started and not self._accepts:
                    self._offer()
                if not self._is_draining and self._leaves_at <= time.monotonic():
                    self._drain()
        finally:
            # Python would wait for them.
            for child in self._children.values():
                child.process.kill()
            self._close()
        return self._code

    def _close(self) -> None:
        """Close what the parent itself has opened."""
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for one in (self._signals, self._waker, *self._held):
            one.close()
        os.close(self._lifeline)
        os.close(self._life)

    def _pause(self) -> float | None:
        """Return the seconds until something is due; None if nothing is."""
        now = time.monotonic()
        end = self._end if self._is_draining else self._leaves_at
        if self._is_draining and end <= now:
            for child in self._children.values():
                child.process.kill()
            return 1.0
        ready = self._ready()
        full = [one.full_until for one in ready if one.full_until > now and not self._accepts]
        next_one = min([end, *full, *self._due.values(), *([self._beat_at] if ready else [])])
        return max(next_one - now, 0.0) if next_one < math.inf else None

    def _count_beats(self) -> None:
        """End a worker that has sent nothing for too long; `_on_end` replaces it.

        The beats of this process are counted, so a machine that was suspended ends none.
        """
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + BEAT
        for child in self._ready():
            child.missed += 1
            if child.missed > SILENT:
                child.is_ready = False
                child.process.kill()
                say(
                    f"{child.name} has given no sign for {SILENT * BEAT:g} s. Latimer ends it.",
                    "worker", "warning", worker=child.number + 1,
                )  # fmt: skip

    def _follow_signals(self) -> None:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if self._settings.file is not None or outlives_hangups():
            numbers.append(signal.SIGHUP)
        self._signals.setblocking(False)
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        for number in numbers:
            signal.signal(number, lambda *_: None)
        self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)

    def _on_signals(self) -> None:
        for number in self._signals.recv(64):
            if number == signal.SIGHUP and self._settings.file is None:
                say(NO_FILE, "reload")
            elif number == signal.SIGHUP:
                self._tell(RELOAD)
            elif not self._has_started:
                self._end_at_once(number)
            elif number in (signal.SIGINT, signal.SIGTERM):
                self._leave()

    def _end_at_once(self, number: int) -> NoReturn:
        """End a server that does not listen yet, as one process would end."""
        for child in self._children.values():
            child.process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(128 + number)

    def _leave(self) -> None:
        """Begin the drain, after its delay; after the second signal, end the workers."""
        delay = self._settings.shutdown_delay
        if self._leaves_at < math.inf:
            say(ENDS, "drain")
            if not self._is_draining:
                self._drain()
            self._tell(STOP)
            self._end = time.monotonic() + END + 1
            return
        self._leaves_at = time.monotonic() + delay
        if delay:
            say(leaves(delay), "drain")
            self._tell(LEAVE)
        else:
            self._drain()

    def _drain(self) -> None:
        """Let the workers finish what runs."""
        self._is_draining = True
        self._due.clear()
        if self._accepts:
            # The kernel would cut those that wait there.
            for one in self._listener.sockets:
                self._on_client(one, WAITING)
        self._stop_accepting()
        self._listener.close()
        self._end = time.monotonic() + self._settings.drain + 2 * END
        for child in self._children.values():
            if child.is_ready:
                child.tell(DRAIN)
            else:
                child.process.kill()

    def _tell(self, message: bytes) -> None:
        for child in self._children.values():
            child.tell(message)

    def _start(self, number: int) -> None:
        """Start a worker."""
        own, other = socket.socketpair()
        own.setblocking(False)
        process = self._context.Process(target=self._work, args=(number, own, other))
        process.start()
        other.close()
        child = self._children[number] = _Child(number, process, own)
        self._selector.register(own, selectors.EVENT_READ, partial(self._read, child))
        self._selector.register(
            process.sentinel, selectors.EVENT_READ, partial(self._on_end, child)
        )

    def _work(self, number: int, own: socket.socket, other: socket.socket) -> None:
        """Run a worker, in its process."""
        signal.set_wakeup_fd(-1)
        # A file of the parent that stays open here would hide the parent's end.
        self._selector.close()
        address, admin = self._listener.address, self._listener.admin
        self._listener.close()
        if admin is not None and number:
            # The first worker serves it, and asks the others.
            admin.socket.close()
            admin = None
        for one in (own, self._signals, self._waker, *self._held):
            one.close()
        for child in self._children.values():
            child.close()
        os.close(self._life)
        if number:
            # All workers would say the same.
            mute(ALL)
        elif self._has_started:
            mute(START)
        worker = Worker(number, other, self._lifeline, self._folder, address, admin)
        try:
            serve.run(serve.serve(self._settings, worker))
        except WrongSettings as error:
            wrong = WrongUse(str(error))
            wrong.show()
            sys.exit(wrong.exit_code)
        except UnusableKey as error:
            # The file of keys has changed.
            fail(str(error))

    def _read(self, child: _Child) -> None:
        """Follow the messages of a worker."""
        if self._children.get(child.number) is not child:
            return
        try:
            messages = child.channel.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            messages = b""
        if not messages:
            # Its process ends.
            self._selector.unregister(child.channel)
            child.is_ready = False
            return
        child.missed = 0
        if CLOSED in messages:
            child.connections -= messages.count(CLOSED)
            child.full_until = 0.0
        if TAKEN in messages or FULL in messages:
            self._follow_given(child, messages)
        child.running += messages.count(RUNNING)
        if READY in messages:
            self._on_ready(child)
        if LEAVES in messages and not child.is_leaving:
            child.is_leaving = True
            child.tell(DRAIN)
        if RELOADED in messages:
            self._keep_settings()
        if COUNTED in messages:
            self._on_counted(child)

    def _follow_given(self, child: _Child, messages: bytes) -> None:
        """Close what a worker has, and take back what it has too many files for."""
        for one in messages:
            if one == TAKEN[0]:
                child.given.popleft().close()
            elif one == FULL[0]:
                child.connections -= 1
                child.full_until = time.monotonic() + _SHORTAGE
                self._held.append(child.given.popleft())
        if self._held:
            self._offer()

    def _on_ready(self, child: _Child) -> None:
        child.is_ready = True
        if self._is_draining:
            child.tell(DRAIN)
            return
        if self._leaves_at < math.inf:
            child.tell(LEAVE)
        if not self._has_started:
            self._has_started = True
            self._listener.listen()
            if self._prints_key:
                say(serve.RANDOM_KEY, START)
            self._due = dict.fromkeys(range(1, self._settings.workers), 0.0)
        elif not self._is_complete and len(self._ready()) == self._settings.workers:
            self._is_complete = True
            pids = ", ".join(str(one.process.pid) for _, one in sorted(self._children.items()))
            say(f"Latimer runs {self._settings.workers} workers: processes {pids}.", START)
        elif self._is_complete:
            say(f"{child.name} serves again.", "worker", worker=child.number + 1)
        self._accept()

    def _on_counted(self, child: _Child) -> None:
        """Say what the drain waits for, when every worker has counted."""
        child.has_counted = True
        if self._is_draining and all(one.has_counted for one in self._ready()):
            running = sum(one.running for one in self._ready())
            say(waits_for(running, self._settings.drain), "drain")

    def _keep_settings(self) -> None:
        """Give new workers what the running ones have read from the file."""
        try:
            new = self._settings.reloaded()
        except WrongSettings:
            # It has changed again since.
            return
        fixed = {name: getattr(self._settings, name) for name in fixed_in(self._settings, new)}
        self._settings = new.model_copy(update=fixed)

    def _on_end(self, child: _Child) -> None:
        """Replace a worker that has ended."""
        child.process.join()
        code = child.process.exitcode
        self._selector.unregister(child.process.sentinel)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.channel)
        child.close()
        del self._children[child.number]
        if self._is_draining:
            return
        if not self._has_started:
            # It has said why, except after a signal.
            self._code = code if code > 0 else EXIT_START
            if code < 0:
                fail(f"the first worker was ended by {signal.Signals(-code).name}.")
            return
        pause = self._pause_of(child)
        again = f"in {pause:g} s" if pause else "now"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if child.is_leaving and code == 0:
            how = "ended after its drain"
        say(
            f"{child.name} {how}. Another one starts {again}.", "worker", "warning",
            worker=child.number + 1, exit_code=code,
        )  # fmt: skip
        self._due[child.number] = time.monotonic() + pause

    def _pause_of(self, child: _Child) -> float:
        """Return the seconds until the next worker starts in place of one."""
        if time.monotonic() - child.started >= _STABLE or child.is_leaving:
            self._short[child.number] = 0
            return 0.0
        lives = self._short.get(child.number, 0)
        self._short[child.number] = lives + 1
        return min(_FIRST_PAUSE * 2 ** (lives - 1), _LONGEST_PAUSE) if lives else 0.0

    def _ready(self) -> list[_Child]:
        return [child for child in self._children.values() if child.is_ready]

    def _able(self) -> list[_Child]:
        """Return the workers that can get a connection; the first is to get the next one."""
        now = time.monotonic()
        able = [one for one in self._ready() if not one.is_leaving and one.full_until <= now]
        return sorted(able, key=_load)

    def _offer(self) -> None:
        """Give the workers what is held here, and accept connections again if they have room."""
        while self._held:
            if not self._give(self._held[0]):
                self._stop_accepting()
                return
            self._held.popleft()
        if not self._is_draining and self._able():
            self._accept()

    def _give(self, connection: socket.socket) -> bool:
        """Give a connection to a worker; return False if none takes it now."""
        for child in self._able():
            if child.give(connection):
                self._given += 1
                child.last = self._given
                return True
        return False

    def _accept(self) -> None:
        """Accept connections from now on."""
        if not self._accepts:
            self._accepts = True
            for one in self._listener.sockets:
                one.setblocking(False)
                self._selector.register(one, selectors.EVENT_READ, partial(self._on_client, one))

    def _stop_accepting(self) -> None:
        """Let connections wait in the kernel."""
        if self._accepts:
            self._accepts = False
            for one in self._listener.sockets:
                self._selector.unregister(one)

    def _on_client(self, listening: socket.socket, most: int = _BURST) -> None:
        """Give the connections that wait to the workers that have the fewest, and that respond."""
        for _ in range(most):
            if self._held or not self._able():
                self._stop_accepting()
                return
            try:
                connection, _address = listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                time.sleep(_SHORTAGE)
                return
            if not self._give(connection):
                self._held.append(connection)


def _load(child: _Child) -> tuple[bool, int, int]:
    return child.missed > _QUIET, child.connections, child.last
