"""The tables of a fleet in the settings file: engines, machines and models.

`adapter/settings.py` adds the settings of today to them: an engine's own, and those of requests.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

Affinity: TypeAlias = Literal["prefix", "session", "none"]

# The place in an engine's command for the port that Latimer chooses.
PORT = "{port}"
# The name of the memory of a machine that has one kind only.
MEMORY = "memory"

_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?) ?([KMGT]i?B|B)")
_BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
# Seconds that a request waits before the engines in its way accept no more requests.
MOST_WAIT = 30.0
# The longest time, in seconds; event loops do not support much longer timers.
_LONGEST = 86_400


def seconds_of(value: object) -> float:
    """Return the seconds of a duration such as `90s`, `15m` or `24h`.

    Raises:
        ValueError: it is not a duration, or longer than a day.
    """
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"expected a duration such as 30s, 15m or 24h, not {value!r:.60}")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"expected a duration of more than 0s and at most 24h, not {value!r:.60}")
    return seconds


def memory_of(value: object) -> dict[str, int]:
    """Return the bytes of each kind of memory, from one size or a table of sizes.

    Raises:
        ValueError: it is neither, or a size has no unit.
    """
    sizes = value if isinstance(value, dict) else {MEMORY: value}
    if not sizes:
        raise ValueError('expected a size such as "22GiB", or a table of them, not an empty table')
    return {str(name): _bytes_of(size) for name, size in sizes.items()}


def _bytes_of(value: object) -> int:
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'expected a size such as "22GiB" or "512MiB", not {value!r:.60}')
    return int(float(found[1]) * _BYTES[found[2]])


_TEXT_OF_SECONDS = {"type": "string", "pattern": f"^{_DURATION.pattern}$", "examples": ["15m"]}
_TEXT_OF_BYTES = {"type": "string", "pattern": f"^{_SIZE.pattern}$", "examples": ["22GiB"]}
Duration: TypeAlias = Annotated[
    float, BeforeValidator(seconds_of), WithJsonSchema(_TEXT_OF_SECONDS)
]
Memory: TypeAlias = Annotated[
    dict[str, int],
    BeforeValidator(memory_of),
    WithJsonSchema(
        {"anyOf": [_TEXT_OF_BYTES, {"type": "object", "additionalProperties": _TEXT_OF_BYTES}]}
    ),
]
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# The characters of the name of a table.
_LONGEST_NAME = 200
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]


class Table(BaseModel):
    """A table of the settings file; tables with equal values are equal."""

    # `Settings` validates them, as parts of itself.
    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, defer_build=True
    )


class EngineConfig(Table):
    """An engine: at a URL, in this process, or started by Latimer."""

    # A URL can contain a password.
    url: str | None = Field(
        None,
        min_length=1,
        description="Address of a running llama-server or koboldcpp.",
        repr=False,
    )
    model: Name | None = Field(
        None, description="With `url`: one model of a llama-server in router mode."
    )
    file: str | None = Field(
        None,
        min_length=1,
        description="GGUF file for an engine in this process, or `hf:ORG/REPO`.",
    )
    command: tuple[str, ...] | None = Field(
        None,
        description="Command that starts an engine; `{port}` is the port that Latimer chooses.",
    )
    places: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="Calls that run at a time; by default what the engine reports.",
    )
    start_timeout: Duration = Field(
        300.0, description="With `command` or `model`: time until the model must be loaded."
    )
    idle: Duration | None = Field(
        None, description="Unload after this time without requests; by default never."
    )
    machine: Name | None = Field(None, description="Machine whose memory the engine uses.")
    memory: Memory | None = Field(
        None, description="Memory that the engine needs; by default measured at its last load."
    )

    @model_validator(mode="after")
    def _is_one_engine(self) -> Self:
        given = [name for name in ("url", "file", "command") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            if not given and self.model is not None and self.model.startswith("hf:"):
                raise ValueError(f'write file = "{self.model}" for a model of the hub')
            raise ValueError(f"expected one of url, file and command, but got {found}")
        if self.model is not None and self.url is None:
            raise ValueError("model needs url: it names one model of a llama-server's router")
        if self.command is not None and not any(PORT in word for word in self.command):
            raise ValueError(f"command must contain {PORT}, which becomes the engine's port")
        return self

    @property
    def is_loaded_on_demand(self) -> bool:
        """True if Latimer loads and unloads the model."""
        return self.command is not None or self.model is not None


class MachineConfig(Table):
    """A machine, whose memory its engines share."""

    memory: Memory = Field(description="Memory for models: a size, or a table of sizes by name.")
    most_wait: Duration = Field(
        MOST_WAIT,
        description="Time that a request waits before busy models in its way accept no more.",
    )


class ModelConfig(Table):
    """A model: the engines that serve it, and the rules for its requests."""

    engines: tuple[Name, ...] = Field(
        description="Engines that serve the model, by the names of their tables.", min_length=1
    )
    aliases: tuple[Name, ...] = Field((), description="More names of the model for clients.")
    affinity: Affinity = Field(
        "prefix",
        description="How an engine is chosen: by the prompt's prefix, by the session, or by load.",
    )
    pinned: bool = Field(False, description="Never unload the model.")
    queue: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="Requests that may wait for the model; by default the setting `queue`.",
    )
    load_wait: Duration = Field(
        600.0, description="Time that a plain request waits while its model loads."
    )
    fallback: tuple[Name, ...] = Field(
        (), description="Models that serve a request if this one cannot, before its first event."
    )
    defaults: Mapping[str, Any] = Field(
        default_factory=dict, description="Fields for requests that do not set them."
    )


def contradictions(
    engines: Mapping[str, EngineConfig],
    machines: Mapping[str, MachineConfig],
    models: Mapping[str, ModelConfig],
) -> Iterator[tuple[str, str]]:
    """Yield the keys of tables that contradict another table, each with the reason."""
    for kind, tables in (("engines", engines), ("machines", machines), ("models", models)):
        for name in tables:
            if not 0 < len(name) <= _LONGEST_NAME:
                yield f"{kind}.{name[:9]!r}", f"a name has 1 to {_LONGEST_NAME} characters"
            elif _CONTROL.search(name):
                # It is in headers, and in lines of the log.
                yield f"{kind}.{name!r}", "a name has no line break and no other control character"
    for name, engine in engines.items():
        yield from _of_engine(f"engines.{name}", engine, machines)
    taken: dict[str, str] = {name: f"models.{name}" for name in models}
    for name, model in models.items():
        for key, known in (("engines", engines), ("fallback", models)):
            words: tuple[str, ...] = getattr(model, key)
            for index, word in enumerate(words):
                place = f"models.{name}.{key}[{index}]"
                if word not in known:
                    allowed = ", ".join(known) or "none"
                    yield place, f"there is no table {key_of(key)}.{word}; there are: {allowed}"
                elif word in words[:index] or (key == "fallback" and word == name):
                    yield place, f"{word!r} is the model itself, or given twice"
        for index, alias in enumerate(model.aliases):
            place = f"models.{name}.aliases[{index}]"
            if _CONTROL.search(alias):
                yield place, f"{alias!r} has a line break or another control character"
            other = taken.setdefault(alias, place)
            if other != place:
                yield place, f"{alias!r} is already a name: {other}"


def key_of(key: str) -> str:
    """Return the table that the words of a key of a model name."""
    return "engines" if key == "engines" else "models"


def _of_engine(
    place: str, engine: EngineConfig, machines: Mapping[str, MachineConfig]
) -> Iterator[tuple[str, str]]:
    if engine.machine is None:
        return
    machine = machines.get(engine.machine)
    if machine is None:
        allowed = ", ".join(machines) or "none"
        yield (
            f"{place}.machine",
            f"there is no table machines.{engine.machine}; there are: {allowed}",
        )
        return
    for kind, size in (engine.memory or {}).items():
        if kind not in machine.memory:
            yield (
                f"{place}.memory",
                f"machines.{engine.machine}.memory has no {kind!r}; it has: "
                f"{', '.join(machine.memory)}",
            )
        elif size > machine.memory[kind]:
            yield (
                f"{place}.memory",
                f"{size} bytes of {kind!r} are more than machines.{engine.machine} has",
            )


def names_of(models: Mapping[str, ModelConfig]) -> dict[str, str]:
    """Return every name and alias of the models, with the name of the model's table."""
    found = {name: name for name in models}
    for name, model in models.items():
        for alias in model.aliases:
            found.setdefault(alias, name)
    return found


def served_by(
    engines: Mapping[str, EngineConfig], models: Mapping[str, ModelConfig]
) -> Mapping[str, ModelConfig]:
    """Return the models; without tables of models, each engine is one under its own name."""
    return models or {name: ModelConfig(engines=(name,)) for name in engines}
