"""Tests of engines that run as child processes: real ones, and commands that fail."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from latimer.backends.base import Backend, Generation, Piece, Prompt, Text
from latimer.backends.errors import EngineUnavailable
from latimer.backends.fleet import groups, process
from latimer.backends.fleet.loading import cause_of
from latimer.backends.fleet.machine import Machine, Member
from latimer.backends.fleet.process import EngineProcess, Tail
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support.servers import llama_server_command

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups are POSIX's")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def real(*options: str, model: Path = DEMO_MODEL) -> list[str]:
    """Return the command of a real llama-server."""
    command = llama_server_command(model, 0, *options, slots=2, context=512)
    command[command.index("--port") + 1] = "{port}"
    command[0] = str(command[0])
    return command


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often whether an engine is ready."""
    monkeypatch.setattr(process, "POLL", 0.02)


@asynccontextmanager
async def engine(
    folder: Path, command: list[str], make: Callable[[str], Backend] = LlamaServer, **options: Any
) -> AsyncIterator[EngineProcess]:
    """Yield an engine that is not loaded yet; no process of its group is left afterwards."""
    found = EngineProcess("test", command, make, folder=folder, **options)
    try:
        yield found
    finally:
        pid = found.pid
        await found.aclose()
        assert pid is None or not groups.Group(pid, "", None).members()
        assert not records(folder)


def records(folder: Path) -> list[Path]:
    """Return the records of engines that are left."""
    return [*folder.rglob("*.json")]


async def texts(backend: Backend) -> bytes:
    """Return what a model generates."""
    job = Generation(Prompt(Text("Hello")), max_tokens=8, seeds=(1,))
    async with backend.open(job) as batches:
        return b"".join([e.data async for batch in batches for e in batch if isinstance(e, Piece)])


async def test_an_engine_is_loaded_and_unloaded(tmp_path: Path) -> None:
    """A real llama-server generates after each load, by the same backend, and ends in between."""
    async with engine(tmp_path, real()) as found:
        backend, answers = found.backend, []
        for _ in range(2):
            await found.load()
            assert found.state == "ready"
            assert found.backend is backend
            answers.append(await texts(backend))
            pid = found.pid
            assert pid is not None
            await found.unload()
            state: str = found.state
            assert state == "unloaded"
            assert groups.start_of(pid) is None
        assert answers[0]
        assert answers[0] == answers[1]


@linux
async def test_the_memory_of_an_engine_is_measured(tmp_path: Path) -> None:
    """The measured memory of a real llama-server is at least the size of its model."""
    async with engine(tmp_path, real()) as found:
        assert found.measure() is None
        await found.load()
        size = found.measure()
        assert size is not None
        assert DEMO_MODEL.stat().st_size < size < 2**30


async def test_the_port_changes_if_it_is_taken(tmp_path: Path) -> None:
    """An engine whose port another program has taken meanwhile is loaded on another one."""
    async with engine(tmp_path, real()) as found:
        port = int(found.address.rpartition(":")[2])
        other = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        async with other:
            await found.load()
            assert not found.address.endswith(f":{port}")
            assert await texts(found.backend)


async def test_an_engine_that_is_killed_is_loaded_again(tmp_path: Path) -> None:
    """A llama-server that is killed is loaded again at once, and the next time after a pause."""
    async with engine(tmp_path, real()) as found:
        for state in ("unloaded", "failed"):
            await found.load()
            assert found.pid is not None
            os.kill(found.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                while found.state == "ready":
                    await asyncio.sleep(0.01)
            assert found.state == state
        assert (found.state, found.failure) == ("failed", "it was ended by SIGKILL")
        assert "listening" in found.tail
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await found.load()
        assert 1 < found.pause <= 2
        found._again -= found.pause
        await found.load()
        assert await texts(found.backend)


async def ends(found: EngineProcess) -> None:
    """Wait until a ready engine has ended by itself."""
    async with asyncio.timeout(20):
        while found.state == "ready":
            await asyncio.sleep(0.01)


async def test_a_group_that_has_ended_gets_no_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next load signals nothing by the number of an engine that has ended by itself, which may
    be that of other programs by then."""
    signaled: list[int] = []
    killpg = os.killpg

    def note(group: int, number: int) -> None:
        signaled.append(group)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", note)
    async with engine(tmp_path, real()) as found:
        await found.load()
        pid = found.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await ends(found)
        async with asyncio.timeout(10):
            while found.pid is not None:
                await asyncio.sleep(0.02)
        signaled.clear()
        assert found.measure() is None
        await found.load()
        assert signaled == []
        assert found.pid not in (None, pid)


@pytest.mark.slow
async def test_an_engine_that_hangs_is_loaded_again(tmp_path: Path) -> None:
    """A llama-server that hangs is killed, is loaded again at once, and then after a pause."""
    async with engine(tmp_path, real(), silence=1.2) as found:
        for state in ("unloaded", "failed"):
            await found.load()
            pid = found.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            await ends(found)
            assert found.state == state
            assert found.failure == "it answered nothing for 1.2 s, so Latimer killed it"
            assert groups.start_of(pid) is None
            assert not records(tmp_path)
        assert 1 < found.pause <= 2
        found._again -= found.pause
        await found.load()
        assert await texts(found.backend)


class _Deaf(LlamaServer):
    """A llama-server whose health is never known."""

    async def health(self) -> None:
        if self.server.monitor.model is not None:
            raise EngineUnavailable("It does not say so.")


@pytest.mark.slow
async def test_an_engine_that_sends_tokens_is_not_killed(tmp_path: Path) -> None:
    """While tokens come, an engine that does not answer questions runs on; then it is killed."""
    async with engine(tmp_path, real(), _Deaf, silence=1.2) as found:
        await found.load()
        pid, end = found.pid, time.monotonic() + 3
        while time.monotonic() < end:
            assert await texts(found.backend)
        assert (found.state, found.pid) == ("ready", pid)
        await ends(found)
        assert found.failure.startswith("it answered nothing for")


async def test_a_model_that_cannot_be_loaded_is_failed(tmp_path: Path) -> None:
    """A llama-server that cannot read its model is a failed engine with the end of its log."""
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF" + bytes(100))
    async with engine(tmp_path, real(model=wrong)) as found:
        with pytest.raises(EngineUnavailable, match="exit code 1"):
            await found.load()
        assert found.state == "failed"
        assert "wrong.gguf" in found.tail


async def test_a_command_that_ends_at_once_is_failed(tmp_path: Path) -> None:
    """A command that ends before it answers is failed with its exit code and its last line."""
    async with engine(tmp_path, ["sh", "-c", "echo no memory; exit 3"]) as found:
        with pytest.raises(EngineUnavailable, match="it ended with exit code 3"):
            await found.load()
        assert found.tail == "no memory"


async def test_a_program_that_does_not_exist_is_failed(tmp_path: Path) -> None:
    """A command without a program is failed, and its name is in the error."""
    async with engine(tmp_path, ["no-such-program", "{port}"]) as found:
        with pytest.raises(EngineUnavailable, match="there is no program 'no-such-program'"):
            await found.load()


async def test_a_command_that_never_becomes_healthy_is_ended(tmp_path: Path) -> None:
    """A command that does not answer in time is ended with everything that it has started."""
    command = ["sh", "-c", "echo hello; sleep 60 & sleep 60"]
    async with engine(tmp_path, command, start_timeout=0.5) as found:
        loading = asyncio.create_task(found.load())
        async with asyncio.timeout(10):
            while not found._last_lines():
                await asyncio.sleep(0.01)
        pid = found.pid
        assert pid is not None
        with pytest.raises(EngineUnavailable, match=r"it was not ready within 0\.5 s"):
            await loading
        assert not groups.Group(pid, "", None).members()
        assert found.tail == "hello"


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A process that ignores SIGTERM, and its children, are killed after the time for it."""
    command = ["sh", "-c", "trap '' TERM; sh -c 'trap \"\" TERM; sleep 60' & sleep 60; sleep 60"]
    async with engine(tmp_path, command, start_timeout=0.3, term=0.1) as found:
        begun = time.monotonic()
        with pytest.raises(EngineUnavailable):
            await found.load()
        assert time.monotonic() - begun < 5


async def test_an_unload_during_a_load_ends_it(tmp_path: Path) -> None:
    """An engine that is unloaded while it loads has no process afterwards."""
    async with engine(tmp_path, ["sleep", "60"]) as found:
        loading = asyncio.create_task(found.load())
        await asyncio.sleep(0.2)
        pid = found.pid
        assert pid is not None
        await found.unload()
        with pytest.raises(EngineUnavailable, match="was unloaded"):
            await loading
        assert groups.start_of(pid) is None


def test_the_cause_of_a_failure_is_found_in_the_log() -> None:
    """The cause is the first error of llama.cpp's log, or the last one of another program."""
    log = (
        "0.00.001.105 I srv  llama_server: initializing ...\n"
        "0.00.002.000 W llama_context: failed in part\n"
        "0.00.010.097 E cmn  common_init_: failed to load model 'cut.gguf'\n"
        "0.00.010.148 E srv    load_model: failed, 'cut.gguf'\n"
    )
    assert cause_of(log) == "failed to load model 'cut.gguf'"
    assert cause_of("0.00.1 E mtmd_init_from_file: error: no CLIP model.\n") == "no CLIP model"
    library = "error while loading shared libraries: libgomp.so.1: cannot open shared object file"
    assert cause_of(f"failed once\nllama-server: {library}\n") == f"llama-server: {library}"
    assert cause_of("") == cause_of("all is well\n") == ""


def test_the_tail_of_a_log_is_bounded() -> None:
    """A log keeps its last lines, and a bounded number of bytes."""
    tail = Tail(most=100)
    for number in range(1000):
        tail.add(b"line %d\n" % number)
    assert tail.lines(2) == "line 998\nline 999"
    tail.add(b"x" * 5000)
    assert tail.lines() == "x" * 100


# Starts an engine, prints the process of it when it is ready or has a child, and waits.
_LATIMER = """
import asyncio, sys
from pathlib import Path
from latimer.backends.fleet import groups, launch, process
from latimer.backends.llama_server import LlamaServer

async def main():
    folder, parent_death, *command = sys.argv[1:]
    if not int(parent_death):
        # The engine of a system without a signal of the parent's death.
        process.launch.__file__ = folder + "/plain.py"
        Path(process.launch.__file__).write_text(
            "import os, sys; os.execvp(sys.argv[2], sys.argv[2:])"
        )
    engine = process.EngineProcess("orphan", command, LlamaServer, folder=Path(folder))
    loading = asyncio.create_task(engine.load())
    while engine.pid is None:
        await asyncio.sleep(0.01)
    group = groups.Group(engine.pid, "", None)
    while not loading.done() and len(group.members()) < 2:
        await asyncio.sleep(0.01)
    print(engine.pid, flush=True)
    await loading
    await asyncio.sleep(600)

asyncio.run(main())
"""


def killed(folder: Path, parent_death: bool, *command: str) -> int:
    """Kill a process that has started an engine; return the process of the engine."""
    process = subprocess.Popen(
        [sys.executable, "-c", _LATIMER, str(folder), str(int(parent_death)), *command],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(10)
    process.stdout.close()
    return pid


def alive(pid: int) -> list[int]:
    """Return the running processes of a group."""
    return groups.Group(pid, "", None).members()


@linux
def test_an_engine_ends_with_a_killed_latimer(tmp_path: Path) -> None:
    """The kernel ends a real llama-server when the Latimer that started it is killed."""
    pid = killed(tmp_path, True, *real())
    end = time.monotonic() + 5
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(pid)
    # Its record is left, and the number may belong to another process by then.
    assert groups.end_orphans(tmp_path) == []
    assert not [*tmp_path.rglob("*.json")]


def test_orphans_end_at_the_next_start(tmp_path: Path) -> None:
    """An engine that a killed Latimer leaves behind is ended by the next one, with children."""
    pid = killed(tmp_path, False, "sh", "-c", "sleep 60 & sleep 60")
    assert len(alive(pid)) >= 1
    assert groups.end_orphans(tmp_path) == ["orphan"]
    assert not alive(pid)
    assert not [*tmp_path.rglob("*.json")]


@linux
def test_children_of_a_script_end_at_the_next_start(tmp_path: Path) -> None:
    """Programs that a script has started are ended even if the script itself has ended."""
    pid = killed(tmp_path, True, "sh", "-c", "sleep 60 & sleep 60")
    time.sleep(0.2)
    assert alive(pid), "the kernel ends only the process that was started"
    assert groups.end_orphans(tmp_path) == ["orphan"]
    assert not alive(pid)


async def test_engines_of_a_running_latimer_are_left_alone(tmp_path: Path) -> None:
    """A second Latimer does not end the engines of one that runs."""
    async with engine(tmp_path, real()) as found:
        await found.load()
        assert groups.end_orphans(tmp_path) == []
        assert await texts(found.backend)


def test_another_process_of_the_same_number_is_left_alone(tmp_path: Path) -> None:
    """A process that got the number of an ended engine is not ended."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        record = tmp_path / "engines" / "old.json"
        record.parent.mkdir()
        facts = {"name": "old", "pid": process.pid, "started": "earlier", "mark": "0"}
        record.write_bytes(orjson.dumps({**facts, "parent": 2**22 + 1, "parent_started": "x"}))
        assert groups.end_orphans(tmp_path) == []
        assert process.poll() is None
        assert not record.exists()
    finally:
        process.kill()
        process.wait()


def test_broken_records_do_no_harm(tmp_path: Path) -> None:
    """Records that cannot be read are ignored."""
    folder = tmp_path / "engines"
    folder.mkdir()
    for number, data in enumerate([b"", b"{", b"[]", b'{"parent": "x"}', b"null"]):
        (folder / f"{number}.json").write_bytes(data)
    assert groups.end_orphans(tmp_path) == []


@linux
async def test_looks_at_all_processes_are_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring and unloading an engine look at the processes in other threads."""
    threads: list[int] = []
    look = groups.Group.members

    def members(group: groups.Group) -> list[int]:
        threads.append(threading.get_ident())
        return look(group)

    monkeypatch.setattr(groups.Group, "members", members)
    machine = Machine()
    member = Member(machine, EngineProcess("test", real(), LlamaServer, folder=tmp_path))
    try:
        await member.load()
        await member.unload()
        assert len(threads) >= 3
        assert threading.get_ident() not in threads
    finally:
        await machine.aclose()


def test_a_user_without_a_home_directory_has_a_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home directory the state is in a temporary folder that others cannot write."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    folder = groups.state_folder()
    assert folder == groups.state_folder() == tmp_path / f"latimer-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert groups.state_folder() != folder
