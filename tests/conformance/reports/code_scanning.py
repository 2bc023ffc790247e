"""Reports for code scanning and for the log of a CI run: SARIF, and GitHub's annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ..check import Level, Verdict
from .explanation import origin
from .run import Run

# SARIF's words for the levels of checks (SARIF 2.1.0, 3.27.10).
_LEVELS: dict[Level, str] = {"must": "error", "should": "warning", "may": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def render_sarif(run: Run) -> str:
    """Return the run as SARIF 2.1.0: a rule for each check, and a result for each broken one."""
    rules = [
        {
            "id": verdict.check.id,
            "shortDescription": {"text": verdict.check.promise},
            "help": {"text": f"From {origin(verdict.check)}"},
            "defaultConfiguration": {"level": _LEVELS[verdict.check.level]},
        }
        for verdict in run.verdicts
    ]
    driver = {"name": "latimer conform", "rules": rules}
    results = [_result(run, verdict) for verdict in run.verdicts if verdict.broken]
    document = {
        "$schema": _SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "invocations": [{"executionSuccessful": not run.left}],
                "results": results,
            }
        ],
    }
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def _result(run: Run, verdict: Verdict) -> dict[str, Any]:
    check = verdict.check
    # A result needs a place. The endpoint is the only one that a server without sources has.
    path = verdict.exchanges[-1].path.lstrip("/") if verdict.exchanges else check.group
    return {
        "ruleId": check.id,
        "level": _LEVELS[check.level],
        "message": {"text": f"{check.promise} {verdict.outcome}: {verdict.detail}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": path.partition("?")[0]},
                    "region": {"startLine": 1},
                },
                "logicalLocations": [{"fullyQualifiedName": f"{run.name}: {check.id}"}],
            }
        ],
        "partialFingerprints": {"check": check.id},
    }


def workflow_commands(run: Run) -> Iterator[str]:
    """Yield a workflow command of GitHub for each check that is newly broken.

    A `must` check is an error, any other one a warning. GitHub shows ten of each.
    """
    for verdict in run.new:
        kind = "error" if verdict.check.level == "must" else "warning"
        title = _escaped(verdict.check.id).replace(":", "%3A").replace(",", "%2C")
        yield f"::{kind} title={title}::{_escaped(f'{verdict.check.promise} {verdict.detail}')}"


def _escaped(text: str) -> str:
    """Return text without the characters that end a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
