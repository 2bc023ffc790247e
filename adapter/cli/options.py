"""The options of the commands, in groups; their help shows them in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

Command = Callable[..., None]

_config = click.option(
    "--config", type=click.Path(path_type=Path), help="Read settings from this TOML file."
)
_PLACE = (
    click.option(
        "--store",
        metavar="STORE",
        help="Where responses, conversations, and chat completions with store: true are kept: "
        "memory, a file such as FILE.db, postgresql://USER:PASSWORD@HOST/NAME, or off.  [memory]",
    ),
    click.option(
        "--store-age",
        metavar="DURATION",
        help="How long they are kept: 90s, 15m, 24h, 30d, forever.  [in memory 24h, else forever]",
    ),
    click.option(
        "--store-size",
        type=int,
        metavar="MIB",
        help="Size of all of them, media included; the oldest are deleted.  [in memory 64, "
        "else no limit]",
    ),
    click.option(
        "--store-media",
        metavar="PLACE",
        help="Where their images and audio are kept: a folder, or s3://BUCKET/PREFIX.  "
        "[FILE.media next to FILE.db]",
    ),
)


def common(command: Command) -> Command:
    """Add the options that both commands share: the engine, the way to reach it, the store."""
    decorators = (
        click.argument("model", required=False, metavar="[MODEL.gguf | URL]"),
        _config,
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
        _store,
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


def storage(command: Command) -> Command:
    """Add the options of `latimer store`: the settings file, and the place of the store."""
    return _decorated(command, (_config, *_PLACE))


def _store(command: Command) -> Command:
    """Add the options for stored completions."""
    decorators = (
        *_PLACE,
        click.option(
            "--store-required",
            is_flag=True,
            default=None,
            help="Reject a request that cannot be stored.",
        ),
    )
    return _decorated(command, decorators)


def serving(command: Command) -> Command:
    """Add the options of the server: its clients, its rules, its start and its end."""
    return _decorated(command, (_clients, _rules, _operation))


def _clients(command: Command) -> Command:
    """Add the options for the address and for the clients that may use it."""
    decorators = (
        click.option("--host", help="Address to listen on.  [127.0.0.1]"),
        click.option("--port", type=int, help="Port to listen on.  [8000]"),
        click.option("--model-name", multiple=True, help="Model name for clients; repeatable."),
        click.option("--any-model", is_flag=True, default=None, help="Accept every model name."),
        click.option(
            "--api-key", multiple=True, help="API key that clients must send; repeatable."
        ),
        click.option(
            "--api-key-file",
            type=click.Path(path_type=Path),
            help="File with one API key per line.",
        ),
        click.option(
            "--cors-origin",
            multiple=True,
            metavar="ORIGIN",
            help=(
                "Origin of web pages that may call the server: https://chat.example, null, *; "
                "repeatable.  [local pages and apps; with an API key: all]"
            ),
        ),
        click.option(
            "--allowed-host",
            multiple=True,
            metavar="NAME",
            help="Without an API key: another host name of this server; repeatable.",
        ),
        click.option("--max-body", type=int, help="Largest request body in bytes.  [33554432]"),
    )
    return _decorated(command, decorators)


def _rules(command: Command) -> Command:
    """Add the options for the requests that are accepted, and how they are read."""
    decorators = (
        click.option(
            "--strict",
            is_flag=True,
            default=None,
            help="Reject unknown fields, and fields that the engine only approximates; implies "
            "--limits openai.",
        ),
        click.option(
            "--limits",
            type=click.Choice(["engine", "openai"]),
            help="Allow what the engine can do, or only what OpenAI's service allows.  [engine]",
        ),
        click.option(
            "--chat-format",
            metavar="NAME",
            help="Instruct format to use instead of the chat template: alpaca, chatml, llama-3 …",
        ),
        click.option(
            "--parse-content",
            is_flag=True,
            default=None,
            help="Parse control tokens in messages; by default they are text.",
        ),
        click.option(
            "--fetch-images",
            is_flag=True,
            default=None,
            help="Fetch images from http and https URLs with public addresses.",
        ),
        click.option(
            "--logit-bias-vocabulary",
            metavar="NAME",
            help="Vocabulary of the token ids in requests: cl100k_base, o200k_base …",
        ),
        click.option(
            "--matryoshka",
            is_flag=True,
            default=None,
            help="Cut vectors to the dimensions of a request; only for models trained for it.",
        ),
        click.option(
            "--share-prefixes",
            is_flag=True,
            default=None,
            help="In process: share the prompt cache across API keys.",
        ),
    )
    return _decorated(command, decorators)


def _operation(command: Command) -> Command:
    """Add the options for the queue, for replies, and for the start and the end."""
    decorators = (
        click.option(
            "--queue",
            type=int,
            metavar="N",
            help="Requests that may wait for the engine; more get status 429.  [1024]",
        ),
        click.option(
            "--reasoning-key",
            metavar="SECRET",
            help="Secret that seals the reasoning which clients of Responses keep.  [random]",
        ),
        click.option(
            "--reasoning-field",
            type=click.Choice(["reasoning_content", "reasoning", "none"]),
            help="Field of messages for reasoning; none to omit it.  [reasoning_content]",
        ),
        click.option(
            "--keepalive",
            type=float,
            metavar="SECONDS",
            help="Seconds of silence before a stream sends a comment; 0 for never.  [10]",
        ),
        click.option(
            "--drain", type=int, help="Seconds that running requests get after SIGTERM.  [30]"
        ),
        click.option(
            "--wait",
            is_flag=True,
            default=None,
            help="Accept requests only when the engine is ready; by default respond with 503 "
            "until then.",
        ),
    )
    return _decorated(command, decorators)


def _decorated(command: Command, decorators: Sequence[Callable[[Command], Command]]) -> Command:
    """Add options to a command; its help shows them in this order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
