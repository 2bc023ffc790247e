"""Run a command that compiles, and show how far it is: `python progress.py LOG COMMAND ...`.

It needs nothing but Python: `make serve ENGINE=in-process` runs it before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

# The lines of Ninja, `[12/345] ...`, and of Make, `[  3%] ...`.
STEP = re.compile(r"\s*\[(?:(?P<done>\d+)/(?P<all>\d+)|\s*(?P<percent>\d+)%)\]")
# The least percents between two lines, and the last lines of a command that fails.
EACH, LAST = 5, 40


def percent_of(line: str) -> int | None:
    """Return the percents that a line of a compilation reports, or None."""
    found = STEP.match(line)
    if found is None:
        return None
    if found["percent"]:
        return int(found["percent"])
    return 100 * int(found["done"]) // max(int(found["all"]), 1)


def run(log: Path, words: list[str]) -> int:
    """Run a command, write its output to a log, show its progress, and return its exit code."""
    start, shown = time.monotonic(), 0
    with (
        log.open("w") as output,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.write(line)
            percent = percent_of(line)
            if percent is not None and percent >= shown + EACH:
                shown = percent
                print(f"    {percent:3} % after {time.monotonic() - start:.0f} s", flush=True)
    code = process.returncode
    if code:
        print("".join(log.read_text().splitlines(keepends=True)[-LAST:]), end="")
        print(f"    The whole output is in {log}.")
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
