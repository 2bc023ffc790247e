"""The JSON report, for programs. `schema` increases when a field changes its meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..profiles import PROFILES, works
from .run import Run

SCHEMA = 1


def render(run: Run) -> str:
    """Return the run as JSON."""
    return json.dumps(_document(run), ensure_ascii=False, indent=1) + "\n"


def _document(run: Run) -> Mapping[str, Any]:
    return {
        "schema": SCHEMA,
        "name": run.name,
        "url": run.url,
        "model": run.model,
        "date": run.date,
        "counts": dict(run.counts),
        "profiles": {name: works(name, run.verdicts)[0] for name in PROFILES},
        "checks": [
            {
                "id": verdict.check.id,
                "level": verdict.check.level,
                "promise": verdict.check.promise,
                "source": verdict.check.source,
                "verdict": verdict.outcome,
                "detail": verdict.detail,
                "note": run.note(verdict),
                "runs": verdict.runs,
                "passes": verdict.passes,
                "seconds": round(verdict.seconds, 3),
            }
            for verdict in run.verdicts
        ],
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one line for each check whose verdict differs between two reports."""
    first = {check["id"]: check for check in before["checks"]}
    second = {check["id"]: check for check in after["checks"]}
    lines = []
    for name in sorted(first.keys() | second.keys()):
        one, other = (side.get(name, {}).get("verdict", "absent") for side in (first, second))
        if one != other:
            detail = second.get(name, {}).get("detail", "")
            lines.append(f"{name}: {one} -> {other}" + (f" ({detail[:120]})" if detail else ""))
    return lines
