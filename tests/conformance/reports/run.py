"""A run of the suite: what was judged, when, and what came of it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ..check import Outcome, Verdict
from ..target import Exchange

OUTCOMES: Sequence[Outcome] = (
    "pass", "fail", "flaky", "timeout", "unsupported", "diverges", "skip",
)  # fmt: skip
MOST = 2000


@dataclass(frozen=True, slots=True)
class Run:
    """One server's verdicts.

    Args:
        name: what the server is called in reports, with its version.
        url: where it was.
        model: what requests named.
        date: the day, as in 2026-01-31.
        content: whether prompts and answers are shown; keys never are.
        notes: what lies behind a verdict, by the check's id or a pattern; the first that fits.
    """

    name: str
    url: str
    model: str
    date: str
    verdicts: Sequence[Verdict]
    content: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many checks came to which verdict."""
        return Counter(verdict.outcome for verdict in self.verdicts)

    @property
    def broken_musts(self) -> list[Verdict]:
        """The musts that do not hold."""
        return [v for v in self.verdicts if v.broken and v.check.level == "must"]

    def note(self, verdict: Verdict) -> str:
        """What lies behind a verdict that is no pass, where somebody found out; else empty."""
        if verdict.outcome == "pass":
            return ""
        found = (
            note
            for patterns, note in self.notes.items()
            if any(fnmatchcase(verdict.check.id, one) for one in patterns.split())
        )
        return next(found, "")

    def groups(self) -> dict[str, list[Verdict]]:
        """Verdicts by group, in the groups' order."""
        found: dict[str, list[Verdict]] = {}
        for verdict in self.verdicts:
            found.setdefault(verdict.check.group, []).append(verdict)
        return found

    def request(self, exchange: Exchange) -> str:
        """A request's body, shortened."""
        return self._shown(exchange.request)

    def reply(self, exchange: Exchange) -> str:
        """A reply's body, shortened."""
        return self._shown(exchange.reply)

    def command(self, exchange: Exchange) -> str:
        """A command that sends the request again; the key is the reader's to put in."""
        url = self.url.rstrip("/") + exchange.path
        parts = ["curl", "-sS", "-X", exchange.method, shlex.quote(url)]
        parts += ["-H", "'Authorization: Bearer '\"$OPENAI_API_KEY\""]
        if exchange.request:
            body = self._shown(exchange.request)
            parts += ["-H", "'Content-Type: application/json'", "-d", shlex.quote(body)]
        return " ".join(parts)

    def _shown(self, data: bytes) -> str:
        if not self.content:
            return f"[{len(data)} bytes]"
        text = data[:MOST].decode(errors="backslashreplace")
        return text if len(data) <= MOST else f"{text} … ({len(data)} bytes)"
