"""The longest iteration of the event loop for each large request, on each engine.

    python tests/benchmarks/event_loop.py

Times are milliseconds of the loop's own thread, during which all other streams wait.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2
from latimer.adapter import OpenAIAdapter
from support.large import ENGINES, LARGE, seeing
from support.turns import measured


def longest_turns(engine: str) -> dict[str, str]:
    """Return each request's longest iteration the first and the second time, and its status."""
    found = {}
    with tempfile.TemporaryDirectory() as directory, seeing(engine, Path(directory)) as backend:
        app = OpenAIAdapter(backend, any_model=True)
        headers = {"content-type": "application/json"}
        with (
            measured(lambda: app) as (address, loop),
            httpx2.Client(base_url=address, timeout=300, headers=headers) as client,
        ):
            for name, make in LARGE.items():
                path, body = make()
                turns = []
                for _ in range(2):
                    loop.longest = 0.0
                    status = client.post(path, content=body).status_code
                    turns.append(f"{loop.longest * 1000:.1f}")
                found[name] = f"{' / '.join(turns)} ({status})"
    return found


def main() -> None:
    """Print a table of all engines."""
    columns = {engine: longest_turns(engine) for engine in ENGINES}
    print(f"| ms, first time / second (status) | {' | '.join(ENGINES)} |")
    print("|---|" + "--:|" * len(ENGINES))
    for name in LARGE:
        print(f"| {name} | {' | '.join(columns[engine][name] for engine in ENGINES)} |")


if __name__ == "__main__":
    main()
