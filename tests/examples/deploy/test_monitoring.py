"""Tests of the Grafana board and of the alert rules: every expression names metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx2
import pytest
import yaml
from latimer.adapter.metric_rows import ROWS, Row
from latimer.backends.fleet.replica import State
from support import servers
from support.environments import ask, program

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "examples" / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "latimer.json").read_text())
RULES = DEPLOY / "prometheus" / "latimer.rules.yml"
ALERTS = [one for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]]
PANELS = [one for one in BOARD["panels"] if one["type"] != "row"]
EXPRESSIONS = {
    **{
        f"{one['title']} {target['refId']}": target["expr"]
        for one in PANELS
        for target in one["targets"]
    },
    **{one["alert"]: one["expr"] for one in ALERTS},
    **{one["name"]: one["query"] for one in BOARD["templating"]["list"] if one["type"] == "query"},
}
# The labels that Prometheus adds to each series of a target.
ADDED = {"instance", "job"}
# The names of the series of each kind of metric, after its name.
ENDINGS = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
SERIES = {
    f"{row.full_name('latimer')}{ending}": row for row in ROWS for ending in ENDINGS[row.kind]
}
# What Grafana replaces in an expression.
VARIABLES = {"$__rate_interval": "5s", "$model": ".*", "$instance": ".*"}
# Panels that have a value after a few requests to one engine without a fleet.
FILLED = (
    "Requests A", "Running and waiting A", "Engines that serve A", "Time to first token A",
    "Time between tokens A", "Duration A", "Wait for an engine A", "Time in Latimer A",
    "Tokens per second A", "Tokens per second of one stream A", "Prompt length A",
    "Answer length A", "Ends of answers A",
)  # fmt: skip

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool")


def rows_of(expression: str) -> list[Row]:
    """Return the metrics of an expression; a name that Latimer does not have is a KeyError."""
    return [
        SERIES[name] for name in re.findall(r"\b(?:latimer_\w+|vllm:\w+|process_\w+)", expression)
    ]


def labels_of(expression: str) -> set[str]:
    """Return the labels that an expression selects or groups by."""
    found = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", expression))
    for group in re.findall(r"by \(([^)]*)\)|label_values\([^,]*, (\w+)\)", expression):
        found |= set(re.findall(r"\w+", " ".join(group)))
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_metrics_and_labels_exist(expression: str) -> None:
    """An expression names metrics and labels that Latimer has."""
    rows = rows_of(expression)
    assert rows or expression.startswith("up{")
    known = {label for row in rows for label in row.labels} | ADDED
    if any(row.kind == "histogram" for row in rows):
        known.add("le")
    assert labels_of(expression) <= known


@pytest.mark.parametrize("expression", EXPRESSIONS.values(), ids=EXPRESSIONS)
def test_states_exist(expression: str) -> None:
    """An expression about the state of an engine names states that exist."""
    for states in re.findall(r"state=~?\"([^\"]+)\"", expression):
        assert set(states.split("|")) <= set(get_args(State))


def test_every_metric_is_on_the_board() -> None:
    """The board shows every metric but the version, and but those of Python itself."""
    shown = {row.name for one in EXPRESSIONS.values() for row in rows_of(one)}
    assert {row.name for row in ROWS if not row.name.startswith("python_")} == shown


def test_every_alert_is_explained() -> None:
    """The documentation has a row for each alert, which says what it means and what to do."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    explained = re.findall(r"^\| `(Latimer\w+)` \| ([^|]+) \| ([^|]+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in explained] == [one["alert"] for one in ALERTS]


def test_every_alert_is_tested() -> None:
    """The series of `alerts.yml` make each alert fire."""
    cases = yaml.safe_load((Path(__file__).parent / "alerts.yml").read_text())["tests"]
    fired = {
        one["alertname"] for case in cases for one in case["alert_rule_test"] if one["exp_alerts"]
    }
    assert fired == {one["alert"] for one in ALERTS}


def test_panels_do_not_overlap() -> None:
    """Each panel of the board has an id and a place of its own."""
    assert len({one["id"] for one in BOARD["panels"]}) == len(BOARD["panels"])
    cells = [
        (x, y)
        for place in (one["gridPos"] for one in BOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)


@promtool
@pytest.mark.slow
def test_prometheus_accepts_the_rules() -> None:
    """promtool finds no fault in the rules, and each alert fires and stays silent as it should."""
    for words in (
        ("check", "rules", RULES),
        ("test", "rules", Path(__file__).parent / "alerts.yml"),
    ):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """Run a Prometheus that reads the metrics of a `latimer serve`, after a few requests to it."""
    if not shutil.which("prometheus"):
        pytest.skip("needs prometheus")
    with servers.command() as (_, address):
        port = servers.free_port()
        target = address.removeprefix("http://")
        job = {"job_name": "latimer", "static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        words = (
            "prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        with program(words, f"{url}/-/ready", {}, tmp_path):
            stream(address)
            scrapes(url, 2)
            stream(address)
            ask(address)
            scrapes(url, 5)
            yield url


def scrapes(url: str, count: int) -> None:
    """Wait until Prometheus has read the metrics as often; it finds its targets after 5 s."""
    query = {"query": f"count_over_time(up[1m]) >= {count}"}
    for _ in range(200):
        if httpx2.get(f"{url}/api/v1/query", params=query).json()["data"]["result"]:
            return
        time.sleep(0.1)
    raise AssertionError("Prometheus does not read the metrics")


def stream(address: str) -> None:
    """Read a stream to its end."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    reply = httpx2.post(f"{address}/v1/chat/completions", json={**body, "stream": True})
    assert "[DONE]" in reply.text


@pytest.mark.slow
def test_prometheus_evaluates_every_expression(prometheus: str) -> None:
    """A real Prometheus evaluates each expression over a real server's metrics."""
    empty = set()
    for name, expression in EXPRESSIONS.items():
        if expression.startswith("label_values("):
            expression = expression.removeprefix("label_values(").partition(",")[0]
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        found: Any = httpx2.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
        assert found["status"] == "success", (name, found)
        if not found["data"]["result"]:
            empty.add(name)
    assert empty & {*FILLED} == set()
    # Nothing is wrong with this server.
    assert {one["alert"] for one in ALERTS} <= empty
