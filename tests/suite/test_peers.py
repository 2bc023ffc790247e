"""Tests of the servers from packages: their table, how they are run and ended, and their pages."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import Any

import httpx2
import pytest
from latimer.conformance.check import Check, Outcome, Verdict, all_checks
from latimer.conformance.runner import Settings
from suite import deviation, pages, peers, publish
from suite.packages import restarted, running
from suite.peers import PEERS, Peer, obstacle
from suite.runs import keep, kept, settled
from support.servers import free_port
from website.grid import HEADS

# A server that answers, ignores SIGTERM, and starts a child that does so, too.
STUBBORN = """
import http.server, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", wait])
print(child.pid, flush=True)
handler = http.server.SimpleHTTPRequestHandler
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), handler).serve_forever()
"""


@pytest.mark.parametrize("slug", PEERS)
def test_a_row_is_complete(slug: str) -> None:
    """Each package has a version, each word can be filled in, and the site shows the server."""
    peer = PEERS[slug]
    assert all("==" in package for package in peer.packages)
    names = ("port", "gguf", "root", "own", "upstream", "key", "koboldcpp", "llama_server")
    values = dict.fromkeys(names, "1")
    for word in (*peer.command, peer.configuration, *peer.environment.values()):
        Template(word).substitute(values)
    assert Template(peer.name).substitute(version="1", build="1") != peer.name
    assert peer.has_upstream == ("$upstream" in peer.configuration)
    assert slug in HEADS
    assert slug.startswith("latimer") != (slug in pages.remarks().servers)
    assert not peer.front or peer.front in HEADS


def test_a_server_that_ignores_its_end_is_ended(tmp_path: Path) -> None:
    """A server that ignores SIGTERM is killed after the grace, with the processes it started."""
    port = free_port()
    words = [sys.executable, "-c", STUBBORN, str(port)]
    url = f"http://127.0.0.1:{port}/"
    with running(words, {}, tmp_path, tmp_path / "server.log", url, 30, grace=0.3):
        assert httpx2.get(url).status_code == 200
        child = int((tmp_path / "server.log").read_text().split()[0])
        assert is_running(child)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    end = time.monotonic() + 10
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Return True if a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_server_that_is_killed_starts_again(tmp_path: Path) -> None:
    """A server behind Latimer answers again after it was killed, and ends with the block."""
    port, note = free_port(), tmp_path / "pid"
    url = f"http://127.0.0.1:{port}/"
    words = restarted([sys.executable, "-m", "http.server", str(port)], note)
    with running(words, {}, tmp_path, tmp_path / "server.log", url, 30):
        first = int(note.read_text())
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + 30
        while not answers(url):
            assert time.monotonic() < end
            time.sleep(0.05)
        second = int(note.read_text())
        assert second != first
    assert not answers(url)
    assert not is_running(second)


def answers(url: str) -> bool:
    """Return True if a server answers."""
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.HTTPError:
        return False


def test_a_server_that_cannot_run_here_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """koboldcpp needs its folder, and a server for another processor states what is missing."""
    monkeypatch.setattr(peers, "KOBOLDCPP", "")
    assert "KOBOLDCPP" in obstacle(PEERS["koboldcpp"])
    monkeypatch.setattr(peers, "KOBOLDCPP", "/opt/koboldcpp")
    assert obstacle(PEERS["koboldcpp"]) == ""
    assert obstacle(replace(PEERS["litellm"], processor="abacus")) == "the processor has no abacus"
    assert obstacle(PEERS["litellm"]) == ""


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    """A server that ends at once, or is not ready in time, is an error with the end of its log."""
    url, log = f"http://127.0.0.1:{free_port()}/", tmp_path / "server.log"
    for code, words, seconds in (
        ("print('no model'); raise SystemExit(3)", "ended with 3", 10),
        ("import time; print('no model', flush=True); time.sleep(60)", "is not ready", 1),
    ):
        with (
            pytest.raises(RuntimeError, match=words) as caught,
            running([sys.executable, "-c", code], {}, tmp_path, log, url, seconds, grace=0.1),
        ):
            pass
        assert "no model" in str(caught.value)


def test_a_server_without_its_program_is_named(tmp_path: Path) -> None:
    """Settings of the table apply to a row without them, and the program must exist."""
    peer = Peer("x $version", "x", ("x==1",), ("no-such-program",))
    assert (peer.weights, peer.at_once, peer.ready) == ("Q8_0", 8, "/health")
    with (
        pytest.raises(FileNotFoundError, match="no-such-program"),
        running(peer.command, {}, tmp_path, tmp_path / "server.log", "http://127.0.0.1:1/", 1),
    ):
        pass


def verdicts(*outcomes: Outcome) -> list[Verdict]:
    """Return a run with these verdicts on the first checks."""
    checks: list[Check] = all_checks()[: len(outcomes)]
    return [
        Verdict(check, outcome, outcome, 1, 0, 0.1, ())
        for check, outcome in zip(checks, outcomes, strict=True)
    ]


def test_two_runs_are_compared() -> None:
    """A check that is broken in one run only is flaky, and every difference is listed."""
    first = verdicts("pass", "pass", "fail", "fail", "skip")
    second = verdicts("pass", "fail", "pass", "fail", "pass")
    found, lines = settled([first, second])
    assert [one.outcome for one in found] == ["pass", "flaky", "flaky", "fail", "pass"]
    assert [line.partition(": ")[0] for line in lines] == [
        check.id for check in (first[1].check, first[2].check, first[4].check)
    ]
    assert settled([first, first]) == (first, [])
    assert settled([first]) == (first, [])


def test_runs_are_kept(tmp_path: Path) -> None:
    """A run is the same after it was kept, and one that lacks checks only counts if asked for."""
    every = [Verdict(check, "fail", "why", 3, 1, 0.5) for check in all_checks()]
    keep(tmp_path / "runs", [every, every[:5]])
    assert kept(tmp_path / "runs") == [every]
    assert kept(tmp_path / "runs", whole=False) == [every, every[:5]]
    assert kept(tmp_path / "none") == []


def test_a_reason_explains_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first key that matches counts: a pattern of checks, or an expression for the reason."""
    monkeypatch.setattr(publish, "FOLDER", tmp_path)
    (tmp_path / "notes").mkdir()
    run = verdicts("fail", "fail", "timeout", "pass", "skip")
    own = {run[0].check.id: "one", "/^time/": "late"}
    (tmp_path / "notes" / "own.json").write_text(json.dumps(own))
    (tmp_path / "notes" / "common.json").write_text('{"/fail/": "broken", "*": "any"}')
    found = publish.explained(run, ("own", "missing", "common"))
    assert [found[one.check.id] for one in run] == ["one", "broken", "late", "any", "any"]


@pytest.fixture(scope="module")
def known() -> Iterator[deviation.Truth]:
    """Return the truth about the demo model."""
    with deviation.truth("Q8_0") as found:
        yield found


ENTRIES = [
    deviation.Entry(b" a", -0.5, {b" a": -0.5, b" b": -1.5}),
    deviation.Entry(b"c", -0.25, {b"c": -0.25}),
]
LEGACY = {
    "tokens": [" a", "c"],
    "token_logprobs": [-0.5, -0.25],
    "top_logprobs": [{" a": -0.5, " b": -1.5}, {"c": -0.25}],
    "text_offset": [0, 2],
}
OF_CHAT = {
    "content": [
        {
            "token": " a",
            "bytes": [32, 97],
            "logprob": -0.5,
            "top_logprobs": [{"token": " a", "logprob": -0.5}, {"token": " b", "logprob": -1.5}],
        },
        {"token": "c", "logprob": -0.25, "top_logprobs": [{"token": "c", "logprob": -0.25}]},
    ]
}


@pytest.mark.parametrize("logprobs", [LEGACY, OF_CHAT], ids=["arrays", "objects"])
def test_both_formats_of_numbers_are_read(logprobs: Any) -> None:
    """The four arrays of completions and the objects of chat give the same numbers."""
    assert deviation.entries(logprobs) == ENTRIES


async def test_the_numbers_of_a_real_server_are_near(llama_server_url: str) -> None:
    """llama-server with default flags differs a little from the reference, not by much."""
    found = await deviation.measure(Settings(f"{llama_server_url}/v1"), "Q8_0")
    assert found.missing == ""
    assert found.chosen is not None
    assert found.alternatives is not None
    assert found.chosen.count > 100
    assert found.alternatives.count > 400
    assert 0 < found.chosen.mean < 0.05
    assert found.chosen.largest < 1


def test_wrong_numbers_are_far(known: deviation.Truth, llama_server_url: str) -> None:
    """A shift of a number is the distance that is found, up to the noise of the engine."""
    body = {"prompt": deviation.PROMPTS[0], "max_tokens": 6, "temperature": 0, "logprobs": 2}
    reply = httpx2.post(f"{llama_server_url}/v1/completions", json=body, timeout=60)
    right = deviation.entries(reply.json()["choices"][0]["logprobs"])
    ids = known.prompt(deviation.PROMPTS[0])
    chosen, others = known.distances(ids, right)
    assert len(chosen) >= 2
    assert len(others) >= 2
    assert max(*chosen, *others) < 0.3
    shifted = [one._replace(logprob=one.logprob - 3) for one in right]
    assert known.distances(ids, shifted)[0] == pytest.approx([3] * len(chosen), abs=0.3)
    assert known.distances(ids, [right[0]._replace(token=b"no such token")]) == ([], [])


def test_pages_are_current() -> None:
    """Each server's page, the tables, and the navigation are what reports and remarks give."""
    for path, text in pages.written().items():
        assert path.read_text() == text, path


def test_remarks_are_used() -> None:
    """Each remark is about a check that exists, and each server with a page has a report."""
    remarks = pages.remarks()
    ids = [check.id for check in all_checks()]
    patterns = [*remarks.means]
    for server in remarks.servers.values():
        patterns += [*server.means, *(issue.checks for issue in server.issues)]
        assert all(issue.url.startswith("https://") for issue in server.issues)
    words = {word for one in patterns for word in one.split()}
    assert not [word for word in words if not any(fnmatchcase(name, word) for name in ids)]
    reported = {report["slug"] for report in pages.published()}
    assert {slug for slug in reported if not slug.startswith("latimer")} <= remarks.servers.keys()
    assert remarks.servers.keys() <= HEADS.keys()
    assert json.loads(deviation.FILE.read_text()).keys() <= HEADS.keys()
