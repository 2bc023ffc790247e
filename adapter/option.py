"""The properties of a setting, and the functions that declare one (`settings.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, get_args, get_origin

from pydantic import Field
from pydantic.fields import FieldInfo

# What a setting has no effect without.
Need: TypeAlias = Literal["a GGUF file", "an engine at a URL", "a store"]

# The groups of settings, in the order of the help.
ENGINE, MODEL_FILE, STORE = "Engine", "Model file", "Store"
CLIENTS, REQUESTS, SERVER = "Clients", "Requests", "Server"
# The tables of the file, which are not options of the commands.
FLEET = "Fleet"


class Option(NamedTuple):
    """The properties of a setting that are not properties of a pydantic field.

    Args:
        group: the group of settings that it belongs to.
        needs: what it has no effect without.
        in_process: True if a llama-server that Latimer starts for a file has no such option.
        to: what gets its value: `adapter` (`OpenAIAdapter`), or the names of engines.
        argument: the keyword argument that gets it; by default its own name.
        value: returns the value of the argument; by default its own.
        metavar: its value in the help.
        default: its default in the help; by default the field's.
        alias: another name of its flag, which llama-server has.
        choices: the values of its flag, if not the field's.
        convert: returns the value for a word, such as -1 for `all`; the flag then takes any text.
        check: raises a ValueError if a value is wrong.
        expected: the values that it may have, for errors.
        is_secret: True if no error and no repr shows its value.
        is_table: True for tables of the file, which no flag can set.
    """

    group: str
    needs: Need | None = None
    in_process: bool = False
    to: tuple[str, ...] = ()
    argument: str | None = None
    value: Callable[[Any], object] | None = None
    metavar: str | None = None
    default: str | None = None
    alias: str | None = None
    choices: tuple[str, ...] = ()
    convert: Callable[[Any], Any] | None = None
    check: Callable[[Any], object] | None = None
    expected: str | None = None
    is_secret: bool = False
    is_table: bool = False

    def argument_of(self, name: str) -> str:
        """Return the keyword argument that gets the value of a setting."""
        return self.argument or name

    def __call__(self, schema: dict[str, Any]) -> None:
        """Complete the JSON schema of the setting, which pydantic has made from its type."""
        if self.convert is not None and schema.get("type") not in (None, "string"):
            schema["type"] = [schema["type"], "string"]


_OPTION = frozenset(Option._fields)


def setting(initial: Any, description: str, **properties: Any) -> Any:
    """Return the field of a setting.

    Args:
        initial: its default.
        description: its help, which ends with a full stop.
        properties: of its `Option`, and of pydantic's `Field`, such as `ge`.
    """
    option = Option(**{name: properties.pop(name) for name in _OPTION & properties.keys()})
    if option.is_secret:
        properties["repr"] = False
    extra: Any = option
    if option.is_table:
        return Field(
            default_factory=initial, description=description, json_schema_extra=extra, **properties
        )
    return Field(initial, description=description, json_schema_extra=extra, **properties)


engine_setting = partial(setting, group=ENGINE)
file_setting = partial(setting, group=MODEL_FILE, needs="a GGUF file", to=("llama-cpp",))
store_setting = partial(setting, group=STORE, to=("adapter",))
client_setting = partial(setting, group=CLIENTS)
request_setting = partial(setting, group=REQUESTS, to=("adapter",))
server_setting = partial(setting, group=SERVER)
table_setting = partial(setting, group=FLEET, is_table=True)

# The properties of a key of a table that is not a setting too.
_NONE = Option(group=FLEET)


def option_of(field: FieldInfo) -> Option:
    """Return the properties of a setting that are not pydantic's."""
    extra: Any = field.json_schema_extra
    return extra if isinstance(extra, Option) else _NONE


def type_of(field: FieldInfo) -> Any:
    """Return the type of a setting, or of the elements of its list, without None."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    is_wrapped = is_list(field) or NoneType in get_args(field.annotation)
    return kinds[0] if is_wrapped else field.annotation


def is_list(field: FieldInfo) -> bool:
    """Return True if a setting is a list."""
    return get_origin(field.annotation) is list
