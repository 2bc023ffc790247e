"""Reports for repositories and CI systems: Markdown, JUnit XML, and a badge."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from ..profiles import PROFILES, causes, works
from .explanation import explanation
from .run import OUTCOMES, Run


def render_markdown(run: Run) -> str:
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
        result, wrong = works(name, run.verdicts)
        named = causes(result, wrong, [f"`{one.check.id}`" for one in wrong[:8]])
        lines.append(f"| {name} | {result}{': ' if wrong else ''}{named} |")
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


# Characters that XML 1.0 does not allow.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(run: Run) -> str:
    """Return the run as JUnit XML.

    A broken `must` check is a failure, with what its author needs. Any other check that did not
    pass is skipped, with its reason.
    """
    failed = len(run.broken_musts)
    skipped = len(run.verdicts) - failed - run.counts["pass"]
    total = sum(verdict.seconds for verdict in run.verdicts)
    counts = (
        f'tests="{len(run.verdicts)}" failures="{failed}" errors="0" skipped="{skipped}" '
        f'time="{total:.3f}"'
    )
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<testsuites name="latimer conform" {counts}>',
        f"<testsuite name={quoteattr(run.name)} {counts} "
        f"timestamp={quoteattr(f'{run.date}T00:00:00')}>",
    ]
    for verdict in run.verdicts:
        check = verdict.check
        head = (
            f"  <testcase classname={quoteattr(check.group)} name={quoteattr(check.id)} "
            f'time="{verdict.seconds:.3f}"'
        )
        reason = quoteattr(_allowed(f"{verdict.outcome}: {verdict.detail}"))
        if verdict.outcome == "pass":
            lines.append(head + "/>")
        elif verdict.broken and check.level == "must":
            text = escape(_allowed(explanation(run, verdict)))
            lines.append(f"{head}><failure message={reason}>{text}</failure></testcase>")
        else:
            lines.append(f"{head}><skipped message={reason}/></testcase>")
    return "\n".join([*lines, "</testsuite>", "</testsuites>"]) + "\n"


def _allowed(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)


def render_badge(run: Run) -> str:
    """Return the badge as SVG."""
    musts = [verdict for verdict in run.verdicts if verdict.check.level == "must"]
    passed = sum(verdict.outcome == "pass" for verdict in musts)
    broken = len(run.broken_musts)
    colour = "#2e7d32" if not broken else "#b71c1c" if broken > len(musts) // 10 else "#b26a00"
    left, right = "OpenAI conformance", f"{passed} of {len(musts)}"
    first, second = 6.6 * len(left) + 12, 6.6 * len(right) + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{first + second:.0f}" height="20" '
        f'role="img" aria-label="{left}: {right} must checks pass">'
        f'<rect width="{first:.0f}" height="20" fill="#555"/>'
        f'<rect x="{first:.0f}" width="{second:.0f}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" '
        'text-anchor="middle">'
        f'<text x="{first / 2:.0f}" y="14">{left}</text>'
        f'<text x="{first + second / 2:.0f}" y="14">{right}</text></g></svg>\n'
    )
