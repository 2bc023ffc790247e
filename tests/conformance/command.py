"""`latimer conform`: judge a server, or compare two reports.

Exit codes: 0 if no `must` check is broken, 1 if one is, 2 for a usage error, 4 if the run ended
before all checks. A `must` check whose feature the server rejects by name is not broken.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click
from pydantic import ValidationError

from .check import Check, all_checks
from .discovery import Unreachable
from .live import Live, explain, plain, summary
from .profiles import PROFILES, needed
from .reports import WRITERS, write
from .reports.code_scanning import workflow_commands
from .reports.document import Report, changes, document, schema
from .reports.formats import render_markdown
from .reports.run import Run
from .runner import Settings, judge, resolved
from .target import SILENCE

# The exit code of a run that ended before all checks.
UNFINISHED = 4


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("url", required=False)
@click.option("--model", help="Model to request. Default: the first in /models.")
@click.option(
    "--api-key",
    envvar="OPENAI_API_KEY",
    help="API key, sent as a bearer token. Reports never contain it.",
)
@click.option("--name", help="Name of the server in reports. Default: its URL.")
@click.option(
    "--only",
    multiple=True,
    metavar="ID",
    help="Run checks by id; * and ? are wildcards. Repeatable.",
)
@click.option("--group", multiple=True, help="Run the checks of a group. Repeatable.")
@click.option(
    "--profile",
    multiple=True,
    type=click.Choice(list(PROFILES), case_sensitive=False),
    help="Run the checks that a client depends on. Repeatable.",
)
@click.option(
    "--model-hint",
    type=click.Choice(["demo"]),
    help="Also run the checks that depend on this model's answers.",
)
@click.option(
    "--at-once", type=click.IntRange(1), default=8, help="Number of concurrent checks. Default: 8."
)
@click.option(
    "--break",
    "breaks",
    metavar="COMMAND",
    help="Command that stops and restarts the engine. Tests what clients see when it dies.",
)
@click.option(
    "--silence",
    type=click.FloatRange(0, min_open=True),
    default=SILENCE,
    metavar="SECONDS",
    help=f"Longest time without bytes in a stream, in seconds. Default: {SILENCE:g}.",
)
@click.option(
    "--wait",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    help="Wait so long for a server that is starting. Default: 0.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="End the run after this time. The exit code is 4 if checks are left.",
)
@click.option(
    "--limits",
    type=click.Choice(["engine", "openai"]),
    default="engine",
    help="Allow servers to do more than OpenAI's service, or require its limits.  [engine]",
)
@click.option(
    "--report",
    multiple=True,
    type=click.Path(path_type=Path),
    help=f"Write a report. Suffixes: {', '.join(WRITERS)}. Repeatable.",
)
@click.option(
    "--notes",
    type=click.Path(exists=True, path_type=Path),
    help="JSON file with explanations for reports, as an object with a check id or pattern as key.",
)
@click.option(
    "--only-failed",
    type=click.Path(exists=True, path_type=Path),
    metavar="REPORT",
    help="Run the checks that are broken in a JSON report.",
)
@click.option(
    "--changed-since",
    type=click.Path(exists=True, path_type=Path),
    metavar="REPORT",
    help="Print the verdicts that differ from a JSON report. Only checks that were not broken "
    "there are annotated and explained, and make the exit code 1.",
)
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Print the clause, the request, the response and the verdicts on other servers for each "
    "failure.",
)
@click.option(
    "--annotations/--no-annotations",
    "annotates",
    default=None,
    help="Print failures as GitHub's annotations. Default: on in a workflow of GitHub.",
)
@click.option("--schema", "is_schema", is_flag=True, help="Print the JSON schema of reports.")
@click.option("--redact", is_flag=True, help="Omit prompts and answers from reports.")
@click.option("--list", "listing", is_flag=True, help="Print the checks and exit.")
@click.option(
    "--diff",
    nargs=2,
    type=click.Path(exists=True, path_type=Path),
    help="Compare two JSON reports. The exit code is 1 if verdicts differ.",
)
def conform(
    url: str | None,
    model: str | None,
    api_key: str | None,
    name: str | None,
    only: Sequence[str],
    group: Sequence[str],
    profile: Sequence[str],
    model_hint: str | None,
    at_once: int,
    breaks: str | None,
    silence: float,
    wait: float,
    time_limit: float | None,
    limits: str,
    report: Sequence[Path],
    notes: Path | None,
    only_failed: Path | None,
    changed_since: Path | None,
    explains: bool,
    annotates: bool | None,
    is_schema: bool,
    redact: bool,
    listing: bool,
    diff: tuple[Path, Path] | None,
) -> None:
    """Test any server for conformance with OpenAI's API.

    \b
    Examples:
      latimer conform http://127.0.0.1:8080/v1
      latimer conform http://127.0.0.1:8000/v1 --model-hint demo --report report.html
      latimer conform https://gateway.example/v1 --api-key KEY --profile lm-eval
      latimer conform --diff before.json after.json
    """
    if is_schema:
        click.echo(json.dumps(schema(), indent=1))
        return
    if diff is not None:
        sys.exit(_compare(_report(diff[0]), _report(diff[1])))
    before = None if changed_since is None else _report(changed_since)
    checks = _chosen(only, group, profile, None if only_failed is None else _report(only_failed))
    if listing:
        for check in checks:
            click.echo(f"{check.id:<34} {check.level:<6} {check.promise}")
        return
    _check_reports(report)
    settings = Settings(_checked(url), model, api_key, model_hint, at_once, breaks, silence,
                        limits == "openai", time_limit, wait=wait)  # fmt: skip
    run = _run(settings, checks, name, not redact)
    if before is not None:
        run = replace(run, known={check.id for check in before.checks if check.is_broken})
    if notes is not None:
        run = replace(run, notes=_notes(notes))
    if explains:
        explain(run)
    summary(run)
    for path in report:
        write(run, path)
    _tell_workflow(run, annotates)
    sys.exit(_exit_code(run, before))


def _run(settings: Settings, checks: Sequence[Check], name: str | None, content: bool) -> Run:
    """Run the checks; a server that cannot be reached is wrong usage."""
    try:
        return asyncio.run(_judged(settings, checks, name, content))
    except Unreachable as error:
        raise click.UsageError(str(error)) from None


def _exit_code(run: Run, before: Report | None) -> int:
    """Return the exit code of a run; after another one, only new failures count."""
    broken = [verdict.check.id for verdict in run.new if verdict.check.level == "must"]
    if before is not None:
        ran = {verdict.check.id for verdict in run.verdicts} - {one.check.id for one in run.left}
        _compare(before.of(ran), document(run).of(ran))
        click.echo(f"new failures of must checks: {', '.join(broken) or 'none'}")
    return 1 if broken else UNFINISHED if run.left else 0


def _tell_workflow(run: Run, wanted: bool | None) -> None:
    """Print GitHub's annotations, and add the report to the summary of its workflow."""
    if wanted is None:
        wanted = os.environ.get("GITHUB_ACTIONS") == "true"
    if wanted:
        for line in workflow_commands(run):
            click.echo(line)
        if page := os.environ.get("GITHUB_STEP_SUMMARY"):
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(render_markdown(run))


def _check_reports(report: Sequence[Path]) -> None:
    """Reject reports that cannot be written, before the checks run."""
    unknown = [path for path in report if path.suffix not in WRITERS]
    if unknown:
        raise click.UsageError(
            f"--report {unknown[0]} has an unknown suffix. Use one of {', '.join(WRITERS)}."
        )
    misplaced = [path for path in report if not path.parent.is_dir()]
    if misplaced:
        raise click.UsageError(
            f"--report {misplaced[0]} is in a folder that does not exist. Create it first."
        )
    locked = [
        path for path in report if not os.access(path if path.exists() else path.parent, os.W_OK)
    ]
    if locked:
        raise click.UsageError(f"--report {locked[0]} cannot be written. Choose another folder.")


def _chosen(
    only: Sequence[str], group: Sequence[str], profile: Sequence[str], failed: Report | None
) -> list[Check]:
    checks = all_checks()
    if failed is not None:
        ids = {check.id for check in failed.checks if check.is_broken}
        checks = [check for check in checks if check.id in ids]
        if not checks:
            raise click.UsageError("The report of --only-failed has no broken check.")
    if not (only or group or profile):
        return checks
    known, groups = all_checks(), sorted({check.group for check in all_checks()})
    absent = [f"--group {one}" for one in group if one not in groups]
    absent += [f"--only {one}" for one in only
               if not any(fnmatchcase(check.id, one) for check in known)]  # fmt: skip
    if absent:
        raise click.UsageError(
            f"No check matches {absent[0]}. --list shows all checks. The groups are "
            f"{', '.join(groups)}."
        )
    wanted = {check.id for name in profile for check in needed(name, checks)}
    wanted |= {check.id for check in checks if check.group in group}
    wanted |= {check.id for check in checks if any(fnmatchcase(check.id, one) for one in only)}
    if not wanted:
        raise click.UsageError("The report of --only-failed has no broken check among these.")
    return [check for check in checks if check.id in wanted]


async def _judged(
    settings: Settings, checks: Sequence[Check], name: str | None, content: bool
) -> Run:
    settings = await resolved(settings)
    url = _without_user(settings.url)
    click.echo(plain(f"{url} with the model {settings.model}: {len(checks)} checks"))
    live = Live(checks, settings.at_once)
    try:
        verdicts = await judge(settings, checks, live.take, may_be_cancelled=True)
    finally:
        live.close()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Run(name or url, url, settings.model or "", today, verdicts, content)


def _notes(path: Path) -> dict[str, str]:
    notes = _json(path)
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise click.UsageError(
            f"--notes {path} is not an object of strings. Use a check id or pattern as each key."
        )
    return notes


def _json(path: Path) -> Any:
    """Return the value in a JSON file."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeError:
        raise click.UsageError(f"{path} is not valid JSON: it is not UTF-8 text.") from None
    except ValueError as error:
        raise click.UsageError(f"{path} is not valid JSON: {error}.") from None
    except RecursionError:
        raise click.UsageError(f"{path} is nested too deeply.") from None


def _checked(url: str | None) -> str:
    """Return an address that is valid. A message omits the address, which may contain a password.

    Raises:
        UsageError: it is missing or invalid.
    """
    if url is None:
        raise click.UsageError(
            "The base URL is missing. Add one, such as http://127.0.0.1:8080/v1."
        )
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
        reason = "it must begin with http:// or https:// and name a host"
    except ValueError as error:
        reason = str(error)
    raise click.UsageError(
        f"The base URL is invalid: {reason}. Use one such as http://127.0.0.1:8080/v1."
    )


def _without_user(url: str) -> str:
    """Return an address without its user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _report(path: Path) -> Report:
    """Return the report in a JSON file."""
    try:
        return Report.model_validate(_json(path))
    except ValidationError:
        raise click.UsageError(f"{path} is not a JSON report of this command.") from None


def _compare(before: Report, after: Report) -> int:
    """Print the verdicts that differ between two reports; return 1 if any do."""
    lines = changes(before, after)
    for line in lines:
        click.echo(plain(line))
    click.echo(f"{len(lines)} verdicts differ")
    return 1 if lines else 0
