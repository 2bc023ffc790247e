"""The published verdicts on other servers, which reports show with a failure.

The file `tests/suite/publish.py` writes `peers.json` from the reports in docs/conformance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

# The verdict of each server, with its reason if it is not a pass, by check.
Peers: TypeAlias = Mapping[str, Mapping[str, str]]
# The characters of a reason that are kept.
REASON = 140


@cache
def published() -> Peers:
    """Return the verdicts on the servers of docs/conformance."""
    found: Peers = json.loads(files(__package__).joinpath("peers.json").read_text())
    return found


def alike(check: str) -> Mapping[str, str]:
    """Return the published verdicts on a check, each with the names of its servers."""
    found: dict[str, list[str]] = {}
    for name, words in published().get(check, {}).items():
        found.setdefault(words, []).append(name)
    return {words: "; ".join(names) for words, names in found.items()}


def collected(reports: Iterable[Mapping[str, Any]]) -> Peers:
    """Return the verdicts of reports."""
    found: dict[str, dict[str, str]] = {}
    for report in reports:
        for check in report["checks"]:
            reason = " ".join(check["detail"].split())[:REASON]
            words = f"{check['verdict']}: {reason}" if reason else check["verdict"]
            found.setdefault(check["id"], {})[report["name"]] = words
    return found


def render(peers: Peers) -> str:
    """Return the verdicts as the text of `peers.json`, with a line for each check."""
    lines = (f"{json.dumps(name)}: {json.dumps(found)}" for name, found in peers.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"
