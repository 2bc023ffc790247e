"""The JSON report, which other runs and programs read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel, Field

from ..check import Level, Outcome
from ..profiles import PROFILES, works
from .run import Run


class CheckReport(BaseModel):
    """The verdict on one check."""

    id: str = Field(description="`group.name`, stable across versions.")
    level: Level = Field(description="must: clients break without it.")
    promise: str
    source: str = Field(description="The section of the contract, with the mark of its origin.")
    verdict: Outcome
    detail: str = Field(description="What was expected and what came; empty for a pass.")
    note: str = Field(description="The explanation that `--notes` has; empty without one.")
    runs: int = Field(ge=0, description="0 if the run ended before the check did.")
    passes: int = Field(ge=0)
    seconds: float = Field(ge=0, description="The duration of the last run.")

    @property
    def is_broken(self) -> bool:
        """True if a client that depends on the promise can break."""
        return self.verdict in ("fail", "flaky", "timeout")


class Report(BaseModel):
    """A run of `latimer conform` against one server."""

    # Keys are only added within a version.
    version: int = Field(1, alias="schema", ge=1, le=1, description="The version of this schema.")
    name: str = Field(description="The name of the server, with its version.")
    url: str
    model: str = Field(description="The model that requests named.")
    date: str = Field(description="The day of the run, such as 2026-01-31.")
    counts: Mapping[Outcome, int] = Field(description="The number of checks with each verdict.")
    profiles: Mapping[str, str] = Field(description="How well each client works.")
    checks: list[CheckReport]

    def of(self, ids: Collection[str]) -> Report:
        """Return the report with some checks only."""
        return self.model_copy(update={"checks": [one for one in self.checks if one.id in ids]})


def document(run: Run) -> Report:
    """Return the report of a run."""
    return Report(
        schema=1,
        name=run.name,
        url=run.url,
        model=run.model,
        date=run.date,
        counts=dict(run.counts),
        profiles={name: works(name, run.verdicts)[0] for name in PROFILES},
        checks=[
            CheckReport(
                id=verdict.check.id,
                level=verdict.check.level,
                promise=verdict.check.promise,
                source=verdict.check.source,
                verdict=verdict.outcome,
                detail=verdict.detail,
                note=run.note(verdict),
                runs=verdict.runs,
                passes=verdict.passes,
                seconds=round(verdict.seconds, 3),
            )
            for verdict in run.verdicts
        ],
    )


def render_json(run: Run) -> str:
    """Return the run as JSON."""
    return document(run).model_dump_json(by_alias=True, indent=1) + "\n"


def schema() -> dict[str, Any]:
    """Return the JSON schema of the report."""
    found = Report.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def changes(before: Report, after: Report) -> list[str]:
    """Return one line for each check whose verdict differs between two reports."""
    first = {check.id: check for check in before.checks}
    second = {check.id: check for check in after.checks}
    lines = []
    for name in sorted(first.keys() | second.keys()):
        one, other = (side[name].verdict if name in side else "absent" for side in (first, second))
        if one != other:
            detail = second[name].detail[:120] if name in second else ""
            lines.append(f"{name}: {one} -> {other}" + (f" ({detail})" if detail else ""))
    return lines
