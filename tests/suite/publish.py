"""Reports on servers in `docs/conformance/`, and what follows from all of them.

    python tests/suite/publish.py

The command writes the grid, the pages of servers, and the verdicts on peers again from the reports
and the remarks. `peers.py` judges the servers.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from latimer.conformance import peers  # noqa: E402
from latimer.conformance.check import Verdict  # noqa: E402
from latimer.conformance.reports import write  # noqa: E402
from latimer.conformance.reports.run import Run  # noqa: E402
from suite import deviation, pages  # noqa: E402

FOLDER = ROOT / "docs" / "conformance"
PEERS = ROOT / "tests" / "conformance" / "peers.json"
FORMATS = (".json", ".md", ".html", ".svg")


def version(package: str) -> str:
    """Return the version of an installed package."""
    return importlib.metadata.version(package)


def publish(
    slug: str,
    name: str,
    model: str,
    verdicts: Sequence[Verdict],
    like: str = "",
    private: Sequence[str] = (),
) -> None:
    """Write the reports on a server.

    Args:
        like: the server whose notes apply, too, after its own; last come the common ones.
        private: more paths of this machine that must not be in them.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    run = Run(
        name,
        "http://127.0.0.1/v1",
        model,
        today,
        verdicts,
        notes=explained(verdicts, (slug, like, "common")),
    )
    for suffix in FORMATS:
        path = FOLDER / f"{slug}{suffix}"
        write(run, path)
        path.write_text(_without_paths(path.read_text(), (str(ROOT), sys.prefix, *private)))
    sys.stdout.write(f"{name}: {dict(run.counts)}\n")


def explained(verdicts: Sequence[Verdict], files: Sequence[str]) -> dict[str, str]:
    """Return the notes on verdicts, by check.

    A key of a file of notes has patterns of checks, or between slashes a regular expression for the
    reason. The first match counts.
    """
    rows: list[tuple[str, str]] = []
    for name in files:
        path = FOLDER / "notes" / f"{name}.json"
        rows += json.loads(path.read_text()).items() if path.exists() else ()
    found = ((one.check.id, next(_matching(one, rows), "")) for one in verdicts)
    return {name: note for name, note in found if note}


def _matching(verdict: Verdict, rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    for key, note in rows:
        if key.startswith("/"):
            if verdict.broken and re.search(key[1:-1], verdict.detail):
                yield note
        elif any(fnmatchcase(verdict.check.id, one) for one in key.split()):
            yield note


def _without_paths(text: str, private: Sequence[str]) -> str:
    """Remove the paths of this machine from the tracebacks in replies, which may be cut off."""
    for path in private:
        text = text.replace(path, "")
    return re.sub(r'(File \\*(?:"|&quot;))/[^"&\\<\n]*?(?=site-packages|["&\\<\n]| …)', r"\1", text)


def cell(counts: Counter[str]) -> tuple[str, str]:
    """Return the text and the colour of a group: the number of passes among the judged checks.

    The colour runs from red to green by the share of supported checks that pass. It is blue if none
    is broken and most are unsupported, and grey if none could be judged.
    """
    broken = sum(counts[outcome] for outcome in ("fail", "flaky", "timeout"))
    judged = counts["pass"] + broken + counts["unsupported"]
    if not judged:
        return "–", "#777"
    text = f"{counts['pass']}/{judged}"
    if not broken and counts["unsupported"] > counts["pass"]:
        return text, "#4a6f9c"
    share = counts["pass"] / (counts["pass"] + broken)
    return text, f"hsl({share * 125:.0f} 60% {42 - 6 * share:.0f}%)"


def grid() -> None:
    """Write what follows from the reports.

    That is the picture, the pages of servers, and the verdicts that `latimer conform` shows with a
    failure.
    """
    reports = pages.published()
    PEERS.write_text(peers.render(peers.collected(reports)))
    pages.write()
    (FOLDER / "grid.svg").write_text(picture(reports))


def picture(reports: Sequence[dict[str, Any]]) -> str:
    """Return a picture: a row for each server, and a column for each group and for the numbers."""
    ids = [check["id"] for report in reports for check in report["checks"]]
    groups = list(dict.fromkeys(name.partition(".")[0] for name in ids))
    known = deviation.published()
    width, left, top = 52, 330, 96
    heads = [*groups, "logprob error, mean", "logprob error, largest", "date"]
    parts = []
    for column, head in enumerate(heads):
        x = left + column * width + width / 2
        parts.append(f'<text transform="translate({x:.0f} {top - 8}) rotate(-40)">{head}</text>')
    for row, report in enumerate(reports):
        y = top + row * 30
        parts.append(f'<text x="0" y="{y + 19}">{report["name"]}</text>')
        x = left + (len(heads) - 1) * width
        parts.append(f'<text x="{x}" y="{y + 19}">{report["date"]}</text>')
        for column, (text, colour) in enumerate(_cells(report, groups, known)):
            x = left + column * width
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width - 3}" height="26" rx="3" fill="{colour}"/>'
                f'<text x="{x + width / 2 - 1.5:.1f}" y="{y + 18}" fill="#fff" '
                f'text-anchor="middle">{text}</text>'
            )
    size = (left + len(heads) * width + 110, top + len(reports) * 30 + 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="system-ui,sans-serif" font-size="13"><style>text{fill:#222}'
        "rect+text{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>"
        + "".join(parts)
        + "</svg>\n"
    )


def _cells(
    report: dict[str, Any], groups: Sequence[str], known: dict[str, deviation.Numbers]
) -> list[tuple[str, str]]:
    """Return the text and the colour of a row's cells."""
    cells = []
    for group in groups:
        checks = [one for one in report["checks"] if one["id"].partition(".")[0] == group]
        cells.append(cell(Counter(one["verdict"] for one in checks)))
    found = known.get(report["slug"])
    if found and found.chosen:
        values = (found.chosen.mean, found.chosen.largest)
        cells += [(f"{value:.0e}", "#777") for value in values]
    return cells


if __name__ == "__main__":
    grid()
