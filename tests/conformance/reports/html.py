"""The HTML report: one file that loads nothing, with a script for its filters only."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from ..check import Verdict
from ..peers import alike
from ..profiles import NOT_JUDGED, PROFILES, causes, works
from ..target import Exchange
from .explanation import headers, origin
from .run import OUTCOMES, Run


def render(run: Run) -> str:
    """Return the run as an HTML page."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "NAME": escape(run.name),
        "LINE": escape(f"{run.url} · {run.model} · {run.date}"),
        "COUNTS": "".join(_filter(run, outcome) for outcome in OUTCOMES if run.counts[outcome]),
        "GRID": "".join(_group(name, part) for name, part in run.groups().items()),
        "PROFILES": "".join(_profile(name, run) for name in PROFILES),
        "CHECKS": "".join(_check(run, verdict) for verdict in run.verdicts),
    }
    for name, html in parts.items():
        template = template.replace(f"<!--{name}-->", html)
    return template


def _filter(run: Run, outcome: str) -> str:
    return (
        f'<label class="{outcome}"><input type="checkbox" data-outcome="{outcome}" checked> '
        f"{run.counts[outcome]} {outcome}</label>"
    )


def _group(name: str, verdicts: list[Verdict]) -> str:
    cells = "".join(
        f'<a href="#{escape(v.check.id)}" class="{v.outcome}" '
        f'title="{escape(f"{v.check.id}: {v.outcome}")}"><span>{escape(v.check.id)}</span></a>'
        for v in verdicts
    )
    passed = sum(verdict.outcome == "pass" for verdict in verdicts)
    return f"<tr><th>{escape(name)}</th><td>{passed}/{len(verdicts)}</td><td>{cells}</td></tr>"


def _profile(name: str, run: Run) -> str:
    result, wrong = works(name, run.verdicts)
    links = [f'<a href="#{v.check.id}">{escape(v.check.id)}</a>' for v in wrong]
    kind = {"works": "pass", "works except": "flaky", NOT_JUDGED: "skip"}.get(result, "fail")
    return (
        f'<tr><th>{escape(name)}</th><td><b class="{kind}">{result}</b></td>'
        f"<td>{causes(result, wrong, links)}</td></tr>"
    )


def _check(run: Run, verdict: Verdict) -> str:
    check = verdict.check
    is_open = " open" if verdict.broken and check.level == "must" and len(run.verdicts) < 40 else ""
    body = [f"<p>{escape(check.promise)}</p><p class=source>{escape(origin(check))}</p>"]
    if verdict.outcome == "flaky":
        body.append(f"<p>The check passed in {verdict.passes} of {verdict.runs} runs.</p>")
    if verdict.detail:
        body.append(f"<p class=detail>{escape(verdict.detail[:1500])}</p>")
    if run.note(verdict):
        body.append(f"<p><b>{escape(run.note(verdict))}</b></p>")
    if verdict.broken and (peers := alike(check.id)):
        rows = (f"<tr><th>{escape(n)}</th><td>{escape(w)}</td></tr>" for w, n in peers.items())
        body.append(f"<table class=peers>{''.join(rows)}</table>")
    if verdict.outcome != "pass":
        body += [_exchange(run, exchange) for exchange in verdict.exchanges[-3:]]
    return (
        f'<details id="{escape(check.id)}" data-outcome="{verdict.outcome}"{is_open}><summary>'
        f'<b class="{verdict.outcome}">{verdict.outcome}</b> <code>{escape(check.id)}</code> '
        f"<i>{check.level}</i></summary>{''.join(body)}</details>"
    )


def _exchange(run: Run, exchange: Exchange) -> str:
    return (
        f"<h4>{escape(exchange.method)} {escape(exchange.path)} → {exchange.status}</h4>"
        f"<pre>{escape(run.request(exchange))}</pre>"
        f"<pre>{escape(chr(10).join([*headers(exchange), '', run.reply(exchange)]))}</pre>"
        f"<pre class=command>{escape(run.command(exchange))}</pre>"
    )
