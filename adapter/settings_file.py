"""The reading of a settings file, and what is wrong with its values in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from .errors import printable
from .option import option_of, type_of

# The largest settings file, in bytes.
MOST_FILE = 2**20


class WrongSettings(ValueError):
    """Settings that cannot be used; the message is one line and shows no secret."""


def read_file(file: Path) -> dict[str, Any]:
    """Return the values in a TOML file.

    Raises:
        WrongSettings: the file cannot be read, or is not valid TOML; the message names the line.
    """
    import tomllib

    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_FILE + 1)
        if len(data) > MOST_FILE:
            raise WrongSettings(
                f"{file} is too large for settings; at most {MOST_FILE} bytes are allowed."
            )
        # Editors of Windows begin a file with a byte order mark.
        return tomllib.loads(data.decode("utf-8-sig"))
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


# The most errors to describe.
MOST_ERRORS = 3
_LONGEST = 60
# The last step of pydantic's place of an error in the key of a dictionary.
_OF_NAME = "[key]"

_KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "a table",
    "float": "a number",
    "finite": "a number",
    "int": "a whole number",
    "list": "a list of strings",
    "path": "the path of a file",
    "string": "a string",
    "tuple": "a list of strings",
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


def errors_in_words(
    error: ValidationError,
    fields: Mapping[str, FieldInfo],
    place: Callable[[str], str],
    file: Path | None,
) -> str:
    """Return one line that describes the errors in settings.

    Args:
        fields: the settings by name.
        place: returns the flag, the variable or the key in the file that a setting came from.
        file: the file that unknown settings came from.
    """
    details = error.errors(include_url=False)
    lines = [_line(detail, fields, place, file) for detail in details[:MOST_ERRORS]]
    if len(details) > MOST_ERRORS:
        lines.append(f"and {len(details) - MOST_ERRORS} more")
    return "; ".join(lines)


def _line(
    detail: Mapping[str, Any],
    fields: Mapping[str, FieldInfo],
    place: Callable[[str], str],
    file: Path | None,
) -> str:
    steps: list[Any] = [*detail["loc"]]
    kind, value = detail["type"], detail["input"]
    field = fields.get(name := str(steps.pop(0)))
    where = place(name) if field is not None else ""
    while field is not None and steps and (table := _table_of(field)) is not None:
        if get_origin(field.annotation) is dict:
            where += f".{printable(str(steps.pop(0))[:_LONGEST])}"
        if not steps:
            break
        if steps[0] == _OF_NAME:
            return f"{where}: a name must be a string"
        fields = table.model_fields
        field = fields.get(name := str(steps.pop(0)))
        if field is not None:
            where += f".{name}"
    if field is None:
        import difflib

        near = difflib.get_close_matches(name, fields, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        if not where:
            return f"{file}: unknown setting '{printable(name[:_LONGEST])}'{hint}"
        return f"{where}.{printable(name[:_LONGEST])}: unknown setting{hint}"
    where += "".join(f"[{step}]" for step in steps if isinstance(step, int))
    if kind == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    if kind == "missing":
        return f"{where} is missing"
    if kind in ("string_too_short", "too_short"):
        return f"{where} must not be empty"
    hides = option_of(field).is_secret or type_of(field) is SecretStr or not field.repr
    shown = "" if hides else _shown(value)
    if _table_of(field) is not None and kind in (
        "dict_type",
        "model_type",
        "model_attributes_type",
    ):
        return f"{where} must be a table{shown}"
    return f"{where} must be {_expected(field, kind, detail.get('ctx') or {})}{shown}"


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field's table, or of its tables by name; None if it has none."""
    kind = (
        get_args(field.annotation)[-1] if get_origin(field.annotation) is dict else type_of(field)
    )
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _expected(field: FieldInfo, kind: str, context: Mapping[str, Any]) -> str:
    if kind in _BOUNDS:
        bound = next(value for key, value in context.items() if key in ("gt", "ge", "lt", "le"))
        return f"{_BOUNDS[kind]} {bound}"
    if expected := option_of(field).expected:
        return expected
    if kind == "literal_error":
        return "one of " + ", ".join(get_args(type_of(field)))
    if kind == "string_unicode":
        return "valid UTF-8"
    if kind == "string_too_long":
        return f"at most {context['max_length']} characters"
    if kind == "int_parsing_size":
        return "a smaller number"
    return _KINDS.get(kind.partition("_")[0], "another value")


def _shown(value: Any) -> str:
    """Return the value that was given, or an empty string if it is long."""
    if value is None:
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
