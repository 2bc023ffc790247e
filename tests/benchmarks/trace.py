"""Print what a step of the in-process engine consists of, from a trace of `latimer serve --trace`.

    python tests/benchmarks/trace.py trace.json [--sequences 8]

Each row is the mean of a span in the steps that decode one token for each of so many sequences: its
duration, the CPU time of its thread, and what the event loop's thread used meanwhile. The rest of a
decode's duration is waiting for llama.cpp's other threads and for a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("between steps", "admit and fill", "decode", "sample", "hand over")


def steps_of(text: str) -> Iterator[dict[str, Any]]:
    """Yield the spans of each complete step, by name."""
    # A process that was killed leaves the list open, or an empty file.
    text = text or "["
    events = json.loads(text.rstrip().rstrip(",").removesuffix("]").rstrip().rstrip(",") + "]")
    step: dict[str, Any] = {}
    for event in events:
        if event.get("name") == NAMES[0]:
            step = {}
        if event.get("name") in NAMES:
            step[event["name"]] = event
        if event.get("name") == NAMES[-1] and len(step) == len(NAMES):
            yield step


def table(text: str, sequences: int) -> str:
    """Return a table of means in milliseconds."""
    found = [
        step
        for step in steps_of(text)
        if step["decode"]["args"]["sequences"] == step["decode"]["args"]["tokens"] == sequences
    ]
    if not found:
        return f"no step of the trace decodes {sequences} sequences\n"
    lines = [f"| {len(found)} steps | ms | CPU, ms | event loop, ms |", "|---|--:|--:|--:|"]
    whole = [0.0, 0.0, 0.0]
    for name in NAMES:
        spans = [step[name] for step in found]
        means = (
            statistics.mean(span["dur"] for span in spans) / 1000,
            statistics.mean(span["args"]["cpu_us"] for span in spans) / 1000,
            statistics.mean(span["args"]["event_loop_cpu_us"] for span in spans) / 1000,
        )
        whole = [one + other for one, other in zip(whole, means, strict=True)]
        lines.append(f"| {name} | {' | '.join(f'{mean:.2f}' for mean in means)} |")
    lines.append(f"| all | {' | '.join(f'{mean:.2f}' for mean in whole)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    given = parser.parse_args()
    sys.stdout.write(table(given.file.read_text(), given.sequences))
