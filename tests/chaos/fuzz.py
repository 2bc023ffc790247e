"""Random samples over each engine for some minutes, with each finding as a file."""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from chaos.case import CHAT, EDITED_KOBOLD, EDITED_SERVER, INSIDE, REAL
from chaos.client import Reply, Request, ask
from chaos.judge import FAILING, WELL, judge, work
from chaos.process import Died
from chaos.samples import Sample, from_json, samples, smaller, to_json
from chaos.stage import Stage

# Latimer's arguments for each engine, which are of minimal size.
CONTEXT = 512
WORDS: dict[str, tuple[str, ...]] = {
    INSIDE: ("--context", str(CONTEXT), "--parallel", "8", "--threads", "1", "--cache-memory", "16",
             "--gpu-layers", "0", "--embeddings"),
    REAL: ("--engine-timeout", "10"),
    EDITED_SERVER: ("--backend", "llama-server"),
    EDITED_KOBOLD: ("--backend", "koboldcpp"),
}  # fmt: skip
# Samples between two checks of known completions, tasks, files and memory; and per hypothesis run.
LOOK_EVERY, AT_ONCE = 25, 200
# MiB by which the memory can grow from the second third to the last, and the checks it takes.
GROWTH, LOOKS = 48, 40
# Time limits in seconds for a reply: to end, or to disconnect if it has many tokens.
LONGEST_REPLY, PATIENCE = 20.0, 2.0
# Number of tokens that an engine generates well within the time limit of a reply.
MUCH = 2_000
# Number of tasks and files by which a quiet process can exceed its start.
MORE = 8
# Maximum number of files for one kind of finding; others are only counted.
MOST_FILES = 3


@dataclass(frozen=True)
class Finding:
    """A violation that a sample has shown.

    Args:
        kind: "died", "answer", "log", "held", "witness", "left over" or "memory".
        what: a description in one line.
        details: a traceback, stacks, or the output.
    """

    kind: str
    what: str
    details: str = ""

    @property
    def signature(self) -> str:
        """A text that findings with the same probable cause share."""
        frames = re.findall(r'File ".*?/(\w+\.py)", line \d+, in (\w+)', self.details)
        where = "" if self.kind == "answer" else str(frames[-1:])
        return f"{self.kind}: {re.sub(r'[0-9]+', '#', self.what)[:120]} {where}"


# An engine whose responses are edited can be one that does not answer, or that has another model.
_OF_EDITS = (
    b"engine llama_server does not answer: ", b"engine llama_server answers again",
    b"engine koboldcpp does not answer: ", b"engine koboldcpp answers again",
    b"model demo.gguf: it serves another model (",
    b"model koboldcpp/demo: it serves another model (",
)  # fmt: skip


class Findings:
    """The findings of a run, and the folder of their files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[tuple[str, str]] = Counter()

    def is_new(self, engine: str, finding: Finding) -> bool:
        """Return True if an engine has no such finding yet."""
        return not self.counts[engine, finding.signature]

    def add(
        self, engine: str, sample: Sample | None, finding: Finding, seed: int,
        small: Sample | None = None,
    ) -> None:  # fmt: skip
        """Count a finding, and write it to a file unless its kind has enough of them."""
        key = (engine, finding.signature)
        self.counts[key] += 1
        if self.counts[key] > MOST_FILES:
            return
        print(f"  {engine}: {finding.signature}", flush=True)
        name = re.sub(r"\W+", "-", f"{engine}-{finding.kind}-{finding.what}")[:80]
        small = small or sample
        made = {
            "target": engine, "seed": seed, "kind": finding.kind, "what": finding.what,
            "details": finding.details[-20_000:],
            **({} if small is None else to_json(small)),
            "original": None if sample is None or sample is small else to_json(sample),
        }  # fmt: skip
        path = self.folder / f"{name}-{self.counts[key]}.json"
        path.write_text(json.dumps(made, indent=1))


class Session:
    """A process under test with its engine, and the checks of its state.

    Attributes:
        stuck: True if further samples would only show the same problem.
        memory: the MiB at each check.
    """

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.edits = engine in (EDITED_SERVER, EDITED_KOBOLD)
        self.stage = Stage(
            engine, *WORDS[engine], "--drain", "2", context=CONTEXT, witnesses=CHAT,
            inside="edited" if self.edits else "timed",
        )  # fmt: skip
        self.statuses: Counter[str] = Counter()
        self.memory: list[float] = []
        self.stuck = False

    async def start(self) -> None:
        """Start the engine and the process, and measure it at rest."""
        await self.stage.start()
        await self.stage.latimer.command("settle")
        await self.stage.latimer.command("begin")
        self._start = await self.stage.latimer.sample()
        self.stage.latimer.fresh_problems()

    async def run(self, sample: Sample) -> list[Finding]:
        """Run a sample and return its findings.

        Raises:
            Died: the process has ended.
        """
        latimer, front = self.stage.latimer, self.stage.front
        if front is not None:
            front.facts_changed = False
            front.arm(list(sample.edits))
            if sample.fresh:
                await latimer.command("renew")
        replies = await asyncio.gather(
            *(ask(latimer.port, one, _patience(one)) for one in sample.requests)
        )
        if front is not None:
            front.arm([])
        found = []
        for reply in replies:
            found += await self._judge(reply)
        if front is not None and front.facts_changed:
            await latimer.command("renew")
        return found + await self._notes("state")

    async def _judge(self, reply: Reply) -> list[Finding]:
        self.statuses[str(reply.status or reply.problem)] += 1
        if reply.problem.startswith("refused"):
            raise Died("no connections are taken any more")
        request, silent = reply.request, reply.problem == "silent"
        if silent and work(request, CONTEXT) > MUCH:
            # A request for very many tokens need not end in time.
            return []
        wrong = judge(reply, FAILING if self.edits else WELL)
        if not wrong:
            return []
        details = await self._stacks() if silent else str(reply.body[:500])
        self.stuck |= silent
        return [Finding("answer", f"{request.path}: {wrong[0]}", details)]

    async def _stacks(self) -> str:
        return "\n".join((await self.stage.latimer.command("stacks"))["stacks"])

    async def _notes(self, command: str) -> list[Finding]:
        """Run a command, and return what the process has noted."""
        latimer = self.stage.latimer
        state = await latimer.command(command)
        also = _OF_EDITS if self.edits else ()
        found = [_of_log(text) for text in latimer.fresh_problems(True, also)]
        if "failed" in state:
            found.append(Finding("log", f"a command failed: {state['failed']}"))
        for held in state["held"]:
            what = (
                f"the loop's turn of {held['ms']:.0f} ms, {held['collecting_ms']:.0f} ms of it gc"
            )
            found.append(Finding("held", what, "\n".join(held["stacks"])))
        return found

    async def look(self) -> list[Finding]:
        """Check the known completions, and that no tasks or files are left over."""
        found = []
        for wrong in await self.stage.witness(3, frozenset({429, 502, 503, 504})):
            self.stuck = True
            found.append(Finding("witness", "a known answer changed", wrong))
        end = time.monotonic() + 12
        while True:
            found += await self._notes("settle")
            sample = await self.stage.latimer.sample()
            more = {
                name: getattr(sample, name) - getattr(self._start, name)
                for name in ("tasks", "files")
            }
            if max(more.values()) <= MORE:
                break
            if time.monotonic() > end:
                what = f"{more} more than at the start"
                found.append(Finding("left over", what, await self._stacks()))
                break
            await asyncio.sleep(0.2)
        self.memory.append(sample.memory)
        return found

    async def close(self) -> int | None:
        """End the process and its engine, and return the exit code."""
        if self.stuck:
            self.stage.latimer.process.kill()
        return await self.stage.stop()

    def death(self, died: Died) -> Finding:
        """Return the finding of a process that has ended."""
        output = self.stage.latimer.output()[-10_000:]
        return Finding("died", str(died), output.decode(errors="replace"))


def _patience(request: Request) -> float:
    return PATIENCE if work(request, CONTEXT) > MUCH else LONGEST_REPLY


def _of_log(text: str) -> Finding:
    """Return the finding of log lines, the last of which is the most informative."""
    lines = text.splitlines()
    return Finding("log", f"{lines[0][:60]} … {lines[-1][:120]}", text)


async def reduced(
    sample: Sample,
    finding: Finding,
    run: Callable[[Sample], Awaitable[list[Finding]]],
    seconds: float = 30.0,
) -> Sample:
    """Return the smallest sample found within a time limit that still shows a finding.

    Args:
        run: runs a sample and returns its findings.
    """
    end = time.monotonic() + seconds

    async def shows(less: Sample) -> bool:
        return any(found.signature == finding.signature for found in await run(less))

    if not await shows(sample):
        return sample
    changed = True
    while changed and time.monotonic() < end:
        changed = False
        for less in smaller(sample):
            if time.monotonic() > end:
                break
            if await shows(less):
                sample, changed = less, True
                break
    return sample


class Over(BaseException):
    """The time is up, or the process is stuck.

    It is not an `Exception`, because hypothesis would report that as a failure.
    """


@dataclass
class Summary:
    """The totals of one engine."""

    samples: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    longest: float = 0.0
    memory: list[float] = field(default_factory=list)
    restarts: int = 0

    def quantile(self, part: float) -> float:
        """Return the duration in ms that a fraction of all loop turns does not exceed."""
        left = part * sum(self.turns.values())
        for step, count in sorted(self.turns.items()):
            left -= count
            if left <= 0:
                return (step + 1) / 20
        return 0.0


class Run:
    """Samples over one engine, up to a time or a number of samples."""

    def __init__(self, engine: str, seed: int, findings: Findings, most: int | None) -> None:
        self.engine, self.seed, self.findings, self.most = engine, seed, findings, most
        self.summary = Summary()
        self._last: Sample | None = None

    def until(self, end: float) -> Summary:
        """Run samples, and start a new process whenever one ends."""
        with asyncio.Runner() as runner:
            while time.monotonic() < end and not self._is_done():
                self._run_process(runner, end)
        return self.summary

    def _is_done(self) -> bool:
        return self.most is not None and self.summary.samples >= self.most

    def _run_process(self, runner: asyncio.Runner, end: float) -> None:
        """Run samples until the process ends, which is a finding."""
        session = Session(self.engine)
        runner.run(session.start())
        self._last = None
        try:
            while not self._is_done():
                self._draw(session, runner, end)
            runner.run(self._look(session))
        except Over:
            self.summary.restarts += session.stuck
        except Died as died:
            session.stuck = True
            self.summary.restarts += 1
            runner.run(self._add(session.death(died), self._run_alone))
        finally:
            runner.run(self._close(session))
        third = len(session.memory) // 3
        if len(session.memory) >= LOOKS:
            before = statistics.median(session.memory[third : 2 * third])
            grown = statistics.median(session.memory[-third:]) - before
            if grown > GROWTH:
                what = f"{grown:.0f} MiB more in the last third than in the second"
                self.findings.add(self.engine, None, Finding("memory", what), self.seed)

    def _draw(self, session: Session, runner: asyncio.Runner, end: float) -> None:
        """Run the samples of one hypothesis run."""
        count = AT_ONCE if self.most is None else min(AT_ONCE, self.most - self.summary.samples)

        @hypothesis.seed(self.seed * 100_000 + self.summary.samples)
        @settings(
            max_examples=count, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(samples(session.edits))
        def take(sample: Sample) -> None:
            if time.monotonic() > end:
                raise Over
            runner.run(self._try(session, sample))

        take()

    async def _try(self, session: Session, sample: Sample) -> None:
        self.summary.samples += 1
        self._last = sample
        found = await session.run(sample)
        for finding in found:
            await self._add(finding, None if session.stuck else session.run)
        if session.stuck:
            raise Over
        if found or self.summary.samples % LOOK_EVERY == 0:
            await self._look(session)

    async def _look(self, session: Session) -> None:
        for finding in await session.look():
            await self._add(finding, None)
        if session.stuck:
            raise Over

    async def _add(
        self, finding: Finding, run: Callable[[Sample], Awaitable[list[Finding]]] | None
    ) -> None:
        """Add a finding of the last sample, which becomes as small as possible."""
        small = None
        if run is not None and self._last and self.findings.is_new(self.engine, finding):
            small = await reduced(self._last, finding, run)
        self.findings.add(self.engine, self._last, finding, self.seed, small)

    async def _run_alone(self, sample: Sample) -> list[Finding]:
        """Run a sample with a process of its own, for one that ends the process."""
        return await run_alone(self.engine, sample)

    async def _close(self, session: Session) -> None:
        summary = self.summary
        summary.statuses += session.statuses
        summary.memory += session.memory
        try:
            state = await session.stage.latimer.command("state")
        except Died:
            state = {"turns": {}, "longest_ms": 0.0}
        summary.turns += Counter({int(step): count for step, count in state["turns"].items()})
        summary.longest = max(summary.longest, state["longest_ms"])
        await session.close()


async def run_alone(engine: str, sample: Sample, looks: bool = False) -> list[Finding]:
    """Run a sample with a process of its own, and return its findings.

    Args:
        looks: True to check the process afterwards.
    """
    session = Session(engine)
    await session.start()
    try:
        return await session.run(sample) + (await session.look() if looks else [])
    except Died as died:
        session.stuck = True
        return [session.death(died)]
    finally:
        await session.close()


def replay(path: Path) -> list[Finding]:
    """Run the sample of a file again, and check the process afterwards."""
    made = json.loads(path.read_text())
    engine = made.get("target") or made["targets"][0]
    return asyncio.run(run_alone(engine, from_json(made), looks=True))


def fuzz(
    engines: Sequence[str], minutes: float, seed: int, findings: Findings, most: int | None = None
) -> dict[str, Summary]:
    """Fuzz the engines in sequence, each for an equal share of the time."""
    summaries = {}
    for name in engines:
        end = time.monotonic() + minutes * 60 / len(engines)
        summaries[name] = Run(name, seed, findings, most).until(end)
    return summaries


def show(summaries: dict[str, Summary], findings: Findings) -> None:
    """Print the summaries as a table."""
    print("| engine | cases | answers | findings | longest turn | p99.9 | memory, MiB | restarts |")
    print("|---|--:|---|--:|--:|--:|--:|--:|")
    for name, one in summaries.items():
        statuses = ", ".join(f"{n} × {status}" for status, n in one.statuses.most_common())
        count = sum(n for (engine, _), n in findings.counts.items() if engine == name)
        memory = f"{one.memory[0]:.0f} → {one.memory[-1]:.0f}" if one.memory else ""
        print(
            f"| {name} | {one.samples} | {statuses} | {count} | {one.longest:.1f} ms | "
            f"{one.quantile(0.999):.2f} ms | {memory} | {one.restarts} |"
        )
    for (engine, signature), count in findings.counts.most_common():
        print(f"{count} × {engine}: {signature}")
