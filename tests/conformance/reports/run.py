"""A run of the suite: the server, the date, and the verdicts."""

from __future__ import annotations

import shlex
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from ..check import Outcome, Verdict
from ..recordings import BOUNDARY, FORM, options
from ..target import Exchange

OUTCOMES: Sequence[Outcome] = (
    "pass", "fail", "flaky", "timeout", "unsupported", "diverges", "skip",
)  # fmt: skip
SHOWN_BYTES = 2000
# A function that writes a body to a file, and returns its path.
Keep: TypeAlias = Callable[[bytes], Path]


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="latimer-conform-"))


def kept(body: bytes) -> Path:
    """Write a body to a temporary file, which stays there for the command that sends it."""
    file = _folder() / sha256(body).hexdigest()[:12]
    file.write_bytes(body)
    return file


@dataclass(frozen=True, slots=True)
class Run:
    """The verdicts on one server.

    Args:
        name: the name of the server in reports, with its version.
        url: the base URL of the server.
        model: the model that requests named.
        date: the day of the run, such as 2026-01-31.
        content: True if reports show prompts and answers. They never show keys.
        notes: explanations of verdicts, by id or pattern of checks; the first match applies.
        known: the ids of checks that were broken in an earlier run.
    """

    name: str
    url: str
    model: str
    date: str
    verdicts: Sequence[Verdict]
    content: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)
    known: Collection[str] = ()

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of checks with each outcome."""
        return Counter(verdict.outcome for verdict in self.verdicts)

    @property
    def broken_musts(self) -> list[Verdict]:
        """The verdicts on `must` checks that are broken."""
        return [v for v in self.verdicts if v.broken and v.check.level == "must"]

    @property
    def new(self) -> list[Verdict]:
        """The verdicts that are broken, and were not in the earlier run."""
        return [v for v in self.verdicts if v.broken and v.check.id not in self.known]

    @property
    def left(self) -> list[Verdict]:
        """The verdicts on checks that had not ended when the run ended."""
        return [verdict for verdict in self.verdicts if not verdict.runs]

    @property
    def limited(self) -> int:
        """The number of requests that a rate limit rejected, except in the check of such limits."""
        return sum(
            exchange.status == 429
            for verdict in self.verdicts
            if verdict.check.id != "concurrency.load"
            for exchange in verdict.exchanges
        )

    def note(self, verdict: Verdict) -> str:
        """Return the note on a verdict that is not a pass, or an empty string."""
        if verdict.outcome == "pass":
            return ""
        found = (
            note
            for patterns, note in self.notes.items()
            if any(fnmatchcase(verdict.check.id, one) for one in patterns.split())
        )
        return next(found, "")

    def groups(self) -> dict[str, list[Verdict]]:
        """Return the verdicts by group, in the order of the groups."""
        found: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            found.setdefault(verdict.check.group, []).append(verdict)
        return found

    def request(self, exchange: Exchange) -> str:
        """Return a request's body, shortened."""
        return self._shown(exchange.request)

    def reply(self, exchange: Exchange) -> str:
        """Return a reply's body, shortened."""
        return self._shown(exchange.reply)

    def command(self, exchange: Exchange, keep: Keep | None = None) -> str:
        """Return a command that repeats a request, with the key read from the environment.

        Args:
            keep: see `kept`. Without it, a command does not have what is too long to show, and a
                comment says so.
        """
        url, body = self.url.rstrip("/") + exchange.path, exchange.request
        parts = ["curl", "-sS", "-X", exchange.method, shlex.quote(url)]
        parts += ["-H", "'Authorization: Bearer '\"$OPENAI_API_KEY\""]
        is_form = body.startswith(f"--{BOUNDARY}".encode())
        shown = self._shown(body)
        if keep is not None and self.content and (is_form or shown.encode() != body):
            kind = FORM["content-type"] if is_form else "application/json"
            file = shlex.quote(f"@{keep(body)}")
            parts += ["-H", f"'Content-Type: {kind}'", "--data-binary", file]
        elif is_form and self.content:
            parts += map(shlex.quote, options(body))
            parts.append("# --explain writes the file that was sent")
        elif is_form:
            parts.append(shown)
        elif body:
            parts += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(shown)]
        return " ".join(parts)

    def _shown(self, data: bytes) -> str:
        if not self.content:
            return f"[{len(data)} bytes]"
        text = data[:SHOWN_BYTES].decode(errors="backslashreplace")
        return text if len(data) <= SHOWN_BYTES else f"{text} … ({len(data)} bytes)"
