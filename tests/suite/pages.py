"""The pages of servers: what fails, by group and cause, what that means, and where it is reported.

They are generated from the published reports, the contract, the numbers, and `remarks.toml`, which
has what no report says: what a failure means for users, and the issues of the server's project.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from latimer.conformance.profiles import FAILS, PROFILES
from pydantic import BaseModel, ConfigDict, Field
from suite import deviation
from website import grid
from website.reference import llms

FOLDER = Path(__file__).parent.parent.parent / "docs" / "conformance"
SERVERS = FOLDER / "servers"
REMARKS = SERVERS / "remarks.toml"
README = FOLDER / "README.md"
NAVIGATION = FOLDER.parent.parent / "zensical.toml"
BROKEN = ("fail", "flaky", "timeout")
# The checks of a row that are named; the report has all.
NAMED = 8


class Issue(BaseModel):
    """An issue or pull request of a server's own project."""

    model_config = ConfigDict(extra="forbid")
    checks: str = Field(description="Patterns of the checks that it explains.")
    url: str
    title: str


class Server(BaseModel):
    """Facts about a server that its report does not have."""

    model_config = ConfigDict(extra="forbid")
    title: str
    setup: str = Field(description="How it was installed and started.")
    summary: list[str] = Field(default_factory=list, description="Paragraphs.")
    means: dict[str, str] = Field(default_factory=dict, description="By patterns of checks.")
    issues: list[Issue] = Field(default_factory=list)


class Remarks(BaseModel):
    """All remarks; `means` applies to every server, and the first match counts."""

    model_config = ConfigDict(extra="forbid")
    means: dict[str, str]
    servers: dict[str, Server]


class Cause(NamedTuple):
    """Broken checks of one group that have one cause."""

    group: str
    note: str
    checks: Sequence[Mapping[str, Any]]


def published() -> list[dict[str, Any]]:
    """Return the published reports with their file names, that with the most passes first."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
    reports = [{**one, "slug": slug} for slug, one in found.items() if "checks" in one]
    return sorted(reports, key=lambda report: -report["counts"].get("pass", 0))


def remarks() -> Remarks:
    """Return the remarks."""
    return Remarks.model_validate(tomllib.loads(REMARKS.read_text()))


def promises() -> dict[str, str]:
    """Return the promise of the contract that each check stands for."""
    found: dict[str, str] = {}
    for line in (FOLDER / "contract.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        # The table of error rates has two columns.
        if line.startswith("| ") and len(cells) == 4:
            promise, ids = cells[2:]
            for one in re.findall("`(.+?)`", ids):
                found.setdefault(one, promise)
    return found


def rendered() -> dict[str, str]:
    """Return the text of each page, by the file name of the server's report."""
    known, contract, measured = remarks(), promises(), deviation.published()
    return {
        report["slug"]: page(report, known, contract, measured.get(report["slug"]))
        for report in published()
        if report["slug"] in known.servers
    }


def written() -> dict[Path, str]:
    """Return the text of each file that follows from the reports, apart from the picture."""
    files = {SERVERS / f"{slug}.md": text for slug, text in rendered().items()}
    files[README] = _between(
        _between(README.read_text(), "<!-- {}numbers -->", table()), "<!-- {}reports -->", reports()
    )
    files[NAVIGATION] = _between(NAVIGATION.read_text(), "    # {}reports", navigation())
    return files


def write() -> None:
    """Write the pages, the tables in the README, the navigation, and the list of all pages."""
    for path, text in written().items():
        path.write_text(text)
    (FOLDER.parent / "llms.txt").write_text(llms())


def _between(text: str, mark: str, new: str) -> str:
    """Return a text with other lines between two marks."""
    first, last = (re.escape(mark.format(end)) for end in ("", "/"))
    pattern = re.compile(rf"(?<={first}\n).*?(?={last}\n)", re.DOTALL)
    assert pattern.search(text), mark
    return pattern.sub(lambda _: new, text)


def reports() -> str:
    """Return the table of reports, with the pages of servers."""
    lines = ["| server | report | failures |", "|---|---|---|"]
    names = {report["slug"]: report["name"] for report in published()}
    for slug in (slug for slug in grid.HEADS if slug in names):
        files = ", ".join(
            f"[{word}]({slug}.{suffix})"
            for word, suffix in (("page", "html"), ("text", "md"), ("JSON", "json"))
        )
        has_page = slug in remarks().servers
        failures = f"[what they mean](servers/{slug}.md)" if has_page else "none"
        lines.append(f"| {names[slug]} | {files} | {failures} |")
    return "\n".join(lines) + "\n"


def navigation() -> str:
    """Return the lines of the site's navigation."""
    known = {report["slug"] for report in published()}
    slugs = [slug for slug in grid.HEADS if slug in known]
    servers = [slug for slug in slugs if slug in remarks().servers]
    lines = []
    for title, folder, listed in (("Reports", "", slugs), ("Failures", "servers/", servers)):
        rows = (
            f'      {{ "{grid.HEADS[slug]}" = "conformance/{folder}{slug}.md" }},'
            for slug in listed
        )
        lines += [f'    {{ "{title}" = [', *rows, "    ] },"]
    return "\n".join(lines) + "\n"


def page(
    report: Mapping[str, Any],
    known: Remarks,
    contract: Mapping[str, str],
    found: deviation.Numbers | None,
) -> str:
    """Return the page of a server."""
    slug = report["slug"]
    server = known.servers[slug]
    counts = ", ".join(f"{count} {outcome}" for outcome, count in report["counts"].items())
    lines = [
        f"# {server.title}: failures and their meaning",
        "",
        f"{report['name']}, tested on {report['date']} with {len(report['checks'])} checks: "
        f"{counts}. The [report](../{slug}.html) has each request and its response.",
        "",
        server.setup,
        "",
        *(line for paragraph in server.summary for line in (paragraph, "")),
        _numbers(found),
        "",
        "## Clients",
        "",
        "| client | result | broken checks | first causes |",
        "|---|---|--:|---|",
        *_clients(report),
        "",
        "## Failures",
        "",
        "A clause is a section of the [contract](../contract.md).",
        "",
    ]
    causes = [*_causes(report)]
    for group in dict.fromkeys(cause.group for cause in causes):
        lines += [
            f"### {group}",
            "",
            "| cause | meaning | clauses | checks |",
            "|---|---|---|---|",
        ]
        before = ""
        for cause in causes:
            if cause.group == group:
                meaning = _meanings(cause, server, known, contract)
                lines.append(_row(cause, meaning if meaning != before else "the same"))
                before = meaning
        lines.append("")
    return "\n".join([*lines, *_others(report)]).rstrip() + "\n"


def _clients(report: Mapping[str, Any]) -> Iterator[str]:
    broken = {check["id"]: check for check in report["checks"] if check["verdict"] in BROKEN}
    for client, result in report["profiles"].items():
        failed = [
            check
            for name, check in broken.items()
            if any(fnmatchcase(name, pattern) for pattern in PROFILES.get(client, ()))
        ]
        causes = [*dict.fromkeys(check["note"] for check in failed if check["level"] == "must")]
        if result == FAILS and not causes:
            causes = ["Most of its *must* checks are unsupported."]
        yield f"| {client} | {result} | {len(failed)} | {' '.join(causes[:3])} |"


def _causes(report: Mapping[str, Any]) -> Iterator[Cause]:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for check in report["checks"]:
        if check["verdict"] in BROKEN:
            group = check["id"].partition(".")[0]
            found.setdefault((group, check["note"]), []).append(check)
    for (group, note), checks in found.items():
        yield Cause(group, note, checks)


def _meanings(cause: Cause, server: Server, known: Remarks, contract: Mapping[str, str]) -> str:
    """Return what a cause means for clients, or else the promises, with the server's issues."""
    ids = [check["id"] for check in cause.checks]
    means = [*dict.fromkeys(_meaning(name, server, known) for name in ids)]
    means = [one for one in means if one][:2]
    if not means:
        texts = dict.fromkeys(contract.get(check["id"], check["promise"]) for check in cause.checks)
        means = [f"Promised: {text}" for text in [*texts][:2]]
    issues = [
        f"[{issue.title}]({issue.url})"
        for issue in server.issues
        if any(_matches(name, issue.checks) for name in ids)
    ]
    return " ".join([*means, *(["Reported:", ", ".join(issues)] if issues else [])])


def _row(cause: Cause, meaning: str) -> str:
    ids = [check["id"] for check in cause.checks]
    clauses = dict.fromkeys(check["source"].split()[0] for check in cause.checks)
    return f"| {cause.note} | {meaning} | {', '.join(clauses)} | {_named(ids)} |"


def _named(names: Sequence[str]) -> str:
    """Return some names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(f"`{name}`" for name in names[:NAMED]) + more


def _meaning(name: str, server: Server, known: Remarks) -> str:
    every = (*server.means.items(), *known.means.items())
    return next((text for patterns, text in every if _matches(name, patterns)), "")


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns.split())


def _others(report: Mapping[str, Any]) -> list[str]:
    """Return the sections on checks that are neither passed nor broken."""
    lines = []
    for verdict, title, words in (
        ("unsupported", "Not supported", "The server rejects these with an error that says so."),
        ("diverges", "Different", "The contract allows this, or is silent about it."),
    ):
        found: dict[str, list[str]] = {}
        for check in report["checks"]:
            if check["verdict"] == verdict:
                group, _, name = check["id"].partition(".")
                found.setdefault(group, []).append(name)
        if found:
            lines += [f"## {title}", "", words, "", "| group | checks |", "|---|---|"]
            lines += [f"| {group} | {_named(names)} |" for group, names in found.items()]
            lines.append("")
    return lines


def _numbers(found: deviation.Numbers | None) -> str:
    if found is None:
        return "Its log-probabilities were not compared with the reference."
    if found.chosen is None:
        return f"It has no log-probabilities to compare: {found.missing}."
    chosen = found.chosen
    return (
        f"The log-probabilities of {chosen.count} chosen tokens differ from the "
        f"[reference](../README.md#log-probabilities) by {chosen.largest:.1e} at most, and by "
        f"{chosen.mean:.1e} on average."
    )


def table() -> str:
    """Return the table of numbers."""
    known = deviation.published()
    heads = ("server", "weights", "temperature", "chosen", "mean", "largest", "alternatives",
             "mean", "largest")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|--:|--:|--:|"]
    for report in published():
        one = known.get(report["slug"])
        if one is None:
            continue
        cells = [report["name"], one.weights]
        if one.chosen is None:
            cells += ["–", one.missing, *["–"] * 5]
        else:
            cells.append(str(one.temperature))
            for values in (one.chosen, one.alternatives):
                cells += _cells(values)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(values: deviation.Deviation | None) -> list[str]:
    if values is None:
        return ["–"] * 3
    return [str(values.count), f"{values.mean:.1e}", f"{values.largest:.1e}"]
