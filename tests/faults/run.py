"""Run the cases: one line each, then a table of each class, and each violation in full.

    python tests/faults/run.py [--short] [--only CLASS] [--engine ENGINE] [--table FILE]

The exit code is 0 without violations, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from faults.case import ALL, Case
from faults.cases import CASES
from faults.stage import Stage
from faults.table import table
from faults.trial import Outcome, attempt


def chosen(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options select."""
    return [
        case
        for case in CASES
        if (case.short or not options.short)
        and (not options.only or options.only in case.kind)
        and (not options.name or options.name in case.name)
    ]


async def run(options: argparse.Namespace) -> list[Outcome]:
    """Run the selected cases on each engine, and print a line for each."""
    outcomes = []
    cases = chosen(options)
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM also ends the processes that this one has started.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    for engine in options.engine or ALL:
        own = [case for case in cases if engine in case.engines]
        if not own:
            continue
        stage = Stage(engine)
        await stage.start()
        try:
            for case in own:
                outcome = await attempt(stage, case)
                outcomes.append(outcome)
                verdict = f"{len(outcome.violations)} VIOLATED" if outcome.violations else "held"
                line = f"{outcome.seconds:6.2f} s  {engine:12}  {case.kind:12}  {case.name}"
                print(f"{line}: {verdict}", flush=True)
                for note in outcome.notes:
                    print(f"          {note}", flush=True)
                for violation in outcome.violations if options.verbose else ():
                    print(f"          {violation}", flush=True)
        finally:
            await stage.stop()
    return outcomes


def main() -> int:
    """Run what the command line selects, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true", help="the short form, under a minute")
    parser.add_argument("--only", metavar="CLASS", help="cases of a class, by a part of its name")
    parser.add_argument("--name", help="cases by a part of their names")
    parser.add_argument("--engine", choices=ALL, action="append")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table to a file, too")
    parser.add_argument("--verbose", action="store_true", help="violations as they are seen")
    options = parser.parse_args()
    start = time.monotonic()
    outcomes = asyncio.run(run(options))
    text = table(outcomes, time.monotonic() - start)
    print(text)
    if options.table is not None:
        options.table.write_text(text)
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
