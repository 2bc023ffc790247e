"""The Markdown report, for repositories."""

from __future__ import annotations

from ..profiles import PROFILES, works
from .run import OUTCOMES, Run


def render(run: Run) -> str:
    """Return the run as Markdown."""
    lines = [
        f"# {run.name}",
        "",
        f"Tested on {run.date}: {len(run.verdicts)} checks, "
        + ", ".join(f"{run.counts[o]} {o}" for o in OUTCOMES if run.counts[o])
        + ".",
        "",
        "| group | " + " | ".join(OUTCOMES) + " |",
        "|---|" + "--:|" * len(OUTCOMES),
    ]
    for group, verdicts in run.groups().items():
        counts = [sum(v.outcome == outcome for v in verdicts) for outcome in OUTCOMES]
        lines.append(f"| {group} | " + " | ".join(str(n) if n else "" for n in counts) + " |")
    lines += ["", "| client | result |", "|---|---|"]
    for name in PROFILES:
        word, broken = works(name, run.verdicts)
        ids = ", ".join(f"`{one.check.id}`" for one in broken[:8])
        more = f" and {len(broken) - 8} more" if len(broken) > 8 else ""
        lines.append(f"| {name} | {word}{': ' if ids else ''}{ids}{more} |")
    others = [verdict for verdict in run.verdicts if verdict.outcome != "pass"]
    if others:
        lines += ["", "| check | level | verdict | reason |", "|---|---|---|---|"]
    for verdict in others:
        note = run.note(verdict)
        reason = _cell(verdict.detail) + (f" **{_cell(note)}**" if note else "")
        lines.append(
            f"| `{verdict.check.id}` | {verdict.check.level} | {verdict.outcome} | {reason} |"
        )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text[:300].split()).replace("|", "\\|").replace("<", "&lt;")
