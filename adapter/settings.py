"""Settings from flags, the environment (`LATIMER_…`) and a TOML file, in this order."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from ..backends.base import Pooling
from ..backends.llama_cpp.options import CacheType
from ..backends.queue import QUEUE
from ..schemas.limits import BODY
from .auth import UnusableKey, check_key, keys_of
from .chat.instruct import FORMATS
from .errors import printable
from .hosted import Limits
from .origins import LocalRules
from .service import KEEPALIVE
from .store.config import LARGEST, MEMORY, Place, media_of, place_of, seconds_of, target_of

BackendName = Literal["auto", "llama-cpp", "llama-server", "koboldcpp"]
Words = Annotated[list[str], NoDecode]

ENVIRONMENT = "LATIMER_"
# Settings for the in-process engine only, and settings for an engine at a URL only.
IN_PROCESS: tuple[str, ...] = (
    "context", "parallel", "threads", "batch", "gpu_layers", "cache_type", "cache_memory",
    "flash_attention", "mmap", "mlock", "mmproj", "lora", "exact", "share_prefixes", "embeddings",
    "pooling",
)  # fmt: skip
ELSEWHERE: tuple[str, ...] = ("engine_key", "engine_timeout")
# Settings for a store that is not off.
STORING: tuple[str, ...] = ("store_age", "store_size", "store_media")
# The largest settings file, in bytes.
MOST_FILE = 2**20
# A day, in seconds: event loops do not support much longer timers.
DAY = 86_400
# The shortest `keepalive`, in seconds.
SHORTEST = 0.1


# The functions that raise an error for a wrong value.
_STORED: Mapping[str, Callable[[str], object]] = {
    "store": target_of,
    "store_age": seconds_of,
    "store_media": media_of,
}


class WrongSettings(ValueError):
    """Settings that cannot be used; the message is one line and shows no secret."""


class Settings(BaseSettings):
    """The settings of `latimer serve` and `latimer check`.

    Lists are comma-separated in the environment and arrays in the file.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT,
        extra="forbid",
        # An invalid value can be an API key.
        hide_input_in_errors=True,
    )

    _file: Path | None = PrivateAttr(None)
    _given: frozenset[str] = PrivateAttr(frozenset())

    # A URL can contain a password.
    model: str | None = Field(None, repr=False, description="A GGUF file, or the URL of an engine.")
    backend: BackendName = Field("auto", description="The engine; detected by default.")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    model_name: Words = Field(default_factory=list, description="Model names for clients.")
    any_model: bool = False
    api_key: Annotated[list[SecretStr], NoDecode] = Field(default_factory=list)
    api_key_file: Path | None = Field(None, description="A file with one API key per line.")
    cors_origin: Words = Field(
        default_factory=list, description="Origins of web pages that may call the server."
    )
    allowed_host: Words = Field(
        default_factory=list, description="Other host names of this server, without an API key."
    )
    max_body: Annotated[int, Field(ge=1)] = BODY.most
    strict: bool = False
    limits: Limits = Field(
        "engine", description="The limits for requests: the engine's or OpenAI's."
    )
    parse_content: bool = False
    fetch_images: bool = False
    chat_format: str | None = Field(None, description="The name of an instruct format.")
    share_prefixes: bool = False
    drain: Annotated[int, Field(ge=0, le=DAY)] = Field(
        30, description="Seconds that running requests get after SIGTERM."
    )
    wait: bool = Field(False, description="Wait for the engine before accepting requests.")
    engine_key: SecretStr | None = Field(None, description="API key of the engine.")
    engine_timeout: Annotated[float, Field(gt=0, le=DAY, allow_inf_nan=False)] = Field(
        60.0, description="Seconds without data before a response of llama-server fails."
    )
    queue: Annotated[int, Field(ge=0, le=2**20)] = Field(
        QUEUE, description="Requests that may wait for the engine."
    )
    keepalive: Annotated[float, Field(ge=0, le=DAY, allow_inf_nan=False)] = Field(
        KEEPALIVE, description="Seconds of silence before a stream sends a comment; 0 for never."
    )
    reasoning_key: SecretStr | None = Field(
        None,
        min_length=1,
        description="The secret that seals the reasoning which clients of Responses keep.",
    )
    reasoning_field: Literal["reasoning_content", "reasoning", "none"] = Field(
        "reasoning_content", description="The field of messages for reasoning; none to omit it."
    )
    # A URL can contain a password.
    store: str = Field(MEMORY, repr=False, description="memory, a file, a URL, or off.")
    store_age: str | None = Field(None, description="A duration such as 24h, or forever.")
    store_size: Annotated[int, Field(ge=1, le=LARGEST)] | None = Field(
        None, description="The most that stored objects may take, in MiB."
    )
    store_media: str | None = Field(None, description="A folder, or s3://BUCKET/PREFIX.")
    store_required: bool = Field(False, description="Reject a request that cannot be stored.")
    context: Annotated[int, Field(ge=1, le=2**24)] | None = None
    parallel: Annotated[int, Field(ge=1, le=256)] = 16
    # llama.cpp aborts with more than 512 threads (GGML_MAX_N_THREADS).
    threads: Annotated[int, Field(ge=1, le=512)] | None = None
    batch: Annotated[int, Field(ge=1, le=2**20)] = 512
    gpu_layers: Annotated[int, Field(ge=-1, le=2**20)] = -1
    cache_type: CacheType | None = None
    cache_memory: Annotated[int, Field(ge=0, le=2**30)] | None = Field(
        None, description="Host memory for saved prompts, in MiB."
    )
    flash_attention: bool | None = None
    mmap: bool | None = None
    mlock: bool = False
    mmproj: Path | None = Field(None, description="Multimodal projector, for images or audio.")
    lora: Words = Field(default_factory=list, description="LoRA adapters, FILE or FILE=SCALE.")
    exact: bool = False
    embeddings: bool | None = Field(
        None, description="Serve embeddings; by default only for a model that is made for them."
    )
    pooling: Pooling | None = Field(None, description="The model's pooling; the file's by default.")
    matryoshka: bool = Field(
        False, description="The model was trained for vectors of fewer dimensions."
    )
    logit_bias_vocabulary: str | None = Field(
        None, description="Vocabulary of the token ids in requests: cl100k_base, o200k_base …"
    )

    @field_validator("model_name", "cors_origin", "allowed_host", "api_key", "lora", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        return value

    @field_validator(
        "port", "max_body", "drain", "engine_timeout", "keepalive", "context", "parallel",
        "threads", "batch", "cache_memory", "gpu_layers", "store_age", "store_size", mode="before",
    )  # fmt: skip
    @classmethod
    def _number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise PydanticCustomError("int_type", "expected a number, but got a boolean")
        return value

    @field_validator("keepalive")
    @classmethod
    def _interval(cls, value: float) -> float:
        if 0 < value < SHORTEST:
            raise ValueError(f"expected 0 for never, or at least {SHORTEST} seconds, not {value}")
        return value

    @field_validator("chat_format")
    @classmethod
    def _known(cls, value: str | None) -> str | None:
        if value is not None and value not in FORMATS:
            raise ValueError(
                f"unknown format {value!r}; supported formats are {', '.join(FORMATS)}"
            )
        return value

    @field_validator("store_age", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    @field_validator("store", "store_age", "store_media")
    @classmethod
    def _stored(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            _STORED[info.field_name or ""](value)
        return value

    @field_validator("model_name")
    @classmethod
    def _named(cls, value: list[str]) -> list[str]:
        if not all(name.strip() for name in value):
            raise ValueError("a model name is empty")
        return value

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        LocalRules(origins=value)
        return value

    @field_validator("allowed_host")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        LocalRules(hosts=value)
        return value

    @field_validator("flash_attention", mode="before")
    @classmethod
    def _where_possible(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("gpu_layers", mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        return -1 if value == "all" else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources: flags, then the environment; `load` adds the file after them."""
        return init_settings, env_settings

    @classmethod
    def load(cls, file: Path | None, **flags: Any) -> Settings:
        """Load the settings of a command from its flags, the environment and the file.

        Raises:
            WrongSettings: a value is not allowed, the file cannot be read, or it has an unknown
                key.
        """
        given = {name: value for name, value in flags.items() if value is not None and value != ()}
        values = {} if file is None else read_file(file)

        class WithFile(cls):  # type: ignore[valid-type, misc]
            @classmethod
            def settings_customise_sources(
                cls, settings_cls: type[BaseSettings], *sources: Any, **named: Any
            ) -> tuple[PydanticBaseSettingsSource, ...]:
                first = super().settings_customise_sources(settings_cls, *sources, **named)
                return *first, InitSettingsSource(settings_cls, values)

        def place(name: str) -> str:
            return _place(name, frozenset(given), file)

        try:
            settings: Settings = WithFile(**given)
        except ValidationError as error:
            message = in_words(error, place, cls.model_fields, str(file))
            raise WrongSettings(f"{message}.") from None
        settings._file, settings._given = file, frozenset(given)
        settings.store_place()
        return settings

    def place(self, name: str) -> str:
        """Return the flag, the variable, or the file and key that set a setting, for messages."""
        return _place(name, self._given, self._file)

    def store_place(self) -> Place | None:
        """Return where objects are stored; None if the store is off.

        Raises:
            WrongSettings: the settings of the store contradict each other.
        """
        try:
            return place_of(
                self.store, self.store_age, self.store_size, self.store_media, self.store_required
            )
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            raise WrongSettings(f"{self.place(name)}: {reason}.") from None

    @property
    def reasoning_secret(self) -> str | None:
        """`reasoning_key`, which no message may show."""
        return None if self.reasoning_key is None else self.reasoning_key.get_secret_value()

    @property
    def cache_bytes(self) -> int | None:
        """`cache_memory` in bytes."""
        return None if self.cache_memory is None else self.cache_memory << 20

    def adapters(self) -> list[tuple[str, float]]:
        """Return the file and the scale of each LoRA adapter.

        Raises:
            ValueError: the text after the equals sign is not a number.
        """
        found = []
        for one in self.lora:
            path, _, scale = one.rpartition("=") if "=" in one else (one, "", "1")
            try:
                found.append((path, float(scale)))
            except ValueError:
                raise ValueError(
                    f"{self.place('lora')}: {one!r} must end with a number after '='"
                ) from None
        return found

    def keys(self) -> list[str]:
        """Return all API keys, from `api_key` and from `api_key_file`.

        Raises:
            UnusableKey: a key, or the engine's key, cannot be sent in a header, or a setting for
                keys contains none.
            OSError: the file cannot be read.
        """
        keys = [key.get_secret_value() for key in self.api_key]
        if self.api_key_file is not None:
            keys += keys_of(self.api_key_file)
        if not keys and "api_key" in self.model_fields_set:
            # `LATIMER_API_KEY=$UNSET` must not result in a server without keys.
            raise UnusableKey("api_key: no key is set. Omit it to serve without API keys.")
        for key in keys:
            check_key(key, "api_key")
        if self.engine_key:
            check_key(self.engine_key.get_secret_value(), "engine_key")
        return keys


def read_file(file: Path) -> dict[str, Any]:
    """Return the values in a TOML file.

    Raises:
        WrongSettings: the file cannot be read, or is not valid TOML; the message names the line.
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_FILE + 1)
        if len(data) > MOST_FILE:
            raise WrongSettings(
                f"{file} is too large for settings; at most {MOST_FILE} bytes are allowed."
            )
        return tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings(f"{file} is not valid TOML: {error}.") from None
    except RecursionError:
        raise WrongSettings(f"{file} is nested too deeply; settings are not nested.") from None
    except (OSError, UnicodeError) as error:
        raise WrongSettings(f"{file} cannot be read: {reason_of(error)}.") from None
    except WrongSettings:
        raise
    except ValueError:
        # Python parses no integer of more than 4,300 digits.
        raise WrongSettings(f"{file} contains an invalid number or date.") from None


def _place(name: str, given: frozenset[str], file: Path | None) -> str:
    """Return the place that a setting came from; of several, the one that takes precedence."""
    if name in given:
        return "The model" if name == "model" else "--" + name.replace("_", "-")
    for variable in os.environ:
        if variable.lower() == (ENVIRONMENT + name).lower():
            return variable
    return name if file is None else f"{file}: {name}"


# Settings whose values are never shown.
SECRET = frozenset({"api_key", "engine_key", "store"})
# The most errors to describe.
_MOST = 3
_LONGEST = 60

_EXPECTED = {
    "flash_attention": "auto, on or off",
    "gpu_layers": "a whole number of layers, or all",
    "store_age": "a duration such as 90s, 15m, 24h or 30d, or forever",
}
_KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "a table",
    "float": "a number",
    "finite": "a number",
    "int": "a whole number",
    "list": "a list of strings",
    "path": "the path of a file",
    "string": "a string",
}
_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def reason_of(error: Exception) -> str:
    """Return the reason why a file could not be read, without Python's own prefix."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def in_words(
    error: ValidationError, place: Callable[[str], str], known: Collection[str], file: str
) -> str:
    """Return one line that describes the errors in settings.

    Args:
        place: returns the flag, the variable or the key in the file that a setting came from.
        known: the names of all settings.
        file: the file that unknown settings came from.
    """
    details = error.errors(include_url=False)
    lines = [_line(detail, place, known, file) for detail in details[:_MOST]]
    if len(details) > _MOST:
        lines.append(f"and {len(details) - _MOST} more")
    return "; ".join(lines)


def _line(
    detail: Mapping[str, Any], place: Callable[[str], str], known: Collection[str], file: str
) -> str:
    name, kind, value = str(detail["loc"][0]), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        return f"{file}: unknown setting '{printable(name[:_LONGEST])}'{hint}"
    where = place(name) + "".join(
        f"[{step}]" for step in detail["loc"][1:] if isinstance(step, int)
    )
    if kind == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    return f"{where} must be {_expected(name, kind, detail)}{_shown(name, value)}"


def _expected(name: str, kind: str, detail: Mapping[str, Any]) -> str:
    """Describe the values that a setting may have."""
    context = detail.get("ctx") or {}
    if kind in _BOUNDS:
        bound = next(value for key, value in context.items() if key in ("gt", "ge", "lt", "le"))
        return f"{_BOUNDS[kind]} {bound}"
    if name in _EXPECTED:
        return _EXPECTED[name]
    if kind == "literal_error":
        return "one of " + str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kind == "string_unicode":
        return "valid UTF-8"
    if kind == "int_parsing_size":
        return "a smaller number"
    return _KINDS.get(kind.partition("_")[0], "another value")


def _shown(name: str, value: Any) -> str:
    """Return the value that was given, or an empty string if it is long or secret."""
    if name in SECRET or value is None:
        return ""
    if isinstance(value, dict):
        return ", not a table"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", not a list"
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    if isinstance(value, int) and value.bit_length() > 64:
        return ""
    text = str(value)
    if len(text) > _LONGEST:
        return ""
    return f", not '{printable(text)}'" if isinstance(value, str) else f", not {text}"
