"""The command `latimer`, whose commands are in modules that are imported on use.

Exit codes: 0 success, 1 a failed check, 2 wrong usage, 3 failed to start.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import click

from . import terminal

# Before pydantic is imported: it would look for plugins in the metadata of every installed package.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# The modules of the extra that `latimer conform` needs.
CONFORMANCE = frozenset({"jsonschema", "openai"})


@contextmanager
def imports() -> Iterator[None]:
    """Do not look for garbage while modules are imported, and never in what they have made.

    They leave almost none, and looking for it takes a tenth of the time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Commands(click.Group):
    """A group of commands that end without a traceback, even if the terminal is gone."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        terminal.secure()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; Ctrl-C is exit code 130, as in a shell."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


class _Lazy(click.Command):
    """A command of the same name in a module that is imported on use.

    Args:
        module: its name, relative to this package.
        texts: its `help` or `short_help`.
    """

    def __init__(self, name: str, module: str, **texts: str) -> None:
        super().__init__(name, **texts)  # type: ignore[arg-type]
        self._module = module

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with imports():
            command: click.Command = getattr(import_module(self._module, __name__), self.name or "")
        return command.make_context(*args, **kwargs)


class _Conform(_Lazy):
    """The command of the conformance package, which needs an extra."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        if not all(map(find_spec, CONFORMANCE)):
            click.echo(
                "'latimer conform' requires the extra 'conformance': run pip install "
                "'.[conformance]' in a clone of Latimer.",
                err=True,
            )
            sys.exit(terminal.EXIT_START)
        return super().make_context(*args, **kwargs)


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        from .report import versions

        (name, own), *engines = versions()
        # Scripts read the first line.
        click.echo(f"{name}, version {own}")
        for engine, build in engines:
            click.echo(f"{engine}: {build}")
        ctx.exit()


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the versions of Latimer and of llama.cpp, and exit.",
)
def main() -> None:
    """Every OpenAI client over local LLM engines, through their native interfaces.

    \b
    Examples:
      latimer serve                                 the bundled demo model
      latimer serve model.gguf --gpu-layers all     your own model
      latimer serve http://127.0.0.1:8080           in front of llama-server
      latimer serve http://127.0.0.1:5001           in front of koboldcpp
      latimer serve hf:ORG/REPO:Q4_K_M              a model by its name on the hub
      latimer models                                models that are downloaded
      latimer check http://127.0.0.1:8080           what this engine supports
      latimer serve --config fleet.toml             several engines and models
      latimer conform http://127.0.0.1:8080/v1      how well it conforms to OpenAI's API
      latimer top                                   what a running server does now
      latimer store stats --store latimer.db        what a store contains
      latimer config digest                         the digest of a key, for its table
      latimer completion bash                       the completion of a shell
    """


for _command in (
    _Lazy("serve", ".commands", help="Serve OpenAI's API over a model or an engine."),
    _Lazy(
        "check",
        ".check",
        help="Show the capabilities of an engine, and the store, as a table.",
    ),
    _Conform(
        "conform",
        "...conformance.command",
        short_help="Test any server for conformance with OpenAI's API.",
    ),
    _Lazy("completion", ".completion", short_help="Print the completion script of a shell."),
    _Lazy("config", ".commands", short_help="Print the schema of the settings file, or a digest."),
    _Lazy("models", ".models", short_help="List, download and delete models of the hub."),
    _Lazy("ps", ".admin", short_help="List the engines of a running server."),
    _Lazy("load", ".admin", short_help="Load the model of an engine of a running server."),
    _Lazy("unload", ".admin", short_help="Unload the model of an engine of a running server."),
    _Lazy("drain", ".admin", short_help="Send no more requests to an engine of a running server."),
    _Lazy("top", ".top", short_help="Show what a running server does, in a live table."),
    _Lazy("store", ".store", short_help="Migrate, measure, export or prune a store."),
):
    main.add_command(_command)
