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
from .profiles import PROFILES, needed, works
from .reports import WRITERS, write
from .reports.json import changes
from .reports.run import OUTCOMES, Run
from .runner import Settings, Unreachable, connected, judge

COLOURS = {"pass": "green", "fail": "red", "flaky": "yellow", "timeout": "magenta",
           "unsupported": "blue"}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("url", required=False)
@click.option("--model", help="What requests name; the first that /models lists by default.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer; never in a report.")
@click.option("--name", help="What the server is called in reports; its URL by default.")
@click.option("--only", multiple=True, metavar="ID", help="Checks by id, with * and ?; repeatable.")
@click.option("--group", multiple=True, help="Checks of a group; repeatable.")
@click.option(
    "--profile",
    multiple=True,
    type=click.Choice(list(PROFILES), case_sensitive=False),
    help="Checks that a client depends on; repeatable.",
)
@click.option("--model-hint", type=click.Choice(["demo"]), help="Unlock what a model surely says.")
@click.option("--at-once", type=click.IntRange(1), default=8, help="Checks side by side.  [8]")
@click.option(
    "--break",
    "breaks",
    metavar="COMMAND",
    help="Ends the engine behind the server and has it started again; judges errors in mid-stream.",
)
@click.option(
    "--report",
    multiple=True,
    type=click.Path(path_type=Path),
    help=f"Write a report; its name ends in {', '.join(WRITERS)}; repeatable.",
)
@click.option(
    "--notes",
    type=click.Path(exists=True, path_type=Path),
    help="A JSON object: what lies behind verdicts, by check or pattern; put into reports.",
)
@click.option("--redact", is_flag=True, help="Leave prompts and answers out of reports.")
@click.option("--list", "listing", is_flag=True, help="Show the checks and end.")
@click.option(
    "--diff",
    nargs=2,
    type=click.Path(exists=True, path_type=Path),
    help="Compare two JSON reports; exit code 1 if verdicts differ.",
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
        raise click.UsageError("Name the server's base URL: http://127.0.0.1:8080/v1")
    unknown = [path for path in report if path.suffix not in WRITERS]
    if unknown:
        raise click.UsageError(f"{unknown[0]}: a report ends in {', '.join(WRITERS)}")
    homeless = [path for path in report if not path.parent.is_dir()]
    if homeless:
        raise click.UsageError(f"{homeless[0]}: there is no folder {homeless[0].parent}")
    _check_address(url)
    settings = Settings(url, model, api_key, model_hint, at_once, breaks)
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
            f"No check is of that name; --list shows them all. The groups are {groups}."
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
            word = click.style(f"{verdict.outcome:<11}", fg=COLOURS.get(verdict.outcome))
            detail = " ".join(verdict.detail[:160].split())
            click.echo(f"{word} {verdict.check.level:<6} {verdict.check.id}: {_plain(detail)}")
        if sys.stderr.isatty():
            click.echo(f"\r{done}/{len(checks)} ", nl=False, err=True)

    verdicts = await judge(settings, checks, report)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Run(name, _without_user(settings.url), model, today, verdicts, content)


def _notes(path: Path) -> dict[str, str]:
    notes = _json(path)
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise click.UsageError(f"{path}: notes are an object of texts, by check or pattern.")
    return notes


def _json(path: Path) -> Any:
    """Return the value in a JSON file."""
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise click.UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise click.UsageError(f"{path} is no JSON: it is not UTF-8 text") from None
    except ValueError as error:
        raise click.UsageError(f"{path} is no JSON: {error}") from None
    except RecursionError:
        raise click.UsageError(f"{path} is nested too deeply") from None


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
        f"The base URL is not a valid address such as http://127.0.0.1:8080/v1: {reason}"
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
        held = sum(verdict.outcome == "pass" for verdict in verdicts)
        click.echo(f"{group:<16} {held:>3} of {len(verdicts)}")
    click.echo()
    for name in PROFILES:
        if not needed(name, [verdict.check for verdict in run.verdicts]):
            continue
        verdict, broken = works(name, run.verdicts)
        ids = ", ".join(one.check.id for one in broken[:3])
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        click.echo(f"{name:<16} {verdict}{': ' if ids else ''}{ids}{more}")
    click.echo()
    told = ", ".join(f"{run.counts[one]} {one}" for one in OUTCOMES if run.counts[one])
    click.echo(f"{len(run.verdicts)} checks: {told}")


def _compare(before: Path, after: Path) -> int:
    try:
        lines = changes(_json(before), _json(after))
    except (AttributeError, KeyError, TypeError):
        raise click.UsageError("--diff compares two reports of this command in JSON") from None
    for line in lines:
        click.echo(_plain(line))
    click.echo(f"{len(lines)} verdicts differ")
    return 1 if lines else 0
