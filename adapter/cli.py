"""`latimer serve`, `latimer check` and, from elsewhere, `latimer conform`.

Exit codes: 0 fine, 1 a check failed, 2 usage, 3 could not start.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .printable import printable

if TYPE_CHECKING:
    from ..backends.base import Backend
    from .app import OpenAIAdapter
    from .config import Settings

EXIT_CHECK, EXIT_START = 1, 3

# The modules of the extra that `latimer conform` needs.
CONFORMANCE = frozenset({"jsonschema", "openai"})

Command = Callable[..., None]


def _options(command: Command) -> Command:
    """What both commands take: everything that says which engine, and how to reach it."""
    decorators = (
        click.argument("model", required=False, metavar="[MODEL.gguf | URL]"),
        click.option(
            "--config", type=click.Path(path_type=Path), help="A TOML file with the same settings."
        ),
        click.option(
            "--backend",
            type=click.Choice(["auto", "llama-cpp", "llama-server", "koboldcpp"]),
            help="Which engine it is; found out by default.",
        ),
        click.option("--engine-key", help="The engine's own API key."),
        click.option(
            "--engine-timeout",
            type=float,
            metavar="SECONDS",
            help="llama-server: seconds of silence in an answer after which it is lost.  [60]",
        ),
        click.option(
            "--context", type=int, help="In process: tokens of all that runs side by side."
        ),
        click.option("--parallel", type=int, help="In process: choices side by side.  [16]"),
        _memory,
        _files,
        click.option(
            "--exact",
            is_flag=True,
            default=None,
            help="In process: log-probabilities that do not depend on what else runs; slower.",
        ),
    )
    return _decorated(command, decorators)


def _memory(command: Command) -> Command:
    """How the engine in process uses the machine."""
    decorators = (
        click.option("--threads", type=int, help="CPU threads, in process."),
        click.option("--batch", type=int, help="In process: tokens of one step.  [512]"),
        click.option("--gpu-layers", help="Layers on the GPU: a number, or all (the default)."),
        click.option(
            "--cache-type",
            metavar="TYPE",
            help="How the context is remembered: f32, f16, bf16, q8_0, q4_0 …  [f16]",
        ),
        click.option(
            "--cache-memory",
            type=int,
            metavar="MIB",
            help="In process: memory for what has finished.  [a quarter of what is free, 8192]",
        ),
        click.option(
            "--flash-attention",
            type=click.Choice(["auto", "on", "off"]),
            help="Attention in one go; by default where it can be.",
        ),
    )
    return _decorated(command, decorators)


def _files(command: Command) -> Command:
    """Which files the engine in process reads, and how."""
    decorators = (
        click.option(
            "--mmap/--no-mmap", default=None, help="Map the model's file; by default where best."
        ),
        click.option(
            "--mlock", is_flag=True, default=None, help="Keep the weights from being swapped out."
        ),
        click.option(
            "--mmproj",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="In process: a projector, so that the model takes images or audio.",
        ),
        click.option(
            "--lora",
            multiple=True,
            metavar="FILE[=SCALE]",
            help="A LoRA adapter on the model; repeatable.",
        ),
    )
    return _decorated(command, decorators)


def _decorated(command: Command, decorators: Sequence[Callable[[Command], Command]]) -> Command:
    """A command with options, shown in their order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def _loading(command: Callable[..., None]) -> Callable[..., None]:
    """Turn flags, environment and file into settings; what is wrong with them is exit code 2."""

    @functools.wraps(command)
    def run(config: Path | None, **flags: Any) -> None:
        from .config import Settings

        try:
            settings = Settings.load(config, **flags)
            settings.keys()
            settings.adapters()
        except (ValueError, OSError) as error:
            raise click.UsageError(str(error)) from None
        command(settings)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="latimer")
def main() -> None:
    """Every OpenAI client over local LLM engines, through their native interfaces.

    \b
    Examples:
      latimer serve                                 the bundled demo model, in process
      latimer serve model.gguf --gpu-layers all     a model of yours, in process
      latimer serve http://127.0.0.1:8080           in front of a llama-server
      latimer serve http://127.0.0.1:5001           in front of a koboldcpp
      latimer check http://127.0.0.1:8080           what that engine can do
      latimer conform http://127.0.0.1:8080/v1      what its OpenAI API is worth
    """


@main.command()
@_options
@click.option("--host", help="Address to listen on.  [127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on.  [8000]")
@click.option("--model-name", multiple=True, help="How clients call the model; repeatable.")
@click.option("--any-model", is_flag=True, default=None, help="Accept every model name.")
@click.option("--api-key", multiple=True, help="A key that clients must send; repeatable.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="A file, one key a line.")
@click.option("--cors-origin", multiple=True, help="Web pages that may call it.  [*]")
@click.option("--max-body", type=int, help="Largest request body in bytes.  [33554432]")
@click.option("--strict", is_flag=True, default=None, help="Refuse unknown fields and near misses.")
@click.option(
    "--chat-format",
    metavar="NAME",
    help="An instruct format instead of the model's template: alpaca, chatml, llama-3 …",
)
@click.option(
    "--parse-content",
    is_flag=True,
    default=None,
    help="Let control tokens in messages count as such; by default they are text.",
)
@click.option(
    "--fetch-images",
    is_flag=True,
    default=None,
    help="Fetch images that a request names by http, from public addresses.",
)
@click.option(
    "--logit-bias-vocabulary",
    metavar="NAME",
    help="Token ids of requests are of this vocabulary: cl100k_base, o200k_base …",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    default=None,
    help="In process: go on from what prompts of other keys have evaluated.",
)
@click.option("--queue", type=int, metavar="N", help="Requests that may wait; more: 429.  [1024]")
@click.option("--drain", type=int, help="Seconds for running requests after SIGTERM.  [30]")
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
    TOML file of --config (port = 8080), in this order.
    """
    _run(_serve(settings))


@main.command()
@_options
@_loading
def check(settings: Settings) -> None:
    """Show what an engine can do, as a table; exit code 1 if it cannot be reached.

    \b
    Examples:
      latimer check
      latimer check http://127.0.0.1:5001
    """
    sys.exit(asyncio.run(_check(settings)))


class _Conform(click.Command):
    """The judge's command, which lives with its checks and is imported when it is called."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """See `click.Command.make_context`."""
        if not all(map(find_spec, CONFORMANCE)):
            _fail(
                "'latimer conform' needs the extra 'conformance': "
                "pip install 'latimer[conformance]'."
            )
        from ..conformance.command import conform

        return conform.make_context(*args, **kwargs)


main.add_command(_Conform("conform", short_help="Judge any server that claims OpenAI's API."))


async def _check(settings: Settings) -> int:
    from .discovery import describe

    try:
        backend = await _backend(settings)
    except Exception as error:
        click.echo(printable(str(error)))
        return EXIT_CHECK
    try:
        reachable, rows = await describe(backend)
    finally:
        await backend.aclose()
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {printable(value)}")
    return 0 if reachable else EXIT_CHECK


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run on uvloop where there is one; there is none for Windows."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _backend(settings: Settings) -> Backend:
    from .discovery import backend_of

    return await backend_of(settings, _Progress() if sys.stderr.isatty() else None)


async def _serve(settings: Settings) -> None:
    import uvicorn

    from ..backends.errors import LatimerError
    from .listening import bound
    from .vocabularies import load

    try:
        sockets = bound(settings.host, settings.port)
    except OSError as error:
        _fail(f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}.")
    try:
        if settings.logit_bias_vocabulary is not None:
            load(settings.logit_bias_vocabulary)
        backend = await _backend(settings)
        model = await backend.model()
    except LatimerError as error:
        _fail(error.message)
    app = _adapter_of(settings, backend)
    names = settings.model_name or [model.name]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    listening = f"http://{host}:{sockets[0].getsockname()[1]}/v1"
    click.echo(
        f"Latimer serves {printable(', '.join(names))} ({backend.capabilities.engine}, "
        f"{model.context} tokens) at {listening}",
        err=True,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=settings.drain,
        )
    )
    # A request leaves no cycles behind, and what start-up made stays: looking for garbage in it
    # again and again costs a tenth of all requests. Looking seldom makes each look a long pause:
    # 50,000 young objects take 30 ms, which is a frame too late for every stream.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)
    # uvicorn drains, and then raises the signal again: for us a stop that went well is no death.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    await server.serve(sockets)
    if not server.started:
        sys.exit(EXIT_START)


def _adapter_of(settings: Settings, backend: Backend) -> OpenAIAdapter:
    """The app over a backend, as the settings say."""
    from .app import OpenAIAdapter

    return OpenAIAdapter(
        backend,
        model_names=settings.model_name,
        any_model=settings.any_model,
        api_keys=settings.keys(),
        share_prefixes=settings.share_prefixes,
        cors_origins=settings.cors_origin,
        max_body=settings.max_body,
        strict=settings.strict,
        parse_content=settings.parse_content,
        fetch_images=settings.fetch_images,
        chat_format=settings.chat_format,
        logit_bias_vocabulary=settings.logit_bias_vocabulary,
    )


class _Progress:
    """A line on the terminal that grows while a model loads."""

    def __init__(self) -> None:
        self._percent = -1

    def __call__(self, fraction: float) -> None:
        percent = int(fraction * 100)
        if percent != self._percent:
            self._percent = percent
            end = "\n" if percent == 100 else ""
            click.echo(f"\rLoading the model … {percent:3d} %{end}", nl=False, err=True)


def _fail(message: str) -> NoReturn:
    click.echo(f"Latimer cannot start: {printable(message)}", err=True)
    sys.exit(EXIT_START)
