"""The options of the commands, made from the fields of `Settings`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic.fields import FieldInfo
from typing_extensions import override

from ..option import ENGINE, MODEL_FILE, STORE, is_list, option_of, type_of
from ..settings import Settings

Command = Callable[..., None]
Decorator = Callable[[Command], Command]


# What llama-server's options are called here, if not the same.
_FILE, _NAME = "the argument FILE", "the argument hf:ORG/REPO"
_OF_LLAMA_SERVER = {
    "-m": _FILE, "--model": _FILE, "-hf": _NAME, "-hfr": _NAME, "--hf-repo": _NAME,
    "-c": "--context", "--ctx-size": "--context",
    "-np": "--parallel", "-t": "--threads", "-b": "--batch", "--batch-size": "--batch",
    "-ub": "--batch", "--ubatch-size": "--batch",
    "-ngl": "--gpu-layers", "--n-gpu-layers": "--gpu-layers",
    "-fa": "--flash-attention", "--flash-attn": "--flash-attention",
    "-ctk": "--cache-type", "--cache-type-k": "--cache-type",
    "-ctv": "--cache-type", "--cache-type-v": "--cache-type", "-cram": "--cache-ram",
    "-a": "--model-name", "--alias": "--model-name",
    "-mm": "--mmproj", "--lora-scaled": "--lora FILE=SCALE",
    "-md": "--draft-model", "--model-draft": "--draft-model",
    "--embedding": "--embeddings", "--rerank": "--pooling rank", "--reranking": "--pooling rank",
}  # fmt: skip


class Sectioned(click.Command):
    """A command of settings.

    Its help has a section for each group of them. Its errors know llama-server's options.
    """

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = [word.partition("=")[0] for word in args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            own = {name for one in self.params for name in one.opts}
            for word in words:
                found = _OF_LLAMA_SERVER.get(word, "")
                # click reads the letters after one dash as options of their own.
                is_it = error.option_name in (word, *(f"-{letter}" for letter in word[1:]))
                if is_it and (found in (_FILE, _NAME) or found.partition(" ")[0] in own):
                    text = f"No such option '{word}'. llama-server's '{word}' is {found} here."
                    raise click.NoSuchOption(word, text, ctx=ctx) from None
            raise

    @override
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            field = Settings.model_fields.get(parameter.name or "")
            if record is not None:
                group = "Options" if field is None else option_of(field).group
                sections.setdefault(group, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)


def options(names: Sequence[str]) -> Decorator:
    """Add `--config` and the options of some settings to a command."""

    def add(command: Command) -> Command:
        # Of several decorators, the last one is the first in the help.
        for name in reversed(names):
            command = option(name, Settings.model_fields[name])(command)
        return click.option(
            "--config", type=click.Path(path_type=Path), help="Read settings from this TOML file."
        )(command)

    return add


def option(name: str, field: FieldInfo) -> Decorator:
    """Return the option of a setting; the model is an argument."""
    own, kind = option_of(field), type_of(field)
    if name == "model":
        return click.argument(
            name, required=False, metavar=own.metavar, shell_complete=_models_or_files
        )
    flags = ["--" + one.replace("_", "-") for one in (name, own.alias) if one is not None]
    named: dict[str, Any] = {"help": help_of(field), "metavar": own.metavar}
    if is_list(field):
        named["multiple"] = True
    # The help of a flag with a metavar does not list its values.
    if own.choices or (get_origin(kind) is Literal and own.metavar is None):
        named["type"] = click.Choice(own.choices or get_args(kind))
    elif kind is Path:
        named["type"] = click.Path(path_type=Path)
    elif kind is bool:
        named["default"] = None
        if field.default is None:
            flags = [f"{flag}/--no-{flag[2:]}" for flag in flags]
        else:
            named["is_flag"] = True
    else:
        named["type"] = kind if kind in (int, float) and own.convert is None else str
    return click.option(*flags, **named)


def help_of(field: FieldInfo) -> str:
    """Return the help of a setting, which ends with its default."""
    own, default = option_of(field), field.default
    text = field.description or ""
    if own.in_process:
        text = f"In process: {text[:1].lower()}{text[1:]}"
    if own.default is None and default not in (None, False, []):
        return f"{text}  [{default:g}]" if isinstance(default, float) else f"{text}  [{default}]"
    return f"{text}  [{own.default}]" if own.default else text


def _models_or_files(*place: Any) -> Any:
    # A start does not need it.
    from .completion import models_or_files

    return models_or_files(*place)


serve = options(
    [name for name, field in Settings.model_fields.items() if not option_of(field).is_table]
)
check = options(
    [
        name
        for name, field in Settings.model_fields.items()
        if option_of(field).group in (ENGINE, MODEL_FILE, STORE)
        or name in ("workers", "otel", "speech", "transcription")
    ]
)
storage = options(["store", "store_age", "store_size", "store_media"])
