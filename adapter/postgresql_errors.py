"""The errors of a PostgreSQL in words, for everything that connects to one."""

from __future__ import annotations

import re
from typing import NamedTuple

SILENT = "the database does not answer"
# PostgreSQL's errors and classes of errors.
_WORDS = {
    "28": "the database refused the user",
    "3D": "the database does not exist",
    "42501": "the user has no permission",
    "53": "the database has no space or no connection left",
}
# Those that only an operator can mend.
_REFUSED = ("28", "3D", "42501")
# The driver has no code of an error while it connects, only the server's message.
_CONNECTING = (
    (re.compile(r"no pg_hba\.conf entry|no password supplied|authentication failed"), "28000"),
    (re.compile(r'FATAL: +role ".*" (does not exist|is not permitted to log in)'), "28000"),
    (re.compile(r'FATAL: +database ".*" does not exist'), "3D000"),
    (re.compile(r"FATAL: +permission denied for database"), "42501"),
)


class Reason(NamedTuple):
    """A fault of a database.

    Args:
        words: for clients.
        line: the driver's message, with hosts, without values of rows.
        is_refusal: True if only an operator can mend it.
    """

    words: str
    line: str
    is_refusal: bool


def reason_of(error: BaseException) -> Reason:
    """Return what an error of the driver says."""
    state, line = getattr(error, "sqlstate", None) or "", first_line(error)
    if not state:
        state, line = _connecting(error) or (state, line)
    words = _WORDS.get(state) or _WORDS.get(state[:2], SILENT)
    return Reason(words, line, state.startswith(_REFUSED))


def first_line(error: BaseException) -> str:
    """Return the message of a driver; PostgreSQL shows values of rows in the lines after it."""
    return str(error).strip().partition("\n")[0]


def _connecting(error: BaseException) -> tuple[str, str] | None:
    """Return the code and the line of a refusal in the message of a driver, or None.

    The message has a line for each address that was tried.
    """
    for line in str(error).splitlines():
        for words, state in _CONNECTING:
            if words.search(line):
                return state, line.strip(" \t-")
    return None
