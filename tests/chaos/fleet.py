"""A fleet under load while its engines are killed, stopped, replaced, and drained.

    python tests/chaos/run.py fleet [--requests 10000] [--seed N]

Three llama-servers serve one model, an engine in the process another, and koboldcpp's double a
third. Two more are loaded on demand, each in the place of the other. At any time at most one of the
three servers is in trouble, so that no request may fail before its first event. The key of the
clients may have few requests at a time, so that leases that are left would refuse others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.koboldcpp import FakeKoboldcpp
from support.servers import Swapped, free_port, llama_server_command

from chaos.client import Reply, Request, ask
from chaos.process import Latimer
from chaos.stage import PROMPTS

OTHER_MODEL = Path(__file__).parent.parent / "models" / "spm.gguf"
# The servers, the requests at a time, and the longest time of a request in seconds.
SERVERS, CLIENTS, LONGEST = 3, 12, 60.0
# The share of clients that leave, and the seconds after which they do.
LEAVERS, STAYS = 0.2, (0.0, 0.5)
# The models with their shares of the requests. Only the engines of `demo` are troubled.
SHARES = {"demo": 0.82, "inside": 0.08, "story": 0.04, "small": 0.03, "large": 0.03}
ON_DEMAND = ("small", "large")
# The prompts of koboldcpp's double, and its answers.
WORDS = ("apple", "bridge", "candle")
KEY = "sk-fleet"
HEADERS = {"connection": "close", "authorization": f"Bearer {KEY}"}
# The requests that the key may have at a time. Those of clients that have just left still count.
AT_ONCE = 3 * CLIENTS


@dataclass
class Report:
    """The outcomes of the requests; `wrong` lists the violations."""

    outcomes: Counter[str] = field(default_factory=Counter)
    engines: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0

    def table(self) -> str:
        """Return all of it in words."""
        rows = [("acts", self.acts), ("engines", self.engines), ("outcomes", self.outcomes)]
        lines = [
            f"{name}: {', '.join(f'{key} {count}' for key, count in sorted(counts.items()))}"
            for name, counts in rows
        ]
        return "\n".join([*lines, f"longest: {self.longest:.1f} s", *self.wrong])


class FleetChaos:
    """A running fleet, its load, and its troubles."""

    def __init__(self, requests: int, seed: int) -> None:
        self.requests = requests
        self.chance = random.Random(seed)
        self.report = Report()
        self.servers = [Swapped(slots=2, context=512) for _ in range(SERVERS)]
        self.story = FakeKoboldcpp()
        self.file = Path(tempfile.mkdtemp(prefix="latimer-fleet-")) / "fleet.toml"
        self.answers: dict[tuple[int, str], str] = {}
        # What happened to which engine last.
        self.act = ""
        self.is_over = False

    def write(self, without: int | None = None) -> None:
        """Write the settings file, without a server that is to be drained."""
        names = [f"e{index}" for index in range(SERVERS) if index != without]
        text = "".join(
            f'[engines.{name}]\nurl = "{self.servers[int(name[1:])].address}"\n' for name in names
        )
        text += f"[engines.inside]\nfile = '{DEMO_MODEL}'\nparallel = 4\ncontext = 2048\n"
        text += f'[engines.story]\nurl = "{self.story.url}"\n'
        words = llama_server_command(DEMO_MODEL, free_port(), slots=2, context=512)
        words[words.index("--port") + 1] = "{port}"
        command = json.dumps([*map(str, words)])
        for name in ON_DEMAND:
            text += f'[engines.{name}]\ncommand = {command}\nmachine = "here"\nmemory = "3GiB"\n'
        # One of the two fits.
        text += '[machines.here]\nmemory = "4GiB"\nmost_wait = "2s"\n'
        text += f"[models.demo]\nengines = {json.dumps(names)}\n"
        for name in SHARES.keys() - {"demo"}:
            text += f'[models.{name}]\nengines = ["{name}"]\n'
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        text += f'[keys.clients]\ndigest = "sha256:{digest}"\nconcurrent = {AT_ONCE}\n'
        part = self.file.with_suffix(".part")
        part.write_text(text)
        part.replace(self.file)

    async def run(self) -> Report:
        """Serve the requests through the troubles."""
        await asyncio.gather(
            *(asyncio.to_thread(server.start, DEMO_MODEL) for server in self.servers)
        )
        await self.story.start()
        self.write()
        latimer = Latimer(["--config", str(self.file)], inside="counted")
        try:
            await latimer.start()
            await self._learn(latimer)
            before = (await latimer.command("tasks"))["tasks"]
            trouble = asyncio.create_task(self._trouble(latimer))
            todo = iter(range(self.requests))
            await asyncio.gather(*(self._client(latimer, todo) for _ in range(CLIENTS)))
            self.is_over = True
            # Its last act ends as well, so that every engine is there again.
            await trouble
            await self._settle(latimer, before)
            await self._end(latimer)
        finally:
            await latimer.stop()
            for server in self.servers:
                if server.process is not None:
                    server.process.send_signal(signal.SIGCONT)
                server.stop()
            await self.story.stop()
        return self.report

    async def _learn(self, latimer: Latimer) -> None:
        """Ask for each answer once, before there is trouble."""
        for number in range(len(PROMPTS)):
            for model in SHARES:
                for _ in range(100):
                    reply = await ask(latimer.port, self._request(number, model, False))
                    if reply.status == 200:
                        break
                    await asyncio.sleep(0.1)
                self.answers[number, model] = reply.texts()[0]
            assert self.answers[number, "story"] == WORDS[number]

    @staticmethod
    def _request(number: int, model: str, streams: bool, leave: float | None = None) -> Request:
        body = {
            "model": model,
            "prompt": f"echo:{WORDS[number]}" if model == "story" else PROMPTS[number],
            "max_tokens": 24,
            "temperature": 0,
            "stream": streams,
        }
        return _sent(body, leave)

    async def _client(self, latimer: Latimer, todo: object) -> None:
        for _ in todo:  # type: ignore[attr-defined]
            number = self.chance.randrange(len(PROMPTS))
            (model,) = self.chance.choices([*SHARES], [*SHARES.values()])
            leaves = self.chance.random() < LEAVERS
            leave = self.chance.uniform(*STAYS) if leaves else None
            request = self._request(number, model, self.chance.random() < 0.5, leave)
            reply = await ask(latimer.port, request, LONGEST)
            self._judge(reply, self.answers[number, model], model)

    def _judge(self, reply: Reply, wanted: str, model: str) -> None:
        report = self.report
        report.longest = max(report.longest, reply.seconds)
        if (engine := reply.headers.get("x-latimer-engine")) is not None:
            report.engines[engine] += 1
        if reply.problem == "left":
            report.outcomes["left"] += 1
            return
        if reply.problem:
            report.outcomes[f"problem: {reply.problem}"] += 1
            report.wrong.append(f"incomplete: {reply}")
            return
        if reply.status != 200:
            code = ((reply.json() or {}).get("error") or {}).get("code")
            report.outcomes[f"{reply.status} {code}"] += 1
            if engine is None or code == "engine_unavailable" or model != "demo":
                # Nothing had begun, the engine was gone when it began, or it was well.
                report.wrong.append(f"not hidden: {reply}")
            return
        error = reply.streamed and any("error" in chunk for chunk in reply.chunks())
        text = "" if error else reply.texts().get(0, "")
        ends = not reply.streamed or reply.events()[-1:] == ["[DONE]"]
        if error:
            report.outcomes["broken in the stream"] += 1
            whole = any(
                choice.get("finish_reason")
                for chunk in reply.chunks()
                for choice in chunk.get("choices", ())
            )
            if whole:
                report.wrong.append(f"an error after the end: {reply}")
            if model != "demo":
                report.wrong.append(f"{model} was unloaded or failed in a stream: {reply}")
        elif not ends:
            report.outcomes["no end"] += 1
            report.wrong.append(f"a stream without an end: {reply}")
        elif text != wanted:
            report.outcomes["other text"] += 1
            report.wrong.append(f"{text!r} instead of {wanted!r}")
        else:
            report.outcomes["right"] += 1

    async def _trouble(self, latimer: Latimer) -> None:
        """Trouble one server after another; each is well again before the next."""
        acts: list[Callable[[Latimer, int], Awaitable[None]]] = [
            self._kill, self._stop, self._replace, self._drain, self._break_file,
        ]  # fmt: skip
        while not self.is_over:
            await asyncio.sleep(self.chance.uniform(0.3, 1.0))
            act = self.chance.choice(acts)
            name, index = act.__name__.strip("_"), self.chance.randrange(SERVERS)
            self.report.acts[name] += 1
            self.act = f"{name} of e{index}"
            await act(latimer, index)
            await self._until_ready(latimer)

    async def _kill(self, _latimer: Latimer, index: int) -> None:
        self.servers[index].stop()
        await asyncio.sleep(self.chance.uniform(0.0, 2.0))
        await asyncio.to_thread(self.servers[index].start, DEMO_MODEL)

    async def _stop(self, _latimer: Latimer, index: int) -> None:
        process = self.servers[index].process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.chance.choice([0.5, 2.0, 14.0]))
        process.send_signal(signal.SIGCONT)

    async def _replace(self, _latimer: Latimer, index: int) -> None:
        await asyncio.to_thread(self.servers[index].start, OTHER_MODEL)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(self.servers[index].start, DEMO_MODEL)

    async def _drain(self, latimer: Latimer, index: int) -> None:
        self.write(without=index)
        latimer.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(1.0)
        self.write()
        latimer.process.send_signal(signal.SIGHUP)

    async def _break_file(self, latimer: Latimer, _index: int) -> None:
        self.file.write_text("[engines.e0]\nurll = 1\n")
        latimer.process.send_signal(signal.SIGHUP)
        await asyncio.sleep(0.5)
        self.write()
        latimer.process.send_signal(signal.SIGHUP)

    async def _until_ready(self, latimer: Latimer) -> None:
        """Wait until the fleet uses all servers again."""
        end = time.monotonic() + 30
        seen: set[str] = set()
        while len(seen) < SERVERS and time.monotonic() < end:
            # Prompts that no engine has.
            bodies = [
                {"model": "demo", "max_tokens": 4, "prompt": f"{self.chance.random()} " * 20}
                for _ in range(2 * SERVERS)
            ]
            replies = await asyncio.gather(
                *(ask(latimer.port, _sent(body), LONGEST) for body in bodies)
            )
            seen |= {reply.headers.get("x-latimer-engine", "") for reply in replies} - {""}
            await asyncio.sleep(0.2)
        if len(seen) < SERVERS:
            log = latimer.output().decode(errors="replace").splitlines()[-20:]
            lines = [f"only {sorted(seen)} are used again 30 s after {self.act}", *log]
            self.report.wrong.append("\n".join(lines))

    async def _settle(self, latimer: Latimer, before: int) -> None:
        """Check that nothing is left of the requests: no task, no slot."""
        await self._until_ready(latimer)
        end = time.monotonic() + 20
        while True:
            busy = [server.address for server in self.servers if _slots(server.address)]
            tasks = (await latimer.command("tasks"))["tasks"]
            if (not busy and tasks <= before + SERVERS) or time.monotonic() > end:
                break
            await asyncio.sleep(0.5)
        if busy:
            self.report.wrong.append(f"slots are still busy at {busy}")
        if tasks > before + SERVERS:
            self.report.wrong.append(f"{tasks} tasks, and {before} before the load")
        self.report.wrong += latimer.fresh_problems()

    async def _end(self, latimer: Latimer) -> None:
        """Check that SIGTERM under load lets requests end, and leaves no child."""
        children = latimer.tree()[1:]
        asked = [
            asyncio.create_task(ask(latimer.port, self._request(0, "demo", True), LONGEST))
            for _ in range(8)
        ]
        await asyncio.sleep(0.05)
        code = await latimer.stop(40)
        for reply in await asyncio.gather(*asked):
            # The server may have stopped to listen before a request arrived.
            if not reply.problem.startswith("refused"):
                self._judge(reply, self.answers[0, "demo"], "demo")
        if code != 0:
            self.report.wrong.append(f"exit code {code} after SIGTERM")
        self.report.wrong += [f"child {pid} is left" for pid in children if _runs(pid)]


def _sent(body: Any, leave: float | None = None) -> Request:
    return Request("/v1/completions", json.dumps(body).encode(), leave=leave, headers=HEADERS)


def _slots(address: str) -> int:
    """Return the number of busy slots; 1 if the server is too busy to say."""
    try:
        with urllib.request.urlopen(f"{address}/slots", timeout=5) as reply:  # noqa: S310
            return sum(slot["is_processing"] for slot in json.load(reply))
    except TimeoutError:
        return 1


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def fleet(requests: int, seed: int) -> Report:
    """Run the fleet through its troubles."""
    return await FleetChaos(requests, seed).run()
