"""`latimer conform`: judge a server, or compare two reports.

Exit codes: 0 if no `must` check is broken, 1 if one is, 2 for a usage error. A `must` check whose
feature the server rejects by name is not broken.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import click

from .check import Check, Verdict, all_checks
from .profiles import NOT_JUDGED, PROFILES, needed, works
from .reports import WRITERS, write
from .reports.formats import changes
from .reports.run import OUTCOMES, Run
from .runner import Settings, Unreachable, connected, judge
from .target import SILENCE

COLOURS = {"pass": "green", "fail": "red", "flaky": "yellow", "timeout": "magenta",
           "unsupported": "blue"}  # fmt: skip


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
    limits: str,
    report: Sequence[Path],
    notes: Path | None,
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
    if diff is not None:
        sys.exit(_compare(*diff))
    checks = _chosen(only, group, profile)
    if listing:
        for check in checks:
            click.echo(f"{check.id:<34} {check.level:<6} {check.promise}")
        return
    if url is None:
        raise click.UsageError(
            "The base URL is missing. Add one, such as http://127.0.0.1:8080/v1."
        )
    _check_reports(report)
    _check_address(url)
    settings = Settings(url, model, api_key, model_hint, at_once, breaks, silence,
                        limits == "openai")  # fmt: skip
    try:
        run = asyncio.run(_judged(settings, checks, name or _without_user(url), not redact))
    except Unreachable as error:
        raise click.UsageError(str(error)) from None
    if notes is not None:
        run = replace(run, notes=_notes(notes))
    _summary(run)
    for path in report:
        write(run, path)
    sys.exit(1 if run.broken_musts else 0)


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


def _chosen(only: Sequence[str], group: Sequence[str], profile: Sequence[str]) -> list[Check]:
    checks = all_checks()
    if not (only or group or profile):
        return checks
    wanted = {check.id for name in profile for check in needed(name, checks)}
    wanted |= {check.id for check in checks if check.group in group}
    wanted |= {check.id for check in checks if any(fnmatchcase(check.id, one) for one in only)}
    if not wanted:
        groups = ", ".join(sorted({check.group for check in checks}))
        raise click.UsageError(
            f"No check matches. --list shows all checks. The groups are {groups}."
        )
    return [check for check in checks if check.id in wanted]


async def _judged(settings: Settings, checks: Sequence[Check], name: str, content: bool) -> Run:
    async with connected(settings) as (_client, model):
        pass
    done = 0

    def report(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if verdict.outcome != "pass":
            outcome = click.style(f"{verdict.outcome:<11}", fg=COLOURS.get(verdict.outcome))
            detail = " ".join(verdict.detail[:160].split())
            click.echo(f"{outcome} {verdict.check.level:<6} {verdict.check.id}: {_plain(detail)}")
        if sys.stderr.isatty():
            click.echo(f"\r{done}/{len(checks)} ", nl=False, err=True)

    verdicts = await judge(settings, checks, report)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Run(name, _without_user(settings.url), model, today, verdicts, content)


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


def _check_address(url: str) -> None:
    """Reject an invalid address. The message omits the address, which may contain a password."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
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


def _plain(text: str) -> str:
    """Replace unprintable characters, which could control a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _summary(run: Run) -> None:
    click.echo()
    for group, verdicts in run.groups().items():
        passed = sum(verdict.outcome == "pass" for verdict in verdicts)
        click.echo(f"{group:<16} {passed:>3} of {len(verdicts)}")
    click.echo()
    for name in PROFILES:
        verdict, broken = works(name, run.verdicts)
        if verdict == NOT_JUDGED:
            continue
        ids = ", ".join(one.check.id for one in broken[:3])
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        click.echo(f"{name:<16} {verdict}{': ' if ids else ''}{ids}{more}")
    click.echo()
    counts = ", ".join(f"{run.counts[one]} {one}" for one in OUTCOMES if run.counts[one])
    click.echo(f"{len(run.verdicts)} checks: {counts}")


def _compare(before: Path, after: Path) -> int:
    try:
        lines = changes(_json(before), _json(after))
    except (AttributeError, KeyError, TypeError):
        raise click.UsageError("--diff needs two JSON reports of this command.") from None
    for line in lines:
        click.echo(_plain(line))
    click.echo(f"{len(lines)} verdicts differ")
    return 1 if lines else 0
