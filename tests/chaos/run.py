"""Faults of clients, engines and stores against live processes; the exit code is 1 with findings.

    python tests/chaos/run.py faults [--short] [--only CLASS] [--name NAME] [--table FILE]
    python tests/chaos/run.py fuzz [--minutes 30] [--seed N] [--findings FOLDER] [--replay FILE]
    python tests/chaos/run.py soak [--minutes 30] [--seed N]
    python tests/chaos/run.py cancels [--koboldcpp URL] [--minutes 10] [--seed N]
    python tests/chaos/run.py fleet [--requests 10000] [--seed N]

`faults` runs each case once: a line each, then a table of each class, and each violation in full.
`fuzz` runs random samples; each finding is a file that `--replay` runs again. `soak` serves at 80 %
of capacity with random faults. Each takes `--engine NAME`, and the engines share the minutes.
`cancels` cancels requests over a running koboldcpp, or over its double, and checks all others.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from chaos import cancels, fleet, fuzz, once, soak


async def run_once(options: argparse.Namespace) -> list[once.Outcome]:
    """Run the selected cases, and print a line for each."""
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM also ends the processes that this one has started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    outcomes = []
    chosen = {"short": options.short, "kind": options.only, "name": options.name}
    async for outcome in once.run(options.engine, **chosen):
        outcomes.append(outcome)
        case, wrong = outcome.case, outcome.violations
        verdict = f"{len(wrong)} VIOLATED" if wrong else "held"
        line = f"{outcome.seconds:6.2f} s  {outcome.engine:17}  {case.kind:12}  {case.name}"
        print(f"{line}: {verdict}", flush=True)
        for note in outcome.notes + (wrong if options.verbose else []):
            print(f"          {note}", flush=True)
    return outcomes


def run_faults(options: argparse.Namespace) -> bool:
    """Run each case once, and return True with violations."""
    start = time.monotonic()
    outcomes = asyncio.run(run_once(options))
    text = once.table(outcomes, time.monotonic() - start)
    print(text)
    if options.table is not None:
        options.table.write_text(text)
    return any(outcome.violations for outcome in outcomes)


def run_fuzz(options: argparse.Namespace) -> bool:
    """Run random samples, or one again, and return True with findings."""
    if options.replay is not None:
        found = fuzz.replay(options.replay)
        for one in found:
            print(one.kind, one.what, one.details, sep="\n")
        return bool(found)
    folder = options.findings or Path(tempfile.mkdtemp(prefix="latimer-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Seed {options.seed}; findings go to {folder}", flush=True)
    findings = fuzz.Findings(folder)
    fuzz.show(fuzz.fuzz(options.engine, options.minutes, options.seed, findings), findings)
    return bool(findings.counts)


def run_soak(options: argparse.Namespace) -> bool:
    """Soak each engine, and return True with failures."""
    print(f"Seed {options.seed}", flush=True)
    minutes = options.minutes / len(options.engine)
    wrong = [
        f"{name}: {one}"
        for name in options.engine
        for one in asyncio.run(soak.soak(name, minutes, options.seed))
    ]
    for one in wrong[:50]:
        print(one[:1_000])
    return bool(wrong)


def run_cancels(options: argparse.Namespace) -> bool:
    """Cancel requests over koboldcpp, and return True with failures."""
    print(f"Seed {options.seed}", flush=True)
    return bool(asyncio.run(cancels.cancels(options.koboldcpp, options.minutes, options.seed)))


def run_fleet(options: argparse.Namespace) -> bool:
    """Run a fleet under load with troubled engines, and return True with violations."""
    print(f"Seed {options.seed}", flush=True)
    report = asyncio.run(fleet.fleet(options.requests, options.seed))
    print(report.table())
    return bool(report.wrong)


def main() -> int:
    """Run what the command line selects, and return the exit code."""
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True)
    for run, engines in ((run_faults, once.WORDS), (run_fuzz, fuzz.WORDS), (run_soak, soak.WORDS)):
        command = commands.add_parser(run.__name__.removeprefix("run_"), help=run.__doc__)
        command.set_defaults(run=run, engines=engines)
        command.add_argument("--engine", choices=engines, action="append")
        if run is run_faults:
            command.add_argument("--short", action="store_true", help="a form under a minute")
            command.add_argument("--only", default="", help="cases by a part of their class")
            command.add_argument("--name", default="", help="cases by a part of their names")
            command.add_argument("--table", type=Path, help="write the table to a file, too")
            command.add_argument("--verbose", action="store_true", help="violations as seen")
            continue
        command.add_argument("--minutes", type=float, default=30)
        command.add_argument("--seed", type=int, default=random.randrange(10**6))
        if run is run_fuzz:
            command.add_argument("--findings", type=Path, help="the folder for findings")
            command.add_argument("--replay", type=Path, help="a finding to run again")
    command = commands.add_parser("cancels", help=run_cancels.__doc__)
    command.set_defaults(run=run_cancels, engine=[], engines=())
    command.add_argument("--koboldcpp", metavar="URL", help="the double without it")
    command.add_argument("--minutes", type=float, default=10)
    command.add_argument("--seed", type=int, default=random.randrange(10**6))
    command = commands.add_parser("fleet", help=run_fleet.__doc__)
    command.set_defaults(run=run_fleet, engines=(), engine=None)
    command.add_argument("--requests", type=int, default=10_000)
    command.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    options.engine = options.engine or list(options.engines)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
