"""The commands `latimer serve`, `latimer check` and `latimer conform`.

Exit codes: 0 success, 1 a failed check, 2 wrong usage, 3 failed to start.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..printable import printable
from . import standard_streams
from .signals import end_at_once

if TYPE_CHECKING:
    from ..config import Settings

EXIT_CHECK, EXIT_START = 1, 3

# The modules of the extra that `latimer conform` needs.
CONFORMANCE = frozenset({"jsonschema", "openai"})

Command = Callable[..., None]


def _options(command: Command) -> Command:
    """Add the options that both commands share: the engine, and the way to reach it."""
    decorators = (
        click.argument("model", required=False, metavar="[MODEL.gguf | URL]"),
        click.option(
            "--config", type=click.Path(path_type=Path), help="Read settings from this TOML file."
        ),
        click.option(
            "--backend",
            type=click.Choice(["auto", "llama-cpp", "llama-server", "koboldcpp"]),
            help="The engine; detected by default.",
        ),
        click.option("--engine-key", help="API key of the engine."),
        click.option(
            "--engine-timeout",
            type=float,
            metavar="SECONDS",
            help="llama-server: seconds without data before a response fails.  [60]",
        ),
        click.option(
            "--context",
            type=int,
            help="In process: size of the KV cache in tokens, shared by parallel choices.",
        ),
        click.option(
            "--parallel", type=int, help="In process: choices that run in parallel.  [16]"
        ),
        _memory,
        _files,
        click.option(
            "--embeddings/--no-embeddings",
            default=None,
            help="In process: serve embeddings.  [for models made for them]",
        ),
        click.option(
            "--pooling",
            type=click.Choice(["mean", "cls", "last", "rank"]),
            help="In process: pooling of embeddings.  [the model's own]",
        ),
        click.option(
            "--exact",
            is_flag=True,
            default=None,
            help="In process: logprobs that are independent of other requests; slower.",
        ),
    )
    return _decorated(command, decorators)


def _memory(command: Command) -> Command:
    """Add the options for the CPU, GPU and memory use of the in-process engine."""
    decorators = (
        click.option("--threads", type=int, help="In process: number of CPU threads."),
        click.option("--batch", type=int, help="In process: batch size in tokens.  [512]"),
        click.option(
            "--gpu-layers", help="In process: number of layers on the GPU, or all.  [all]"
        ),
        click.option(
            "--cache-type",
            metavar="TYPE",
            help="In process: KV cache type: f32, f16, bf16, q8_0, q4_0 …  [f16]",
        ),
        click.option(
            "--cache-memory",
            type=int,
            metavar="MIB",
            help="In process: host memory for saved prompts.  [a quarter of the free memory, "
            "at most 8192]",
        ),
        click.option(
            "--flash-attention",
            type=click.Choice(["auto", "on", "off"]),
            help="In process: flash attention.  [auto]",
        ),
    )
    return _decorated(command, decorators)


def _files(command: Command) -> Command:
    """Add the options for the files of the in-process engine."""
    decorators = (
        click.option(
            "--mmap/--no-mmap",
            default=None,
            help="In process: memory-map the model file.  [where it helps]",
        ),
        click.option(
            "--mlock", is_flag=True, default=None, help="In process: lock the weights in RAM."
        ),
        click.option(
            "--mmproj",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="In process: multimodal projector, for images or audio.",
        ),
        click.option(
            "--lora",
            multiple=True,
            metavar="FILE[=SCALE]",
            help="In process: LoRA adapter; repeatable.",
        ),
    )
    return _decorated(command, decorators)


def _decorated(command: Command, decorators: Sequence[Callable[[Command], Command]]) -> Command:
    """Add options to a command; its help shows them in this order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def _loading(command: Callable[..., None]) -> Callable[..., None]:
    """Load the settings for a command; invalid settings end it with exit code 2."""

    @functools.wraps(command)
    def run(config: Path | None, **flags: Any) -> None:
        from ..config import Settings
        from ..credentials import UnusableKey

        try:
            settings = Settings.load(config, **flags)
            _check_files(settings)
        except UnusableKey as error:
            from .serving import fail

            fail(str(error))
        except ValueError as error:
            raise WrongUse(str(error)) from None
        command(settings)

    return run


class _Commands(click.Group):
    """A group of commands that end without a traceback, even if the terminal is gone."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """See `click.Command.main`."""
        standard_streams.secure()
        return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """See `click.Command.invoke`; Ctrl-C is exit code 130, as in a shell."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="latimer")
def main() -> None:
    """Every OpenAI client over local LLM engines, through their native interfaces.

    \b
    Examples:
      latimer serve                                 the bundled demo model, in process
      latimer serve model.gguf --gpu-layers all     your own model, in process
      latimer serve http://127.0.0.1:8080           in front of llama-server
      latimer serve http://127.0.0.1:5001           in front of koboldcpp
      latimer check http://127.0.0.1:8080           what this engine supports
      latimer conform http://127.0.0.1:8080/v1      how well it conforms to OpenAI's API
    """


@main.command()
@_options
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on.  [8000]")
@click.option("--model-name", multiple=True, help="Model name for clients; repeatable.")
@click.option("--any-model", is_flag=True, default=None, help="Accept every model name.")
@click.option("--api-key", multiple=True, help="API key that clients must send; repeatable.")
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with one API key per line."
)
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help=(
        "Origin of web pages that may call the server: https://chat.example, null, *; "
        "repeatable.  [local pages and apps; with an API key: all]"
    ),
)
@click.option(
    "--allowed-host",
    multiple=True,
    metavar="NAME",
    help="Without an API key: another host name of this server; repeatable.",
)
@click.option("--max-body", type=int, help="Largest request body in bytes.  [33554432]")
@click.option(
    "--strict",
    is_flag=True,
    default=None,
    help="Reject unknown fields, and fields that the engine only approximates; implies "
    "--limits openai.",
)
@click.option(
    "--limits",
    type=click.Choice(["engine", "openai"]),
    help="Allow what the engine can do, or only what OpenAI's service allows.  [engine]",
)
@click.option(
    "--chat-format",
    metavar="NAME",
    help="Instruct format to use instead of the chat template: alpaca, chatml, llama-3 …",
)
@click.option(
    "--parse-content",
    is_flag=True,
    default=None,
    help="Parse control tokens in messages; by default they are text.",
)
@click.option(
    "--fetch-images",
    is_flag=True,
    default=None,
    help="Fetch images from http and https URLs with public addresses.",
)
@click.option(
    "--logit-bias-vocabulary",
    metavar="NAME",
    help="Vocabulary of the token ids in requests: cl100k_base, o200k_base …",
)
@click.option(
    "--matryoshka",
    is_flag=True,
    default=None,
    help="Cut vectors to the dimensions of a request; only for models trained for it.",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    default=None,
    help="In process: share the prompt cache across API keys.",
)
@click.option(
    "--queue",
    type=int,
    metavar="N",
    help="Requests that may wait for the engine; more get status 429.  [1024]",
)
@click.option(
    "--reasoning-field",
    type=click.Choice(["reasoning_content", "reasoning", "none"]),
    help="Field of messages for reasoning; none to omit it.  [reasoning_content]",
)
@click.option(
    "--keepalive",
    type=float,
    metavar="SECONDS",
    help="Seconds of silence before a stream sends a comment; 0 for never.  [10]",
)
@click.option("--drain", type=int, help="Seconds that running requests get after SIGTERM.  [30]")
@click.option(
    "--wait",
    is_flag=True,
    default=None,
    help="Accept requests only when the engine is ready; by default respond with 503 until then.",
)
@_loading
def serve(settings: Settings) -> None:
    """Serve OpenAI's API over a model or an engine.

    \b
    Examples:
      latimer serve
      latimer serve model.gguf --context 8192 --parallel 16 --gpu-layers all
      latimer serve http://127.0.0.1:8080 --model-name gpt-4o --api-key secret
      LATIMER_API_KEY=one,two latimer serve --config latimer.toml

    Every setting can come from a flag, from the environment (LATIMER_PORT=8080), or from the
    TOML file of --config (port = 8080), in this order of precedence.
    """
    from ..config import WrongSettings
    from . import serving

    try:
        serving.run(serving.serve(settings))
    except WrongSettings as error:
        raise WrongUse(str(error)) from None


@main.command()
@_options
@_loading
def check(settings: Settings) -> None:
    """Show the capabilities of an engine as a table.

    The exit code is 1 if it cannot be reached.

    \b
    Examples:
      latimer check
      latimer check http://127.0.0.1:5001
    """
    end_at_once()
    sys.exit(asyncio.run(_check(settings)))


class _Conform(click.Command):
    """The `conform` command, which is defined in the conformance package and imported on use."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """See `click.Command.make_context`."""
        if not all(map(find_spec, CONFORMANCE)):
            click.echo(
                "'latimer conform' requires the extra 'conformance': run pip install "
                "'.[conformance]' in a clone of Latimer.",
                err=True,
            )
            sys.exit(EXIT_START)
        from ...conformance.command import conform

        return conform.make_context(*args, **kwargs)


main.add_command(
    _Conform("conform", short_help="Test any server for conformance with OpenAI's API.")
)


async def _check(settings: Settings) -> int:
    from ..capability_table import describe
    from ..discovery import WrongSetup, backend_of, unused

    try:
        backend = backend_of(settings)
    except WrongSetup as error:
        click.echo(f"Latimer cannot check: {printable(error.message)}", err=True)
        return EXIT_START
    idle = unused(settings)
    if idle is not None:
        click.echo(printable(idle), err=True)
    try:
        reachable, rows = await describe(backend)
    finally:
        await backend.aclose()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {printable(value)}")
    return 0 if reachable else EXIT_CHECK


class WrongUse(click.ClickException):
    """An error in the settings of a command, with a message of one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def _check_files(settings: Settings) -> None:
    """Check the settings that are only used at the start: API keys and LoRA adapters.

    Raises:
        WrongUse: the file of API keys cannot be read, or a LoRA adapter is invalid.
        UnusableKey: an API key cannot be used.
    """
    from ..config_errors import reason_of

    try:
        settings.keys()
    except (OSError, UnicodeError) as error:
        where = settings.place("api_key_file")
        reason = reason_of(error)
        raise WrongUse(f"{where}: {settings.api_key_file} cannot be read: {reason}.") from None
    try:
        settings.adapters()
    except ValueError as error:
        raise WrongUse(str(error)) from None
