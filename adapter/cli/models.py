"""The command `latimer models`: list, show, download and delete models of the hub's cache."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from ...backends.errors import LatimerError
from ..errors import printable
from ..hub.cache import Repo, folder, repos
from ..hub.locate import Needs, cached, described, locate, plan
from ..hub.memory import estimate, free_memory, read_metadata, trained_context
from ..hub.names import (
    HubError,
    HubFile,
    HubName,
    choose,
    in_units,
    label_of,
    models_of,
    parse,
    parts_of,
    tag_of,
)
from .completion import models_only
from .terminal import EXIT_START, Download, end_at_once, say

Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Row:
    """A model in the cache; `modified` is in Unix seconds."""

    name: str
    quant: str
    size: int
    context: int | None
    projector: str | None
    modified: int
    path: str


def _reporting(command: Command) -> Command:
    """End a command with exit code 3 and one line if a model cannot be found or changed."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        end_at_once()
        try:
            command(*args, **kwargs)
        except LatimerError as error:
            say(error.message)
            sys.exit(EXIT_START)

    return run


_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_name = click.argument("name", shell_complete=models_only)
_context = click.option(
    "--context", type=click.IntRange(1, 2**24), help="Tokens of the KV cache to estimate for."
)


@click.group(invoke_without_command=True)
@_json
@click.pass_context
def models(context: click.Context, as_json: bool) -> None:
    """List, download and delete models of the hub, which hf and llama-server share.

    \b
    Examples:
      latimer models                              what is downloaded
      latimer models show hf:ORG/REPO             what a repository has, and what fits
      latimer models get hf:ORG/REPO:Q4_K_M       download it, or its newest version
      latimer models get --dry-run hf:ORG/REPO    only print what would be downloaded
      latimer models rm hf:ORG/REPO:Q4_K_M        delete it
    """
    if context.invoked_subcommand is None:
        _list(as_json)


@models.command("ls")
@_json
def list_models(as_json: bool) -> None:
    """List the models in the cache."""
    _list(as_json)


@models.command()
@_name
@_context
@_json
@_reporting
def show(name: str, context: int | None, as_json: bool) -> None:
    """Show a model in the cache, or else what the hub would send for the name."""
    wanted, needs = parse(name), Needs(context=context)
    found = cached(wanted, needs, any_file=False)
    if found is None:
        _show_plan(wanted, needs, as_json)
        return
    metadata = read_metadata(found.parts[0])
    memory = estimate(metadata, found.choice.size, needs.context, needs.cache_type)
    _print(
        {
            "name": str(wanted),
            "path": str(found.parts[0]),
            "parts": len(found.parts),
            "projector": None if found.projector is None else str(found.projector),
            "commit": found.commit,
            "architecture": (metadata or {}).get("general.architecture"),
            "trained_context": trained_context(metadata or {}),
            "size": found.choice.size,
            "memory": {**asdict(memory), "total": memory.total, "free": free_memory()},
        },
        as_json,
    )


@models.command()
@_name
@_context
@click.option("--dry-run", is_flag=True, help="Print what would be downloaded.")
@_json
@_reporting
def get(name: str, context: int | None, dry_run: bool, as_json: bool) -> None:
    """Download a model, or its newest version, and print its path."""
    from ..hub.download import is_offline
    from ..hub.locate import download

    wanted, needs = parse(name), Needs(context=context, checks_memory=False)
    if dry_run:
        _show_plan(wanted, needs, as_json)
        return
    found = (
        locate(wanted, Download(), needs, offline=True)
        if is_offline()
        else download(wanted, Download(), needs)
    )
    if as_json:
        paths = [str(path) for path in found.parts]
        projector = None if found.projector is None else str(found.projector)
        click.echo(json.dumps({"name": str(wanted), "paths": paths, "projector": projector}))
    else:
        click.echo(str(found.parts[0]))


@models.command("rm")
@_name
@_json
@_reporting
def remove(name: str, as_json: bool) -> None:
    """Delete a model from the cache; its projector goes with the last model of the repository."""
    wanted = parse(name)
    repo = Repo(wanted.repo)
    commit = repo.commit(wanted.revision)
    files = repo.files(commit) if commit is not None else []
    if not files:
        raise HubError(f"{wanted} is not in {folder()}. `latimer models` lists what is there.")
    choice = choose(wanted, files)
    gone = [*choice.parts]
    if len(models_of(files)) == 1:
        gone = files
    freed = repo.remove(gone)
    if as_json:
        paths = [file.path for file in gone]
        click.echo(json.dumps({"name": str(wanted), "files": paths, "freed": freed}))
        return
    say(f"Deleted {described(choice)}; {in_units(freed)} are free again.")


def _show_plan(wanted: HubName, needs: Needs, as_json: bool) -> None:
    from ..hub.download import Hub

    with Hub() as hub:
        made, files = plan(hub, wanted, needs)
    rows: dict[str, Any] = {
        "name": str(wanted),
        "commit": made.commit,
        "files": [
            {"path": one.path, "size": one.size, "cached": one not in made.missing}
            for one in made.choice.files
        ],
        "also_matches": list(made.choice.others),
        "models": [
            {"name": str(label_of(wanted.repo, one, files, wanted.revision)), "size": size}
            for one, size in _sizes(files)
        ],
        "download": made.left,
        "free_disk": made.free_disk,
        "memory": {**asdict(made.memory), "total": made.memory.total, "free": made.free_memory},
    }
    _print(rows, as_json)


def _sizes(files: list[HubFile]) -> list[tuple[HubFile, int]]:
    found = []
    for model in models_of(files):
        try:
            found.append((model, sum(part.size for part in parts_of(model, files))))
        except HubError:
            continue
    return found


def _list(as_json: bool) -> None:
    rows = [row for repo in repos() for row in _rows(repo)]
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    if not rows:
        say(f"{folder()} has no GGUF model. `latimer models get hf:ORG/REPO` downloads one.")
        return
    table = [("NAME", "QUANT", "SIZE", "CONTEXT", "PROJECTOR", "MODIFIED")]
    for row in rows:
        day = time.strftime("%Y-%m-%d", time.localtime(row.modified))
        context = str(row.context or "")
        table.append((row.name, row.quant, in_units(row.size), context, row.projector or "", day))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        click.echo(printable("  ".join(cells).rstrip()))


def _rows(repo: Repo) -> list[Row]:
    rows = []
    for commit, revision in repo.commits().items():
        files = repo.files(commit)
        for model, size in _sizes(files):
            path: Path = repo.snapshot(commit) / model.path
            name = label_of(repo.name, model, files, revision)
            projector = choose(name, files).projector
            size += projector.size if projector is not None else 0
            context = trained_context(read_metadata(path) or {})
            modified = int(path.stat().st_mtime)
            shown = projector.name if projector is not None else None
            rows.append(
                Row(str(name), tag_of(model.path), size, context, shown, modified, str(path))
            )
    return rows


def _print(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(values, indent=2))
        return
    for key, value in values.items():
        for name, text in _lines(key, value):
            click.echo(printable(f"{name:<18}{text}"))


def _lines(key: str, value: Any) -> list[tuple[str, str]]:
    """Return the rows of a value in a table for people."""
    if isinstance(value, dict):
        shown = {name: _amount(name, one) for name, one in value.items() if one is not None}
        return [(key, ", ".join(f"{name} {one}" for name, one in shown.items()))]
    if isinstance(value, list):
        rows: list[tuple[str, str]] = []
        for one in value:
            text = one if isinstance(one, str) else f"{one.get('name', one.get('path'))}"
            if isinstance(one, dict):
                text += f"  {in_units(one['size'])}" + ("  in the cache" * one.get("cached", False))
            rows.append((key if not rows else "", text))
        return rows
    return [] if value is None else [(key, _amount(key, value))]


def _amount(name: str, value: Any) -> str:
    sizes = ("size", "download", "free_disk", "weights", "kv", "compute", "total", "free")
    return in_units(value) if name in sizes else str(value)
