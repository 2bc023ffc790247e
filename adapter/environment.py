"""The settings in environment variables, and variables that are only named like settings."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable

ENVIRONMENT = "LATIMER_"

# Variables that Kubernetes adds to the containers of a namespace with a service `latimer`, or
# `latimer-…`, and the values of its variables that can have any name.
_OF_KUBERNETES = re.compile(
    r"LATIMER_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# Variables that do not name settings: the mark of engines (`backends/fleet/groups.py`), the address
# for Inspect's provider of this name, and those of Latimer's own tests.
_OTHERS = frozenset(
    {
        "LATIMER_BASE_URL", "LATIMER_ENGINE", "LATIMER_FULL", "LATIMER_KOBOLDCPP_EMBEDDINGS_URL",
        "LATIMER_KOBOLDCPP_SPEECH_URL", "LATIMER_KOBOLDCPP_URL", "LATIMER_PICTURE",
        "LATIMER_SNAPSHOT", "LATIMER_SOAK",
    }
)  # fmt: skip


def variables_of(names: Iterable[str]) -> dict[str, str]:
    """Return the settings in environment variables; the case of their names does not matter."""
    found = {variable.lower(): value for variable, value in os.environ.items()}
    variables = {name: (ENVIRONMENT + name).lower() for name in names}
    return {name: found[variable] for name, variable in variables.items() if variable in found}


def is_address(value: str | None) -> bool:
    """Return True for the value that Kubernetes gives to a variable such as LATIMER_PORT."""
    return value is not None and _ADDRESS.match(value) is not None


def unknown_variables(names: Collection[str]) -> list[tuple[str, str]]:
    """Return each variable that is only named like a setting, and what to do about it.

    Args:
        names: the settings.
    """
    found = []
    for variable, value in os.environ.items():
        name = variable.upper()
        if not name.startswith(ENVIRONMENT) or name in _OTHERS or is_address(value):
            continue
        setting = name.removeprefix(ENVIRONMENT).lower()
        if setting not in names and not _OF_KUBERNETES.fullmatch(name):
            found.append((variable, _advice(setting, names)))
    return sorted(found)


def _advice(setting: str, names: Collection[str]) -> str:
    # Few starts need it.
    from difflib import get_close_matches

    near = get_close_matches(setting, names, 1)
    if near:
        return f"did you mean {ENVIRONMENT}{near[0].upper()}?"
    return "the settings are those of latimer serve --help."
