"""Processes of `latimer` that are copies of one which has imported its modules.

To import them is most of what a start costs. A copy runs the command with arguments, variables,
streams and a process id of its own, as the workers of `latimer serve` do, which are forks too. What
a test says about imports, or about the interpreter, needs a process that starts from nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, AnyStr, NoReturn

# What `latimer serve` imports before its first request, and after it.
_MODULES = (
    ".commands", ".serve", ".parent", ".admin", ".admin_socket", ".check", ".top", ".models",
    ".store", "..routes", "..fleet", "..store.database", "...backends.llama_server",
    "...backends.llama_cpp",
)  # fmt: skip
_SUBREAPER = 36
_lock = threading.Lock()


class Latimer(subprocess.Popen[AnyStr]):
    """A process of `latimer`; its first argument is that word.

    Attributes:
        keeps: False for one that gives up the capabilities of root.
    """

    keeps = True

    def _execute_child(self, *given: Any) -> None:
        """Let the original fork, and adopt the copy, so that this process waits for it."""
        execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
        names: dict[str, Any] = inspect.signature(execute).bind(self, *given).arguments
        variables = dict(os.environ if names["env"] is None else names["env"])
        if sys.platform != "linux" or _of_python(variables) != _of_python(os.environ):
            # The interpreter reads its variables at its start.
            execute(self, *given)
            return
        assert not any(names[one] for one in ("preexec_fn", "pass_fds", "start_new_session"))
        pipes = [names[one] for one in ("p2cread", "c2pwrite", "errwrite")]
        request = {
            "words": [shutil.which("latimer"), *names["args"][1:]],
            "folder": names["cwd"] or os.getcwd(),
            "variables": variables,
            "keeps": self.keeps,
        }
        streams = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        prctl = ctypes.CDLL(None).prctl
        with _lock:
            prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(_original(), [json.dumps(request).encode()], streams)
                self.pid = int(_original().recv(32))
            finally:
                prctl(_SUBREAPER, 0)
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(names[one] for one in ends))  # type: ignore[attr-defined]


class _Unprivileged(Latimer[str]):
    keeps = False


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `latimer` to its end, and return what it has written."""
    return _finished(Latimer, words, environment)


def fed(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `latimer` with a text on standard input."""
    return _finished(Latimer, words, {}, text)


def unprivileged(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `latimer` so that the permissions of files hold, also if root runs the tests."""
    return _finished(_Unprivileged, words, {})


def _finished(
    kind: type[Latimer[str]], words: Sequence[str], environment: dict[str, str], text: str = ""
) -> subprocess.CompletedProcess[str]:
    pipe, variables = subprocess.PIPE, {**os.environ, **environment}
    with kind(
        ["latimer", *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=variables
    ) as process:
        try:
            output, errors = process.communicate(text, timeout=60)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _of_python(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: one for name, one in variables.items() if name.startswith("PYTHON")}


@functools.cache
def _original() -> socket.socket:
    """Start the process that is copied; return the channel to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {name: one for name, one in os.environ.items() if not name.startswith("LATIMER_")}
    quiet = subprocess.DEVNULL
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=quiet, stdout=quiet, env=variables,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait(30)

    atexit.register(end)
    return ours


def _copy(channel: socket.socket) -> NoReturn:
    """Import the modules, and make a copy for each request, until the tests have ended."""
    cli = import_module("latimer.adapter.cli")
    with cli.imports():
        for name in _MODULES:
            import_module(name, cli.__name__)
        import_module("latimer.adapter.routes").load_endpoints()
    while True:
        request, streams, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            copy = os.fork()
            if copy == 0:
                for own in (channel.fileno(), reading, writing):
                    os.close(own)
                _become(json.loads(request), streams)
                sys.exit(cli.main())
            os.write(writing, str(copy).encode())
            os._exit(0)
        # The copy is then a child of the tests.
        os.waitpid(between, 0)
        channel.send(os.read(reading, 32))
        for one in (reading, writing, *streams):
            os.close(one)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Take the arguments, the variables, the folder and the streams of a request."""
    for own, stream in enumerate(streams):
        os.dup2(stream, own)
    for stream in streams:
        os.close(stream)
    # As a terminal makes it.
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["variables"])
    sys.argv = request["words"]
    if not request["keeps"]:
        # The third version of the structure, this process, and three empty sets in two halves.
        version, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert ctypes.CDLL(None).capset(version, none) == 0


if __name__ == "__main__":
    # Its folder is that of the tests' modules, which the product does not see.
    sys.path.pop(0)
    _copy(socket.socket(fileno=int(sys.argv[1])))
