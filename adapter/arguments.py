"""The keyword arguments of an adapter, which docs call its options: checks, and words for errors.

Their bounds are those of the settings of `latimer serve`: the fields of `Settings` have them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, create_model

from ..backends.errors import LatimerError, RequestError
from .errors import worded
from .hosted import Limits
from .limits.config import AdmissionConfig, KeyConfig
from .metric_rows import Names
from .model_entry import ModelEntry, ReasoningField
from .observers import Observer
from .option import option_of, type_of
from .origins import LocalRules
from .settings import Checked, Settings
from .settings_file import errors_in_words

if TYPE_CHECKING:
    from ..backends.speech.base import Speaker, Transcriber


class Options(TypedDict, total=False):
    """The options of an adapter.

    Args:
        model_names: the model names for clients; by default the engine's own name.
        any_model: accept every model name.
        api_keys: reject requests with 401 that do not send one of these keys in
            `Authorization: Bearer …` or `x-api-key`. Without keys, every client is accepted: with
            None, the default. An empty list or key is an error.
        keys: more keys, each with a name and its table (`limits.config.KeyConfig`): its digest, the
            models that it may use, and its limits.
        admission: the store of these limits (`limits.config.AdmissionConfig`); memory by default.
        share_prefixes: share the prompt cache of the in-process engine across API keys, and count
            what any engine's has of other keys. A client can then infer other clients' prompts.
        cors_origins: the web pages of other origins that may read responses in a browser, `*` for
            all. By default the adapter sends no CORS headers, so that those of an app around it
            hold; only pages of the same host may open a WebSocket.
        local_rules: the rules of `latimer serve` without a key (`origins.LocalRules`), instead of
            `cors_origins`. They reject requests from other pages, and requests to unknown host
            names. By default there are none.
        max_body: the largest request body, in bytes; by default 32 MiB.
        strict: reject unknown fields, and fields that the engine only approximates; implies
            `limits="openai"`.
        limits: `openai` to apply the limits of OpenAI's hosted service too; by default `engine`:
            a request may ask for what the engine can do.
        parse_content: parse control tokens in message text. The author of a message can then
            forge messages of any role.
        fetch_images: fetch images from the http and https URLs in a request, at public addresses
            only. By default only data: URLs are accepted.
        chat_format: the name of an instruct format (`INSTRUCT_FORMATS`) that replaces the model's
            chat template. The `adapter` of a request overrides it.
        logit_bias_vocabulary: the vocabulary of the token ids in requests, by its name in tiktoken
            (`cl100k_base`); by default the model's own.
        keepalive: the seconds of silence after which a stream sends a comment, 10 by default; 0
            sends none.
        websocket_lifetime: the seconds after which a WebSocket of responses closes, 3,600 by
            default; 0 refuses WebSockets.
        reasoning_field: the field of messages for reasoning: `reasoning_content` (the default),
            `reasoning`, or None to omit reasoning from responses.
        matryoshka: cut vectors to the `dimensions` of a request. Use it only for a model that was
            trained for it; by default `dimensions` is rejected.
        reasoning_key: the secret that seals the reasoning which clients of Responses keep
            (`encrypted_content`). By default it is random, so that sealed reasoning can be opened
            until the end of the process.
        store: where requests with `store: true` are kept: `memory` (the default), the path of an
            SQLite file, a URL `postgresql://…`, or `off`.
        store_age: the time that they are kept: a duration such as `24h`, or seconds; `forever`. By
            default 24 hours in memory, else for ever.
        store_size: the MiB that all of them may take; the key with the most loses its oldest. By
            default 64 in memory, else there is no limit.
        store_media: a folder or `s3://BUCKET/PREFIX` for their images and audio; by default a
            folder next to an SQLite file, else the database.
        store_required: reject a request that cannot be stored.
        metrics: measure requests, and serve `/metrics` for Prometheus if an empty prefix is served.
        metrics_names: `vllm` for vLLM's names of the metrics that it has too.
        metrics_open: serve `/metrics` to requests without an API key, too.
        playground: serve a web page at `/` (`playground`); False by default. The prefixes must have
            `/v1` and an empty one.
        speaker: speaks answers and texts (`backends.speech`); by default the engine's own.
        transcriber: transcribes recordings (`backends.speech`); by default the engine's own.
    """

    model_names: Sequence[str]
    any_model: bool
    api_keys: Iterable[str] | None
    keys: Mapping[str, KeyConfig | Mapping[str, Any]]
    admission: AdmissionConfig | Mapping[str, Any]
    share_prefixes: bool
    cors_origins: Sequence[str] | None
    local_rules: LocalRules | None
    max_body: int
    strict: bool
    limits: Limits
    parse_content: bool
    fetch_images: bool
    chat_format: str | None
    logit_bias_vocabulary: str | None
    keepalive: float
    websocket_lifetime: float
    reasoning_field: ReasoningField | None
    reasoning_key: str | None
    matryoshka: bool
    store: str
    store_age: str | float | None
    store_size: int | None
    store_media: str | None
    store_required: bool
    metrics: bool
    metrics_names: Names
    metrics_open: bool
    playground: bool
    speaker: "Speaker | None"
    transcriber: "Transcriber | None"


# The defaults of `latimer serve`, without rules for pages and without the playground.
DEFAULTS = cast(
    "Options",
    {
        "local_rules": None,
        **Settings.model_construct().arguments("adapter"),
        "api_keys": None,
        "cors_origins": None,
        "playground": False,
        "speaker": None,
        "transcriber": None,
    },
)

# What `store_config_of` checks, which knows how these belong together.
_STORE = frozenset({"store", "store_age", "store_size", "store_media"})
# An element of each option that is a list, for errors.
_ONE = {
    "api_keys": "'secret'",
    "cors_origins": "'https://chat.example'",
    "model_names": "'gpt-4o'",
    "observers": "RequestLog(print)",
    "prefixes": "'/v1'",
}
_LISTS = frozenset({"api_keys", "cors_origins", "model_names"})
# The options that have no setting: a name that only their objects have, and an example.
_OBJECTS = (
    ("local_rules", "allows_origin", "LocalRules()"),
    ("speaker", "speak", "speaker_of('piper:voice.onnx')"),
    ("transcriber", "transcribe", "transcriber_of('faster-whisper')"),
)
# What every observer has; only those that follow begin with a request.
_OF_OBSERVERS = ("keeps", "follows", "take", "close")
_PREFIX = re.compile(r"|(/[^/{}?#\s]+)+")


def _keywords() -> Mapping[str, str]:
    """Return the keyword of each setting of an adapter or an engine in process, by its option."""
    # What a command makes of these settings is an argument of an app.
    found = {"--speech": "speaker", "--transcription": "transcriber"}
    for name, field in Settings.model_fields.items():
        option = option_of(field)
        if {"adapter", "llama-cpp"} & {*option.to}:
            value = "=True" if field.annotation is bool else ""
            found["--" + name.replace("_", "-")] = option.argument_of(name) + value
    return found


_KEYWORDS = _keywords()
# An option, and its value in the texts of errors. llama-server has some of these options, too.
_OPTION = re.compile(r"(or )?(?<!llama-server with )(--[a-z]+(?:-[a-z]+)*)(?: (off|memory)\b)?")


def _check_vocabulary(name: str) -> None:
    from .generation.token_ids import check_vocabulary

    check_vocabulary(name)


# The checks that differ from those of the settings. Tests of an app do not wait as long as the
# shortest interval of a command. Commands load the vocabulary at their start, with its own errors.
_CHECKS: Mapping[str, Callable[[Any], object] | None] = {
    "keepalive": None,
    "logit_bias_vocabulary": _check_vocabulary,
}


class _Strict(Checked):
    model_config = ConfigDict(strict=True, hide_input_in_errors=True)


def _model() -> type[BaseModel]:
    """Return a model of the options: their own types, and the bounds of the settings."""
    fields: dict[str, Any] = {}
    for name, field in Settings.model_fields.items():
        option = option_of(field)
        argument = option.argument_of(name)
        if "adapter" not in option.to or argument in _STORE:
            continue
        kind = Options.__annotations__[argument]
        if option.is_table:
            kind = field.annotation
        elif argument in _LISTS:
            kind = list[str] | None
        if argument in _CHECKS:
            option = option._replace(check=_CHECKS[argument])
        shows = field.repr and type_of(field) is not SecretStr
        own = Field(repr=shows, json_schema_extra=cast("Any", option))
        fields[argument] = (Annotated[kind, own, *field.metadata], None)
    made: type[BaseModel] = create_model("CheckedOptions", __base__=_Strict, **fields)
    return made


_MODEL = _model()


def checked(options: Options) -> Options:
    """Return options with their defaults.

    Raises:
        TypeError: an option is unknown.
        ValueError: a value is wrong; the message names the option and shows no secret.
    """
    unknown = options.keys() - DEFAULTS.keys()
    if unknown:
        # A misspelt `api_keys` must not start a server without keys.
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {**options}
    for name in _LISTS & values.keys():
        if values[name] is not None or name == "model_names":
            values[name] = listed(name, values[name])
    if "api_keys" in values and values["api_keys"] is not None:
        # `os.environ.get` returns None for a variable that is not set.
        values["api_keys"] = ["" if key is None else key for key in values["api_keys"]]
        if not values["api_keys"]:
            raise ValueError("api_keys: the list is empty. Omit api_keys to serve without API keys")
    for name in ("keys", "admission"):
        if isinstance(values.get(name), Mapping):
            values[name] = dict(values[name])
    given = {name: value for name, value in values.items() if name in _MODEL.model_fields}
    try:
        found = _MODEL.model_validate(given)
    except ValidationError as error:
        raise ValueError(errors_in_words(error, _MODEL.model_fields, str, None)) from None
    for name, kind, example in _OBJECTS:
        value = values.get(name)
        if value is not None and not (hasattr(value, kind) and not isinstance(value, type)):
            raise ValueError(f"{name} must be an object such as {example}, not {_shown(value)}")
    values |= {name: getattr(found, name) for name in given}
    return cast("Options", {**DEFAULTS, **values})


def listed(name: str, value: object, of: str = " of strings") -> list[Any]:
    """Return the elements of an option that is a list.

    Args:
        of: the kind of the elements, for the error.

    Raises:
        ValueError: it is a string, of which each letter would be an element, or no iterable.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list{of}: pass a list, such as [{_ONE[name]}]")
    return [*value]


def prefixes_of(value: Sequence[str]) -> Sequence[str]:
    """Return the path prefixes of an API.

    Raises:
        ValueError: they are not a list, or one of them is not the beginning of a path.
    """
    found = listed("prefixes", value)
    for prefix in found:
        if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
            raise ValueError(
                f"prefixes: {prefix!r} is not the beginning of a path. Expected '' or a text such "
                "as '/v1', without a final slash and without parameters in braces"
            )
    return found


def observers_of(value: Iterable[Observer]) -> list[Observer]:
    """Return the observers of requests.

    Raises:
        ValueError: they are not a list, or one of them does not observe.
    """
    found = listed("observers", value, of="")
    for one in found:
        if isinstance(one, type) or not all(hasattr(one, name) for name in _OF_OBSERVERS):
            raise ValueError(
                "observers must be objects with the base class Observer, such as "
                f"RequestLog(print), not {_shown(one)}"
            )
    return found


def entries_of(backend: object) -> Sequence[ModelEntry] | None:
    """Return the models of `OpenAIAdapter`'s argument `backend`; None for one engine.

    Raises:
        TypeError: it is neither an engine nor a list of `ModelEntry`.
    """
    if isinstance(backend, Sequence) and not isinstance(backend, str):
        if backend and all(isinstance(one, ModelEntry) for one in backend):
            return backend
        wrong = "a list of something else" if backend else "an empty list"
    elif isinstance(backend, type) or not hasattr(backend, "open"):
        wrong = _shown(backend)
    else:
        return None
    raise TypeError(
        f"backend must be an engine of latimer.backends, or a list of ModelEntry, not {wrong}"
    )


def in_keywords(error: LatimerError) -> LatimerError:
    """Return an error that names the keywords of settings, which an app has instead of options."""
    facts = worded(error) if isinstance(error, RequestError) else error
    message = _OPTION.sub(_keyword, facts.message)
    if message != facts.message:
        facts.message = message
        return facts
    return error


def _keyword(found: re.Match[str]) -> str:
    before, option, value = found.groups(default="")
    keyword = _KEYWORDS.get(option)
    if keyword is None:
        return found[0]
    if before and "=" not in keyword:
        # A field of the request can have the same name.
        before = "or in the setting "
    return before + (f'{keyword}="{value}"' if value else keyword)


def _shown(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}: make an instance of it"
    return "None" if value is None else f"a value of type {type(value).__name__}"
