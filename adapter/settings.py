"""The settings of the commands, from flags, the environment (`LATIMER_…`) and a TOML file.

A field of `Settings` is the only place of a setting. The options of the commands
(`cli/options.py`), the tables in docs/serving.md, and the arguments of `OpenAIAdapter` and of the
engines are made from the fields.
"""

import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from ..backends.base import Pooling
from ..backends.fleet.config import (
    EngineConfig,
    MachineConfig,
    ModelConfig,
    Table,
    contradictions,
    served_by,
)
from ..backends.llama_cpp.options import BATCH, BOUNDS, CACHE_DISK, PARALLEL, CacheType
from ..backends.queue import QUEUE
from ..schemas.limits import BODY
from .auth import UnusableKey, check_key, keys_of
from .chat.instruct import INSTRUCT_FORMATS
from .environment import ENVIRONMENT, is_address, unknown_variables, variables_of
from .limits.config import AdmissionConfig, KeyConfig, wrong_keys
from .option import (
    ENGINE,
    MODEL_FILE,
    REQUESTS,
    Need,
    client_setting,
    engine_setting,
    file_setting,
    is_list,
    option_of,
    request_setting,
    server_setting,
    store_setting,
    table_setting,
    type_of,
)
from .settings_file import MOST_ERRORS, WrongSettings, errors_in_words, read_file, reason_of
from .store.config import (
    LARGEST,
    MEMORY,
    StoreConfig,
    media_of,
    seconds_of,
    store_config_of,
    target_of,
)

BackendName = Literal["auto", "llama-cpp", "llama-server", "koboldcpp"]

# What is wrong with the port if the variable is that of Kubernetes.
_SERVICE_LINK = (
    "LATIMER_PORT is an address, not a port: Kubernetes sets it in all containers of a namespace "
    "that has a service with the name latimer. Set enableServiceLinks: false in the pod, or "
    "LATIMER_PORT in the container."
)
# What may wait in front of an engine of a fleet, whose requests wait in one queue before it.
_UNLIMITED = 2**20
# The most processes of a server.
MOST_WORKERS = 64
# A day, in seconds: event loops do not support much longer timers.
DAY = 86_400
# The shortest `keepalive`, in seconds.
SHORTEST = 0.1


def _bytes_of(mib: int | None) -> int | None:
    return sys.maxsize if mib == -1 else None if mib is None else mib << 20


def _bounds_of(name: str) -> dict[str, int]:
    """Return the bounds of an option of the in-process engine, for a field."""
    least, most = BOUNDS[name]
    return {"ge": least, "le": most}


def _check_names(names: list[str]) -> None:
    if not all(name.strip() for name in names):
        raise ValueError("a model name is empty")
    if not all(map(_is_utf_8, names)):
        raise ValueError("a model name is UTF-8 text")


def _check_model(model: str) -> None:
    # llama.cpp opens no such file, and its name could not be sent to a client.
    if not _is_utf_8(model):
        raise ValueError("the name of a file is UTF-8 text; rename this one, or make a link to it")


def _is_utf_8(text: str) -> bool:
    """Return False for a text of the command line or the environment that had other bytes."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _check_format(name: str) -> None:
    if name not in INSTRUCT_FORMATS:
        raise ValueError(
            f"unknown format {name!r}; supported formats are {', '.join(INSTRUCT_FORMATS)}"
        )


def _check_interval(seconds: float) -> None:
    if 0 < seconds < SHORTEST:
        raise ValueError(f"expected 0 for never, or at least {SHORTEST} seconds, not {seconds}")


# `origins` imports Starlette, which the help of a command does not need.
def _check_origins(origins: list[str]) -> None:
    from .origins import LocalRules

    LocalRules(origins=origins)


def _check_hosts(hosts: list[str]) -> None:
    from .origins import LocalRules

    LocalRules(hosts=hosts)


def _unbracketed(host: Any) -> Any:
    """Return an address of IPv6 without the brackets that it has in a URL."""
    is_bracketed = isinstance(host, str) and host.startswith("[") and host.endswith("]")
    return host[1:-1] if is_bracketed and ":" in host else host


def _check_proxies(proxies: list[str]) -> None:
    from .proxies import networks_of

    networks_of(proxies)


class Checked(BaseModel):
    """A model whose values are converted and checked as the `Option`s of its fields say."""

    @field_validator("*", mode="wrap")
    @classmethod
    def _convert(
        cls, value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> Any:
        field = cls.model_fields[info.field_name or ""]
        option = option_of(field)
        if isinstance(value, str) and is_list(field):
            value = [word.strip() for word in value.split(",") if word.strip()]
        elif isinstance(value, bool) and type_of(field) in (int, float):
            kind = "int_type" if type_of(field) is int else "float_type"
            raise PydanticCustomError(kind, "expected a number, but got a boolean")
        elif option.convert is not None:
            value = option.convert(value)
        found = validate(value)
        if option.check is not None and found is not None:
            option.check(found)
        return found


class FlatSettings(Checked):
    """The settings that flags and the environment can set, in the order of their help."""

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        # An invalid value can be an API key.
        hide_input_in_errors=True,
        # Only `Settings` is validated.
        defer_build=True,
    )

    # A URL can contain a password.
    model: str | None = engine_setting(
        None,
        "A GGUF file, the URL of an engine, or the name of a model on a hub.",
        metavar="[MODEL.gguf | URL | hf:ORG/REPO]",
        check=_check_model,
        repr=False,
    )
    backend: BackendName = engine_setting("auto", "The engine; detected by default.", default="")
    offline: bool = engine_setting(
        False, "For names on a hub: use only what is downloaded, without the network."
    )
    engine_key: SecretStr | None = engine_setting(
        None,
        "API key of the engine.",
        needs="an engine at a URL",
        to=("llama-server", "koboldcpp"),
        argument="key",
    )
    engine_timeout: float = engine_setting(
        60.0,
        "llama-server: seconds without data before a response fails.",
        needs="an engine at a URL",
        to=("llama-server",),
        argument="timeout",
        metavar="SECONDS",
        gt=0,
        le=DAY,
        allow_inf_nan=False,
    )

    context: int | None = file_setting(
        None,
        "Size of the KV cache in tokens, shared by parallel choices.",
        default="the model's, over llama-server for each choice; at most 8192",
        **_bounds_of("context"),
    )
    parallel: int = file_setting(
        PARALLEL,
        "Choices that run in parallel.",
        default="in process 16, else 4",
        **_bounds_of("parallel"),
    )
    threads: int | None = file_setting(None, "Number of CPU threads.", **_bounds_of("threads"))
    batch: int = file_setting(BATCH, "Batch size in tokens.", **_bounds_of("batch"))
    gpu_layers: int = file_setting(
        -1,
        "Number of layers on the GPU, or all.",
        default="all",
        convert=lambda value: -1 if value == "all" else value,
        expected="a whole number of layers, or all",
        **_bounds_of("gpu_layers"),
    )
    cache_type: CacheType | None = file_setting(
        None,
        "KV cache type: f32, f16, bf16, q8_0, q4_0 …",
        metavar="TYPE",
        default="f16",
    )
    cache_memory: int | None = file_setting(
        None,
        "Host memory for saved prompts; -1 for no limit.",
        alias="cache_ram",
        metavar="MIB",
        default="a quarter of the free memory, at most 8192",
        value=lambda self: _bytes_of(self.cache_memory),
        ge=-1,
        le=2**30,
    )
    cache_dir: Path | None = file_setting(
        None,
        "Folder for saved prompts that leave host memory, which lasts across restarts.",
        in_process=True,
        metavar="FOLDER",
    )
    cache_disk: int = file_setting(
        CACHE_DISK >> 20,
        "Size of this folder.",
        in_process=True,
        metavar="MIB",
        value=lambda self: self.cache_disk << 20,
        ge=1,
        le=2**30,
    )
    flash_attention: bool | None = file_setting(
        None,
        "Flash attention.",
        choices=("auto", "on", "off"),
        default="auto",
        convert=lambda value: None if value == "auto" else value,
        expected="auto, on or off",
    )
    mmap: bool | None = file_setting(None, "Memory-map the model file.", default="where it helps")
    mlock: bool = file_setting(False, "Lock the weights in RAM.")
    mmproj: Path | None = file_setting(
        None, "Multimodal projector, for images or audio.", metavar="FILE"
    )
    lora: list[str] = file_setting(
        [],
        "LoRA adapter; repeatable.",
        metavar="FILE[=SCALE]",
        value=lambda self: self.adapters(),
    )
    embeddings: bool | None = file_setting(
        None, "Serve embeddings.", default="for models made for them"
    )
    pooling: Pooling | None = file_setting(
        None, "Pooling of embeddings.", default="the model's own"
    )
    exact: bool = file_setting(
        False, "Logprobs that are independent of other requests; slower.", in_process=True
    )
    prompt_lookup: bool | None = file_setting(
        None,
        "Draft tokens that repeat earlier ones.",
        in_process=True,
        default="on",
        value=lambda self: self.prompt_lookup is not False,
    )
    draft_model: Path | None = file_setting(
        None,
        "Smaller model with the same vocabulary, which drafts tokens.",
        in_process=True,
        metavar="FILE",
    )
    trace: Path | None = file_setting(
        None, "Trace of the engine's steps, for Perfetto.", in_process=True, metavar="FILE"
    )

    # A URL can contain a password.
    store: str = store_setting(
        MEMORY,
        "Where responses, conversations and stored chat completions are kept: memory, FILE.db, "
        "postgresql://…, or off.",
        metavar="STORE",
        check=target_of,
        is_secret=True,
    )
    store_age: str | None = store_setting(
        None,
        "How long they are kept: 90s, 15m, 24h, 30d, forever.",
        needs="a store",
        metavar="DURATION",
        default="in memory 24h, else forever",
        convert=lambda value: str(value) if type(value) is int else value,
        check=seconds_of,
        expected="a duration such as 90s, 15m, 24h or 30d, or forever",
    )
    store_size: int | None = store_setting(
        None,
        "Size of all of them, media included; the key with the most loses its oldest.",
        needs="a store",
        metavar="MIB",
        default="in memory 64, else no limit",
        ge=1,
        le=LARGEST,
    )
    store_media: str | None = store_setting(
        None,
        "Where their images and audio are kept: a folder, or s3://BUCKET/PREFIX.",
        needs="a store",
        metavar="PLACE",
        default="FILE.media next to FILE.db",
        check=media_of,
    )
    store_required: bool = store_setting(False, "Reject a request that cannot be stored.")

    host: str = client_setting("127.0.0.1", "Address to listen on.", convert=_unbracketed)
    port: int = client_setting(8000, "Port to listen on.", ge=0, le=65535)
    model_name: list[str] = client_setting(
        [],
        "Model name for clients; repeatable.",
        to=("adapter",),
        argument="model_names",
        check=_check_names,
    )
    any_model: bool = client_setting(False, "Accept every model name.", to=("adapter",))
    api_key: list[SecretStr] = client_setting(
        [],
        "API key that clients must send; repeatable.",
        to=("adapter",),
        argument="api_keys",
        value=lambda self: self.api_keys() or None,
    )
    api_key_file: Path | None = client_setting(None, "File with one API key per line.")
    admin_key: SecretStr | None = client_setting(
        None,
        "Key for the paths under /admin, which latimer ps, load, unload and drain use; without one "
        "there are no such paths.",
        metavar="KEY",
    )
    admin_socket: Path | None = client_setting(
        None, "Unix socket for the same paths: only its owner can connect, and needs no key."
    )
    cors_origin: list[str] = client_setting(
        [],
        "Origin of web pages that may call the server, null, or *; repeatable.",
        to=("adapter",),
        argument="cors_origins",
        value=lambda self: self.cors_origin or ["*"],
        metavar="ORIGIN",
        default="local pages and apps; with an API key: all",
        check=_check_origins,
    )
    allowed_host: list[str] = client_setting(
        [],
        "Without an API key: another host name of this server; repeatable.",
        metavar="NAME",
        check=_check_hosts,
    )
    trusted_proxies: list[str] = client_setting(
        [],
        "Address or network of a proxy whose X-Forwarded-For names the client in the log; "
        "repeatable.",
        metavar="ADDRESS",
        check=_check_proxies,
    )
    max_body: int = client_setting(
        BODY.maximum, "Largest request body in bytes.", to=("adapter",), ge=1
    )

    strict: bool = request_setting(
        False,
        "Reject unknown fields, and fields that the engine only approximates; implies --limits "
        "openai.",
    )
    limits: Literal["engine", "openai"] = request_setting(
        "engine", "Allow what the engine can do, or only what OpenAI's service allows."
    )
    chat_format: str | None = request_setting(
        None,
        "Instruct format to use instead of the chat template: alpaca, chatml, llama-3 …",
        metavar="NAME",
        check=_check_format,
    )
    parse_content: bool = request_setting(
        False, "Parse control tokens in messages; by default they are text."
    )
    fetch_images: bool = request_setting(
        False, "Fetch images from http and https URLs with public addresses."
    )
    logit_bias_vocabulary: str | None = request_setting(
        None,
        "Vocabulary of the token ids in requests: cl100k_base, o200k_base …",
        metavar="NAME",
    )
    matryoshka: bool = request_setting(
        False, "Cut vectors to the dimensions of a request; only for models trained for it."
    )
    share_prefixes: bool = request_setting(
        False,
        "Share the prompt cache across API keys; over other engines, which share it: count what it "
        "has of other keys.",
    )

    workers: int = server_setting(
        1,
        "Processes that share the port, for more requests than one core can carry; only for "
        "engines at a URL.",
        metavar="N",
        ge=1,
        le=MOST_WORKERS,
    )
    queue: int = server_setting(
        QUEUE,
        "Requests that may wait for the engine; more get status 429.",
        to=("llama-cpp", "llama-server", "koboldcpp"),
        argument="max_waiting",
        value=lambda self: self.share_of(self.queue),
        metavar="N",
        ge=0,
        le=2**20,
    )
    reasoning_key: SecretStr | None = server_setting(
        None,
        "Secret that seals the reasoning which clients of Responses keep.",
        to=("adapter",),
        metavar="SECRET",
        default="random",
        min_length=1,
    )
    reasoning_field: Literal["reasoning_content", "reasoning", "none"] = server_setting(
        "reasoning_content",
        "Field of messages for reasoning; none to omit it.",
        to=("adapter",),
        value=lambda self: None if self.reasoning_field == "none" else self.reasoning_field,
    )
    keepalive: float = server_setting(
        10.0,
        "Seconds of silence before a stream sends a comment; 0 for never.",
        to=("adapter",),
        metavar="SECONDS",
        check=_check_interval,
        ge=0,
        le=DAY,
        allow_inf_nan=False,
    )
    websocket_lifetime: int = server_setting(
        3_600,
        "Seconds after which a WebSocket of /v1/responses closes; 0 refuses WebSockets.",
        to=("adapter",),
        metavar="SECONDS",
        ge=0,
        le=DAY,
    )
    timeout_keep_alive: int = server_setting(
        5, "Seconds for which a connection may be idle between requests.",
        metavar="SECONDS", ge=1, le=DAY,
    )  # fmt: skip
    shutdown_delay: int = server_setting(
        0, "Seconds after SIGTERM or Ctrl-C in which /ready is a 503, before the drain begins.",
        metavar="SECONDS", default="0", ge=0, le=DAY,
    )  # fmt: skip
    drain: int = server_setting(
        30, "Seconds that running requests get after SIGTERM or Ctrl-C.", ge=0, le=DAY
    )
    metrics: bool | None = server_setting(
        None,
        "Measure requests, and serve /metrics for Prometheus.",
        to=("adapter",),
        default="on",
        value=lambda self: self.metrics is not False,
    )
    metrics_names: Literal["latimer", "vllm"] = server_setting(
        "latimer",
        "Names of the metrics; vllm for those of vLLM, where it has the metric.",
        to=("adapter",),
    )
    metrics_open: bool = server_setting(
        False, "Serve /metrics to requests without an API key, too.", to=("adapter",)
    )
    playground: bool | None = server_setting(
        None,
        "Serve the playground, a web page, at /.",
        to=("adapter",),
        default="on",
        value=lambda self: self.playground is not False,
    )
    speech: str | None = server_setting(
        None,
        "Voice that speaks: piper:VOICE.onnx, sherpa-onnx:FOLDER, or the URL of a koboldcpp.",
        metavar="NAME:MODEL|URL",
        default="the engine, if it can",
    )
    transcription: str | None = server_setting(
        None,
        "What transcribes: a library with its model, or the URL of a koboldcpp.",
        metavar="NAME[:MODEL]|URL",
        default="the engine, if it can",
    )
    log_requests: bool | None = server_setting(
        None,
        "Log each request at its end, on standard error, without its content.",
        default="on",
    )
    log_format: Literal["text", "json"] | None = server_setting(
        None,
        "Format of the log.",
        default="without a terminal json, if requests are logged; else text",
    )
    log_level: Literal["debug", "info", "warning", "error"] = server_setting(
        "info", "Least level of lines in the log; warning leaves requests that failed here."
    )
    log_content: bool = server_setting(
        False, "Log responses with their text too, in JSON; for debugging."
    )
    otel: bool | None = server_setting(
        None,
        "Send spans and metrics of requests by OpenTelemetry.",
        default="on if an OTEL_EXPORTER_OTLP_…ENDPOINT is set",
    )
    wait: bool = server_setting(
        False,
        "Accept requests only when the engine is ready; by default respond with 503 until then.",
    )


def _with_settings(table: type[Table], settings: Sequence[str]) -> Any:
    """Return a table that can have some settings too; unset ones are those of the whole file."""
    fields: dict[str, Any] = {
        name: (FlatSettings.model_fields[name].annotation, FlatSettings.model_fields[name])
        for name in settings
    }
    return create_model(table.__name__, __base__=(table, Checked), __doc__=table.__doc__, **fields)


def _in_group(*groups: str) -> list[str]:
    return [
        name
        for name, field in FlatSettings.model_fields.items()
        if option_of(field).group in groups and name != "model"
    ]


# The settings that a table of an engine, and one of a model, can have for itself.
OF_ENGINE = _in_group(ENGINE, MODEL_FILE)
OF_MODEL = [
    *(name for name in _in_group(REQUESTS) if name not in ("limits", "share_prefixes")),
    "keepalive",
    "reasoning_field",
]

if TYPE_CHECKING:
    EngineTable: TypeAlias = EngineConfig
    ModelTable: TypeAlias = ModelConfig
else:
    EngineTable = _with_settings(EngineConfig, OF_ENGINE)
    ModelTable = _with_settings(ModelConfig, OF_MODEL)


class Settings(FlatSettings, defer_build=False):
    """The settings of `latimer serve` and `latimer check`.

    Lists are comma-separated in the environment and arrays in the file. Tables are in the file
    only.
    """

    _file: Path | None = PrivateAttr(None)
    _given: frozenset[str] = PrivateAttr(frozenset())
    _flags: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    engines: dict[str, EngineTable] = table_setting(
        dict, "engines, at a URL, in this process, or started by Latimer."
    )
    machines: dict[str, MachineConfig] = table_setting(
        dict, "machines, whose memory engines share."
    )
    models: dict[str, ModelTable] = table_setting(
        dict, "models, the engines that serve them, and the rules for their requests."
    )
    keys: dict[str, KeyConfig] = table_setting(
        dict, "keys of clients, by their digests, with permissions and limits.", to=("adapter",)
    )
    admission: AdmissionConfig = table_setting(
        AdmissionConfig, "the store of the limits of keys.", to=("adapter",)
    )

    @classmethod
    def load(cls, file: Path | None, **flags: Any) -> Self:
        """Load the settings of a command from its flags, the environment and the file.

        Raises:
            WrongSettings: a value is not allowed, the file cannot be read, or it has an unknown
                key.
        """
        given = {name: value for name, value in flags.items() if value is not None and value != ()}
        values = {} if file is None else read_file(file)
        variables = variables_of(cls.model_fields)
        if is_address(variables.get("port")) and "port" not in given:
            raise WrongSettings(_SERVICE_LINK)
        try:
            settings = cls.model_validate({**values, **variables, **given})
        except ValidationError as error:
            place = partial(_place, given=frozenset(given), file=file)
            raise WrongSettings(
                f"{errors_in_words(error, cls.model_fields, place, file)}."
            ) from None
        settings._file, settings._given, settings._flags = file, frozenset(given), given
        settings.store_place()
        settings._check_tables()
        return settings

    @staticmethod
    def unknown_variables() -> list[tuple[str, str]]:
        """Return each variable `LATIMER_…` that names no setting, and what to do about it."""
        return unknown_variables(Settings.model_fields)

    @property
    def file(self) -> Path | None:
        """The file of the settings."""
        return self._file

    def reloaded(self) -> Self:
        """Return the settings that the file, the environment and the same flags give now.

        Raises:
            WrongSettings: as `load`.
        """
        return self.load(self._file, **self._flags)

    def with_flags(self, **flags: Any) -> Self:
        """Return the settings with more flags, which `reloaded` keeps.

        Raises:
            WrongSettings: as `load`.
        """
        return self.load(self._file, **{**self._flags, **flags})

    def share_of(self, queue: int) -> int:
        """Return what one worker may let wait if all of them together have this limit."""
        return -(-queue // self.workers)

    def _check_tables(self) -> None:
        """Raise `WrongSettings` if tables contradict each other, or a setting."""
        places = [
            *contradictions(self.engines, self.machines, self.models),
            *wrong_keys(self.keys),
        ]
        found = [f"{self._file}: {place}: {reason}" for place, reason in places]
        for name in self.engines:
            try:
                own = self.for_engine(name)
                own.adapters()
                own.check_engine_key()
            except ValueError as error:
                reason = str(error).removeprefix(f"{self._file}: ")
                found.append(f"{self._file}: engines.{name}: {reason}")
        for name in ("model", "model_name", "backend") if self.engines else ():
            if name in self.model_fields_set:
                where = self.source_of(name)
                found.append(f"{where}: it has no meaning with the tables of {self._file}; omit it")
        if found:
            raise WrongSettings("; ".join(found[:MOST_ERRORS]) + ".")

    def served(self) -> Mapping[str, ModelConfig]:
        """Return the models of the fleet; empty without tables."""
        return served_by(self.engines, self.models)

    def for_engine(self, name: str, model: str | None = None) -> Self:
        """Return the settings of one engine of the fleet, as those of a single engine.

        Args:
            model: the engine's URL or file; by default that of its table.
        """
        table = self.engines[name]
        own = {key: getattr(table, key) for key in OF_ENGINE if key in table.model_fields_set}
        place = model if model is not None else table.url or table.file
        return self.model_copy(update={**own, "model": place, "queue": _UNLIMITED})

    def for_model(self, model: ModelConfig) -> Self:
        """Return the settings of one model of the fleet, as those of a single model."""
        own = {key: getattr(model, key) for key in OF_MODEL if key in model.model_fields_set}
        return self.model_copy(update=own)

    def arguments(self, of: str) -> dict[str, Any]:
        """Return keyword arguments of `OpenAIAdapter` (`adapter`), or of an engine's class.

        Raises:
            ValueError: a setting is wrong, which `api_keys` and `adapters` find.
        """
        found = {}
        for name, field in Settings.model_fields.items():
            option = option_of(field)
            if of in option.to:
                value = getattr(self, name) if option.value is None else option.value(self)
                if isinstance(value, SecretStr):
                    value = value.get_secret_value()
                found[option.argument_of(name)] = value
        return found

    def unused(self, need: Need) -> list[str]:
        """Return where those settings were set that have no effect without something."""
        return [
            self.source_of(name)
            for name, field in Settings.model_fields.items()
            if option_of(field).needs == need and name in self.model_fields_set
        ]

    def source_of(self, name: str) -> str:
        """Return the flag, the variable, or the file and key that set a setting, for messages."""
        place = _place(name, self._given, self._file)
        has_choices = bool(option_of(Settings.model_fields[name]).choices)
        if name in self._given and getattr(self, name) is False and not has_choices:
            return place.replace("--", "--no-", 1)
        return place

    def store_place(self) -> StoreConfig | None:
        """Return where objects are stored; None if the store is off.

        Raises:
            WrongSettings: the settings of the store contradict each other.
        """
        try:
            return store_config_of(
                self.store, self.store_age, self.store_size, self.store_media, self.store_required
            )
        except ValueError as error:
            name, _, reason = str(error).partition(": ")
            raise WrongSettings(f"{self.source_of(name)}: {reason}.") from None

    def adapters(self) -> list[tuple[str, float]]:
        """Return the file and the scale of each LoRA adapter.

        Raises:
            ValueError: the text after the equals sign is not a number.
        """
        found = []
        for one in self.lora:
            path, _, text = one.rpartition("=") if "=" in one else (one, "", "1")
            try:
                scale = float(text)
            except ValueError:
                scale = math.nan
            if not math.isfinite(scale):
                raise ValueError(
                    f"{self.source_of('lora')}: {one!r} must end with a number after '='"
                )
            found.append((path, scale))
        return found

    def check_engine_key(self) -> None:
        """Raise `UnusableKey` if the engine's key cannot be sent in a header."""
        if self.engine_key:
            check_key(self.engine_key.get_secret_value(), "engine_key")

    def api_keys(self) -> list[str]:
        """Return all API keys, from `api_key` and from `api_key_file`.

        Raises:
            UnusableKey: a key, or the engine's key, cannot be sent in a header, or a setting for
                keys contains none.
            WrongSettings: the file cannot be read.
        """
        keys = [key.get_secret_value() for key in self.api_key]
        file = self.api_key_file
        try:
            keys += [] if file is None else keys_of(file)
        except (OSError, UnicodeError) as error:
            where, reason = self.source_of("api_key_file"), reason_of(error)
            raise WrongSettings(f"{where}: {file} cannot be read: {reason}.") from None
        if not keys and "api_key" in self.model_fields_set:
            # `LATIMER_API_KEY=$UNSET` must not result in a server without keys.
            raise UnusableKey("api_key: no key is set. Omit it to serve without API keys.")
        for key in keys:
            check_key(key, "api_key")
        if self.admin_key is not None:
            check_key(self.admin_key.get_secret_value(), "admin_key")
        self.check_engine_key()
        return keys


def schema_of_file() -> dict[str, Any]:
    """Return the JSON schema of the settings file."""
    schema = Settings.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"], schema["description"] = "Latimer", "The settings file of `latimer serve`."
    return schema


def _place(name: str, given: frozenset[str], file: Path | None) -> str:
    """Return the place that a setting came from; of several, the one that takes precedence."""
    if name in given:
        return "The model" if name == "model" else "--" + name.replace("_", "-")
    for variable in os.environ:
        if variable.lower() == (ENVIRONMENT + name).lower():
            return variable
    return name if file is None else f"{file}: {name}"
