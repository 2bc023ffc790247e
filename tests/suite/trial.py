"""Faults before the judge, several at once: processes with a server each."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import sys
from collections.abc import Sequence

from latimer.conformance import runner
from latimer.conformance.check import Check, Verdict, all_checks
from latimer.conformance.runner import Settings, judge
from suite.faults import FAULTS
from suite.server import Fault, Server
from support.servers import serving

# What takes seconds, or measures them, judges only the faults that it is there for.
SLOW = {
    "streaming.disconnect": ("stays-after-disconnect",),
    "streaming.first-chunk": ("waits-till-the-end",),
}
_server = Server()
_address: list[str] = []


def start() -> None:
    """Serve the right server, for as long as this process lives."""
    logging.disable(logging.CRITICAL)
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    _address.append(stack.enter_context(serving(lambda: _server)))


def judged(name: str | None) -> Sequence[Verdict]:
    """The verdicts on the server with a fault; on the right one where there is no name."""
    _server.fault = Fault() if name is None else FAULTS[name]
    runner.TRIES = 3 if name is None else 1
    url = f"{_address[0]}/v1"
    code = f"import urllib.request as u; u.urlopen('{url}/break', data=b'')"
    command = f'{sys.executable} -c "{code}"'
    settings = Settings(url, "org/toy", key="sk-right", hint="demo", breaks=command)
    checks = [check for check in all_checks() if _for(check, name)]
    return asyncio.run(judge(settings, checks))


def complaints() -> list[str]:
    """What is said against the right server."""
    return [f"{v.check.id} {v.outcome}: {v.detail}" for v in judged(None) if v.outcome != "pass"]


def failed(name: str) -> list[str]:
    """The ids of the checks that a fault fails, sorted."""
    return sorted(verdict.check.id for verdict in judged(name) if verdict.outcome != "pass")


def _for(check: Check, name: str | None) -> bool:
    if name is None:
        return True
    if check.group == "engine":
        return name.startswith("break-")
    return name in SLOW.get(check.id, (name,))


def main() -> None:
    """Print what a fault fails, and how: `python -m suite.trial FAULT …`, for those who add one."""
    start()
    for name in sys.argv[1:]:
        sys.stdout.write(f"{name}\n")
        for verdict in judged(name):
            if verdict.outcome != "pass":
                sys.stdout.write(f"  {verdict.check.id} {verdict.outcome}: {verdict.detail}\n")


if __name__ == "__main__":
    main()
