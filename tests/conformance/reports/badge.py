"""A badge with the number of `must` checks that pass."""

from __future__ import annotations

from .run import Run


def render(run: Run) -> str:
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
