"""A Markdown table of the cases and their results."""

from __future__ import annotations

from collections.abc import Sequence

from faults.trial import Outcome


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return a table of each class and engine, and each violation in full."""
    lines = [
        "| class | engine | tried | held | violated | violations |",
        "|---|---|--:|--:|--:|--:|",
    ]
    groups = sorted({(outcome.case.kind, outcome.engine) for outcome in outcomes}, key=_order)
    for kind, engine in groups:
        own = [one for one in outcomes if (one.case.kind, one.engine) == (kind, engine)]
        lines.append(f"| {kind} | {engine} | {_counts(own)} |")
    lines += [f"| **all** | | {_counts(outcomes)} |", "", f"{seconds:.0f} s in all.", ""]
    lines += [
        f"- {one.case.kind}, {one.case.name}: {note}" for one in outcomes for note in one.notes
    ]
    seen = [row for outcome in outcomes for row in outcome.seen]
    if seen:
        lines += ["", "## What was seen while the store failed", ""]
        lines.append("| fault | chat with `store: true` | reads | `/health` | log | afterwards |")
        lines += ["|---|---|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in seen), ""]
    violated = [outcome for outcome in outcomes if outcome.violations]
    if violated:
        lines += ["## Violations", ""]
    for outcome in violated:
        lines.append(f"- **{outcome.case.kind}, {outcome.case.name}** ({outcome.engine})")
        lines += [f"  - {one}" for one in outcome.violations]
    return "\n".join(lines) + "\n"


def _order(group: tuple[str, str]) -> tuple[int, str, str]:
    number = group[0].split()[0]
    return (int(number) if number.isdigit() else 99, *group)


def _counts(outcomes: Sequence[Outcome]) -> str:
    violated = sum(bool(outcome.violations) for outcome in outcomes)
    violations = sum(len(outcome.violations) for outcome in outcomes)
    return f"{len(outcomes)} | {len(outcomes) - violated} | {violated} | {violations}"
