"""Tests of saved sequences on disk: the files, and engines that are restarted."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.auth import owner_of
from latimer.backends.base import Generation, Prompt, Sampling, Text
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp import LlamaCpp, state_files
from latimer.backends.llama_cpp.state_files import MOST_FILES, STALE, StateFiles
from latimer.backends.llama_cpp.states import MediaSpan, State
from support.clients import client_of
from support.jobs import run
from support.recordings import DEMO_CHATML
from support.servers import command
from support.states import (
    COUNT,
    LARGE,
    SHARED,
    TOKENS,
    cache_of,
    checkpoints,
    distinct,
    opened,
    put,
    recalled,
    state,
)

TESTS = Path(__file__).parents[2]
RECURRENT = TESTS / "models" / "recurrent.gguf"
KEY = "sk-a-secret-that-is-long-enough"


def names(folder: Path) -> list[str]:
    """Return the names of all files but the salt."""
    return sorted(path.name for path in folder.iterdir() if path.name != "salt")


def test_a_state_comes_back(tmp_path: Path) -> None:
    """Another process gets a state as it was, with its tokens, its media and its checkpoints."""
    given = state(spans=(MediaSpan(0, 3, 2),), checkpoints=checkpoints(8, 20))
    put(opened(tmp_path), given)
    found = recalled(opened(tmp_path))
    assert found is not None
    assert (found.owner, found.tokens, found.spans) == ("", TOKENS, given.spans)
    assert found.data.tobytes() == given.data.tobytes()
    assert [(one.length, one.data.tobytes()) for one in found.checkpoints] == [
        (one.length, one.data.tobytes()) for one in given.checkpoints
    ]
    assert found.size == given.size
    # A checkpoint that stays in use must not keep the memory of the rest.
    assert all(one.data.base is None for one in found.checkpoints)


def test_a_picture_comes_back_as_a_whole(tmp_path: Path) -> None:
    """A prompt that differs within a picture reads no state that it cannot reuse."""
    files = opened(tmp_path)
    put(files, state(tokens=[-9, -8, -7, -6, -5, 1, 2], spans=(MediaSpan(0, 5, 1),)))
    assert recalled(files, tokens=[-9, -8, -7, -6, 1]) is None
    assert recalled(files, tokens=[-9, -8, -7, -6, -5, 3]) is not None


def test_whole_states_only(tmp_path: Path) -> None:
    """A model that cannot cut its state gets a state back only for a prompt that continues it."""
    files = opened(tmp_path, cuts=False)
    put(files, state(), state(tokens=TOKENS[:10]))
    assert len(names(tmp_path)) == 2
    cache = cache_of(cuts=False)
    files.recall(cache, "", [*TOKENS[:12], 50])
    assert [len(one.tokens) for one in cache.states.empty()] == [10]


def test_a_state_is_reused_up_to_a_checkpoint(tmp_path: Path) -> None:
    """A prompt that branches off reads a state that it can reuse up to a checkpoint, and a state
    replaces another one that it has up to its end."""
    files = opened(tmp_path, cuts=False)
    put(files, state(tokens=TOKENS[:10]), state(checkpoints=checkpoints(9, 16)))
    assert len(names(tmp_path)) == 1
    cache = cache_of(cuts=False)
    prompt = [*TOKENS[:17], 50, 51]
    files.recall(cache, "", prompt)
    found, length = cache.states.longest("", prompt)
    assert found is not None
    assert (length, found.points) == (16, [9, 16])


@pytest.mark.parametrize("other", [{"owner": "other"}, {"model": "other"}])
def test_others_get_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    """Other owners and other models neither reuse a state nor remove it."""
    put(opened(tmp_path), state("me"))
    theirs = opened(tmp_path, model=other.get("model", "model"))
    assert recalled(theirs, other.get("owner", "me")) is None
    assert recalled(opened(tmp_path), "me") is not None


def test_only_the_owner_of_the_process_reads_them(tmp_path: Path) -> None:
    """Files have mode 0600 in a folder with mode 0700, with any umask."""
    folder = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        put(opened(folder), state())
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_no_key_is_on_disk(tmp_path: Path) -> None:
    """Neither an API key nor the digest that names its owner is in a name or a file, and names of
    two folders differ."""
    owner = owner_of(KEY)
    for folder in ("one", "two"):
        put(opened(tmp_path / folder), state(owner))
        (name,) = names(tmp_path / folder)
        data = name.encode() + (tmp_path / folder / name).read_bytes()
        for secret in (KEY, owner):
            assert secret.encode() not in data
            assert secret[:8].encode() not in data
        assert bytes.fromhex(owner)[:8] not in data
    assert names(tmp_path / "one") != names(tmp_path / "two")


def damage(kind: str, data: bytes, at: int) -> bytes:
    """Return a file with one fault."""
    if kind == "cut":
        return data[:at]
    if kind == "longer":
        return data[:at] + b"\0" + data[at:]
    return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]


@pytest.mark.parametrize("kind", ["flipped", "cut", "longer"])
def test_a_damaged_file_is_removed(tmp_path: Path, kind: str) -> None:
    """A file with a fault at any byte is never used, and is removed."""
    spans, kept = (MediaSpan(0, 3, 2),), checkpoints(4)
    given = state(tokens=TOKENS[:6], size=20, spans=spans, checkpoints=kept)
    put(opened(tmp_path), given)
    (name,) = names(tmp_path)
    whole = (tmp_path / name).read_bytes()
    files = opened(tmp_path)
    for at in range(len(whole)):
        (tmp_path / name).write_bytes(damage(kind, whole, at))
        files._headers.clear()
        assert recalled(files, tokens=given.tokens) is None, at
        assert not names(tmp_path), at
    (tmp_path / name).write_bytes(whole)
    assert recalled(files, tokens=given.tokens) is not None


def test_a_file_that_changes_after_its_header_was_read(tmp_path: Path) -> None:
    """A file whose data is damaged, cut or removed while the process runs is not used."""
    files = opened(tmp_path)
    for change in (
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\0"),
        lambda path: os.truncate(path, path.stat().st_size - 50),
        lambda path: path.unlink(),
    ):
        put(files, state())
        (name,) = names(tmp_path)
        assert recalled(files) is not None
        change(tmp_path / name)
        assert recalled(files) is None
        assert not names(tmp_path)


def test_a_file_that_another_process_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is removed, or cannot be opened, after the folder was listed is not used."""
    put(opened(tmp_path), state())
    listed = os.listdir(tmp_path)
    (tmp_path / names(tmp_path)[0]).unlink()
    monkeypatch.setattr("os.listdir", lambda path: listed)
    assert recalled(opened(tmp_path)) is None
    (tmp_path / next(name for name in listed if name != "salt")).mkdir()
    assert recalled(opened(tmp_path)) is None


def test_files_of_others_stay(tmp_path: Path) -> None:
    """Files whose names are not those of states are neither read nor removed, and a state under
    another state's name is removed."""
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "mine.part").write_text("mine")
    (tmp_path / "mine.state").write_text("mine")
    put(opened(tmp_path), state(), state(tokens=TOKENS[::-1]))
    theirs = [name for name in names(tmp_path) if len(name) > 60]
    os.replace(tmp_path / theirs[0], tmp_path / theirs[1])
    files = opened(tmp_path)
    assert recalled(files) is None
    assert recalled(files, tokens=TOKENS[::-1]) is None
    assert names(tmp_path) == ["mine.part", "mine.state", "notes.txt"]


def test_a_damaged_salt_is_made_anew(tmp_path: Path) -> None:
    """A folder with a damaged salt works, without the states that belonged to the old one."""
    put(opened(tmp_path), state())
    (tmp_path / "salt").write_bytes(b"")
    files = opened(tmp_path)
    assert recalled(files) is None
    put(files, state())
    assert recalled(opened(tmp_path)) is not None


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    """The files never take more than their bound, also after a restart with a smaller one; the
    least recently used is removed first."""
    files = opened(tmp_path, size=4096)

    def taken() -> int:
        return sum((tmp_path / name).stat().st_size for name in names(tmp_path))

    for number in range(4):
        put(files, state(tokens=distinct(number), size=1000))
        assert taken() <= 4096
        if number == 1:
            time.sleep(0.01)
            assert recalled(files, tokens=distinct(0)) is not None
        time.sleep(0.01)
    kept = []
    for number in range(4):
        kept.append(recalled(opened(tmp_path), tokens=distinct(number)))
        time.sleep(0.01)
    assert [one is not None for one in kept] == [True, False, True, True]
    put(files, state(tokens=distinct(9), size=5000))
    assert len(names(tmp_path)) == 3
    opened(tmp_path, size=1500)
    assert len(names(tmp_path)) == 1
    assert recalled(opened(tmp_path), tokens=distinct(3)) is not None


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small states do not make the folder grow without end."""
    assert MOST_FILES < 10_000
    monkeypatch.setattr("latimer.backends.llama_cpp.state_files.MOST_FILES", 5)
    files = opened(tmp_path)
    put(files, *(state(tokens=distinct(number)) for number in range(9)))
    assert len(names(tmp_path)) == 5


def test_a_conversation_keeps_its_last_turn(tmp_path: Path) -> None:
    """A state replaces those that it covers, and one that is covered is not written."""
    files = opened(tmp_path)
    put(files, state(tokens=TOKENS), state(tokens=[*TOKENS, 6, 7, 8, 9]), state(tokens=TOKENS[:20]))
    assert len(names(tmp_path)) == 1
    found = recalled(files)
    assert found is not None
    assert len(found.tokens) == len(TOKENS) + 4


def test_what_memory_has_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is read only if a prompt gains enough tokens from it, and fits into memory."""
    files = opened(tmp_path)
    put(files, state(tokens=list(range(200)), size=500))
    read: list[str] = []
    original = state_files._read_data

    def counted(file: BinaryIO, name: str, rest: float) -> Any:
        read.append(name)
        return original(file, name, rest)

    monkeypatch.setattr(state_files, "_read_data", counted)
    cache = cache_of()
    for tokens, count in (
        (list(range(20)), 0),
        (list(range(100)), 1),
        (list(range(100)), 1),
        (list(range(200)), 1),
    ):
        files.recall(cache, "", [*tokens, 0])
        assert len(read) == count
    files.recall(cache_of(memory=400), "", list(range(200)))
    assert len(read) == 1


def test_a_slow_disk_takes_no_memory(tmp_path: Path) -> None:
    """States beyond the bound of what may wait for the disk are dropped."""
    files = opened(tmp_path, waiting=250)
    with blocked(files) as release:
        for number in range(5):
            files.put(state(tokens=distinct(number)))
        assert files._waiting <= 250
        release()
    while files._waiting:
        time.sleep(0.001)
    assert len(names(tmp_path)) == 2


@contextmanager
def blocked(files: StateFiles) -> Iterator[Callable[[], None]]:
    """Hold the writer's first write until the function that is yielded is called."""
    event, write = threading.Event(), files._write

    def held(state: State, used: float) -> None:
        event.wait(10)
        write(state, used)

    files._write = held  # type: ignore[method-assign]
    yield event.set
    event.set()


@pytest.mark.parametrize("fault", ["space", "folder"])
def test_a_full_disk_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A state that cannot be written is one line in the log and leaves nothing; later ones are
    written again."""
    folder = tmp_path / "cache"
    files = opened(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING):
        try:
            if fault == "space":
                resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
            else:
                folder.rename(tmp_path / "away")
            put(files, *(state(tokens=distinct(number), size=LARGE // 2) for number in range(3)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (record,) = caplog.records
    assert f"Saved prompts stay in memory only: {folder} cannot be written: " in record.message
    if fault == "folder":
        (tmp_path / "away").rename(folder)
    assert not names(folder)
    put(files, state())
    assert recalled(files) is not None


@pytest.mark.parametrize("kind", ["file", "below a file"])
async def test_a_folder_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    """An engine does not start with a folder that it cannot use, and the error says what to do."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" if kind == "file" else tmp_path / "file" / "cache"
    backend = LlamaCpp(cache_dir=folder)
    with pytest.raises(EngineError, match=r"cannot be used for saved prompts: .*Set --cache-dir"):
        await backend.model()
    await backend.aclose()


@pytest.mark.parametrize("options", [{"exact": True}, {"cache_memory": 0}])
def test_a_folder_requires_memory(tmp_path: Path, options: dict[str, Any]) -> None:
    """A folder for saved prompts without a prompt cache is an error."""
    with pytest.raises(EngineError, match="'cache_dir' requires host memory"):
        LlamaCpp(cache_dir=tmp_path, **options)


def test_unfinished_files_are_removed_later(tmp_path: Path) -> None:
    """The unfinished file of a killed process counts towards the bound, and is removed when it is
    old."""
    files = opened(tmp_path, size=2000)
    part = tmp_path / "latimer-abc_123.part"
    part.write_bytes(bytes(1500))
    put(files, state(size=1000))
    assert names(tmp_path) == [part.name]
    os.utime(part, (time.time() - STALE - 1,) * 2)
    put(files, state(size=1000))
    assert part.name not in names(tmp_path)
    assert recalled(files) is not None


def worker(folder: Path, turns: int) -> subprocess.Popen[str]:
    """Start a process that writes states and reads them back."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "support.states", str(folder), str(turns)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
    )


def whole(folder: Path) -> int:
    """Return how many of the states that processes have written can be read."""
    files = opened(folder)
    return sum(recalled(files, tokens=distinct(number)) is not None for number in range(COUNT))


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Processes that write, read and evict in one folder get only whole states."""
    opened(tmp_path)
    processes = [worker(tmp_path, 150) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    # Both may have written one more at the same time.
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= SHARED + 130_000
    count = len(names(tmp_path))
    assert whole(tmp_path) == count > 1


def test_a_killed_process_leaves_whole_states(tmp_path: Path) -> None:
    """Every state that has its name after SIGKILL is whole."""
    for _ in range(4):
        process = worker(tmp_path, 1_000_000)
        assert process.stdout is not None
        process.stdout.readline()
        # A busy machine takes longer than that for the second one.
        while sum(name.endswith(".state") for name in names(tmp_path)) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        count = sum(name.endswith(".state") for name in names(tmp_path))
        assert whole(tmp_path) == count > 1


# A conversation of more than 64 tokens, and its next turn.
TURN = DEMO_CHATML.format("word " * 100 + "What is the capital of France?")
GREEDY = Sampling(temperature=0.0)


def engine(context: int = 1024, **options: Any) -> LlamaCpp:
    """Return an engine with one thread: those of several tests would wait for each other."""
    return LlamaCpp(context=context, threads=1, **options)


async def ask(backend: LlamaCpp, text: str, owner: str = "") -> tuple[bytes, int]:
    """Return a greedy completion, and the number of cached tokens."""
    job = Generation(Prompt(Text(text)), 12, sampling=GREEDY, owner=owner)
    (answer,), (finish,) = await run(backend, job)
    return answer, finish.cached_tokens


async def converse(restarts: bool, **options: Any) -> list[tuple[bytes, int]]:
    """Return the answers of two turns, with another engine for each or the same."""
    backend = engine(**options)
    first = await ask(backend, TURN, "me")
    if restarts:
        await backend.aclose()
        backend = engine(**options)
    second = await ask(backend, f"{TURN}{first[0].decode()} And of Italy?", "me")
    await backend.aclose()
    return [first, second]


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_type": "q8_0", "flash_attention": True}, {"flash_attention": False}],
    ids=str,
)
async def test_a_restarted_engine_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """After a restart, the next turn of a conversation has the same answer and as many cached
    tokens as without one."""
    same = await converse(False, **options)
    again = await converse(True, cache_dir=tmp_path, **options)
    assert again == same
    assert again[1][1] > 100
    assert len(names(tmp_path)) == 1


async def test_a_recurrent_model_goes_on(tmp_path: Path) -> None:
    """A recurrent model continues a whole sequence after a restart, with the same answer."""
    ids = tuple(range(5, 105))
    found = []
    for restarts in (False, True):
        backend = engine(path=RECURRENT, cache_dir=tmp_path if restarts else None)
        await run(backend, Generation(Prompt(ids), 1, sampling=GREEDY))
        if restarts:
            await backend.aclose()
        job = Generation(Prompt((*ids, 7, 8, 9)), 12, sampling=GREEDY)
        found.append(await run(backend, job))
        await backend.aclose()
    assert found[0] == found[1]
    assert found[1][1][0].cached_tokens == 100


async def test_a_recurrent_model_goes_back_after_a_restart(tmp_path: Path) -> None:
    """After a restart, a prompt without the last answer reuses the prompt before it."""
    ids = tuple(range(5, 205))
    job = Generation(Prompt((*ids[:-2], 7, 8, 9)), 12, sampling=GREEDY)
    found = []
    for folder in (None, tmp_path):
        backend = engine(path=RECURRENT, cache_dir=folder)
        await run(backend, Generation(Prompt(ids), 20, sampling=GREEDY))
        if folder is not None:
            await backend.aclose()
        found.append(await run(backend, job))
        await backend.aclose()
    assert found[0] == found[1]
    assert found[1][1][0].cached_tokens == 196


async def test_a_restarted_engine_keeps_owners_apart(tmp_path: Path) -> None:
    """After a restart, another owner with the same prompt reuses nothing."""
    backend = engine(cache_dir=tmp_path)
    alone = await ask(backend, TURN, "me")
    await backend.aclose()
    async with aclosing(engine(cache_dir=tmp_path)) as backend:
        assert await ask(backend, TURN, "other") == alone
        answer, cached = await ask(backend, TURN, "me")
        assert (answer, cached > 0) == (alone[0], True)


@pytest.mark.parametrize("part", [0.001, 0.1, 0.9999])
async def test_an_engine_survives_a_damaged_file(tmp_path: Path, part: float) -> None:
    """An engine evaluates a prompt from its beginning if the file of its state is damaged."""
    first, _ = await converse(False, cache_dir=tmp_path)
    (path,) = (tmp_path / name for name in names(tmp_path))
    data = path.read_bytes()
    path.write_bytes(damage("flipped", data, int(len(data) * part)))
    async with aclosing(engine(cache_dir=tmp_path)) as backend:
        assert await ask(backend, TURN, "me") == (first[0], 0)
    assert not path.exists()


async def test_another_model_starts_anew(tmp_path: Path) -> None:
    """An engine with other options that change the state leaves the files of the first alone."""
    await converse(False, cache_dir=tmp_path)
    (before,) = names(tmp_path)
    for options in ({"cache_type": "bf16"}, {"flash_attention": False}):
        async with aclosing(engine(cache_dir=tmp_path, **options)) as backend:
            assert (await ask(backend, TURN, "me"))[1] == 0
    assert before in names(tmp_path)
    assert len(names(tmp_path)) == 3


async def twice(**options: Any) -> list[tuple[bytes, int]]:
    """Return the answers of twelve conversations, the second time that they are asked."""
    turns = [f"{number} " * 100 + TURN for number in range(12)]
    backend = engine(parallel=1, **options)
    async with aclosing(backend):
        recall: Any = (await backend._engine()).generator.recall  # type: ignore[union-attr]
        found = []
        for turn in 2 * turns:
            found.append(await ask(backend, turn))
            # A slow disk loses states.
            while recall is not None and recall.func.__self__._waiting:
                await asyncio.sleep(0.01)
        return found[12:]


async def test_evicted_conversations_come_back(tmp_path: Path) -> None:
    """Conversations that neither the KV cache nor host memory can hold are reused from disk, with
    the answers and cached tokens of an engine with more memory."""
    found = await twice(cache_dir=tmp_path, cache_memory=8 << 20)
    assert len(names(tmp_path)) > 3
    assert found == await twice()
    assert all(cached > 100 for _, cached in found)


async def test_the_last_conversations_are_written_at_shutdown(tmp_path: Path) -> None:
    """If the folder cannot hold all of memory, the conversations that were used last remain."""
    turns = [f"{number} " * 100 + TURN for number in range(5)]
    backend = engine(context=2048, cache_dir=tmp_path)
    for turn in turns:
        await ask(backend, turn)
    await backend.aclose()
    sizes = [(tmp_path / name).stat().st_size for name in names(tmp_path)]
    assert len(sizes) == 5
    for name in names(tmp_path):
        (tmp_path / name).unlink()
    bound = max(sizes) * 5 // 2
    backend = engine(context=2048, cache_dir=tmp_path, cache_disk=bound)
    for turn in turns:
        await ask(backend, turn)
    await backend.aclose()
    assert len(names(tmp_path)) == 2
    async with aclosing(engine(context=2048, cache_dir=tmp_path)) as backend:
        cached = [(await ask(backend, turn))[1] for turn in turns[::-1]]
    assert [count > 200 for count in cached] == [True, True, False, False, False]


async def test_a_restarted_server_reports_cached_tokens(tmp_path: Path) -> None:
    """After a restart, the usage of a conversation's next turn has cached tokens, for the same API
    key only."""
    messages = [{"role": "user", "content": "word " * 100}]

    @asynccontextmanager
    async def server() -> AsyncIterator[httpx2.AsyncClient]:
        app = OpenAIAdapter(engine(cache_dir=tmp_path), any_model=True, api_keys=[KEY, "other"])
        async with aclosing(app), client_of(app) as client:
            yield client

    async def usage(client: httpx2.AsyncClient, key: str) -> int:
        body = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        reply = answer.json()
        if len(messages) == 1:
            messages.extend([reply["choices"][0]["message"], {"role": "user", "content": "And?"}])
        count: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    async with server() as client:
        assert await usage(client, KEY) == 0
    async with server() as client:
        assert await usage(client, "other") == 0
        assert await usage(client, KEY) > 100
    for name in os.listdir(tmp_path):
        assert KEY.encode() not in contents(tmp_path / name)


def contents(path: Path) -> bytes:
    """Return the bytes of a file."""
    return path.read_bytes()


@pytest.mark.slow
def test_evicted_conversations_survive_sigkill(tmp_path: Path) -> None:
    """After a `kill -9`, each conversation that had left memory has its cached tokens again."""
    options = ("--context", "1024", "--threads", "1", "--cache-ram", "8", "--cache-dir")

    def cached(address: str, number: int) -> int:
        messages = [{"role": "user", "content": f"{number}: " + "word " * 300}]
        body = {"model": "demo", "messages": messages, "max_tokens": 4}
        reply = httpx2.post(f"{address}/v1/chat/completions", json=body).json()
        count: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    with command(*options, str(tmp_path)) as (process, address):
        numbers = 0
        while len(names(tmp_path)) < 3:
            assert cached(address, numbers) == 0
            numbers += 1
            assert numbers < 100, "nothing was written"
        process.kill()
        process.wait(30)
    left = len(names(tmp_path))
    with command(*options, str(tmp_path)) as (_, address):
        assert sum(cached(address, number) > 200 for number in range(numbers)) == left
