"""The explanation of a failure: its promise, the last exchange, and the peers' verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..check import Check, Verdict
from ..peers import alike
from ..target import Exchange
from .run import Keep, Run

# The origins of promises, by the marks in the sources of checks.
MARKS: Mapping[str, str] = {
    "AISDK": "the AI SDK of Vercel needs it",
    "CC": "Claude Code sends or needs it",
    "CODEX": "Codex sends or needs it",
    "DD": "seen in recorded traffic of OpenAI",
    "DOC": "OpenAI's documentation",
    "EXP": "tried with OpenAI's client",
    "GUID": "guidance needs it",
    "HELM": "HELM needs it",
    "INSTR": "instructor needs it",
    "ISS": "reported of OpenAI's service",
    "LC": "LangChain needs it",
    "LIT": "seen in a recorded answer of OpenAI",
    "LMEVAL": "lm-eval needs it",
    "OR": "the Open Responses tests need it",
    "PROBE": "tried with OpenAI's service",
    "PYD": "seen in recorded traffic of OpenAI",
    "SDK": "the types of OpenAI's client",
    "SNAP": "seen in recorded streams of OpenAI",
    "SPEC": "OpenAI's published specification",
    "VLLM": "vLLM does it",
    "litellm": "litellm needs it",
}
# Headers that say nothing about the API.
PLAIN_HEADERS = {"connection", "content-length", "date", "server", "transfer-encoding", "via"}


def origin(check: Check) -> str:
    """Return the section of the contract that has a check's promise, and the promise's origin."""
    known = [words for mark, words in MARKS.items() if f"[{mark}]" in check.source]
    return f"contract {check.source}" + (f": {'; '.join(known)}" if known else "")


def headers(exchange: Exchange) -> Sequence[str]:
    """Return the lines of a reply's headers, without those that say nothing about the API."""
    return [f"{k}: {v}" for k, v in exchange.headers if k.lower() not in PLAIN_HEADERS]


def explanation(run: Run, verdict: Verdict, keep: Keep | None = None) -> str:
    """Return the clause, the last request, its response, and the peers' verdicts of a failure.

    Args:
        keep: see `Run.command`.
    """
    check = verdict.check
    lines = [f"{check.id} ({check.level}, {origin(check)})", check.promise]
    lines.append(f"{verdict.outcome} in {verdict.runs} runs: {verdict.detail[:500]}")
    if check.chance:
        lines.append(f"by chance, in one run: {check.chance}")
    if verdict.exchanges:
        exchange = verdict.exchanges[-1]
        if len(verdict.exchanges) > 1:
            lines.append(f"the last of {len(verdict.exchanges)} requests:")
        lines += ["$ " + run.command(exchange, keep), f"HTTP {exchange.status}", *headers(exchange)]
        lines += ["", run.reply(exchange)]
    if peers := alike(check.id):
        lines += ["other servers:", *(f"  {names}: {words}" for words, names in peers.items())]
    return "\n".join(lines)
