"""Tests of the reports, of `latimer conform`, and of the pytest plugin."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from latimer.conformance.check import Check, Verdict, all_checks
from latimer.conformance.command import conform
from latimer.conformance.live import summary
from latimer.conformance.peers import collected, published
from latimer.conformance.profiles import needed, works
from latimer.conformance.recordings import FORM, at_rate, form, spoken, wav
from latimer.conformance.reports import WRITERS, write
from latimer.conformance.reports.document import schema
from latimer.conformance.reports.run import Run, kept
from latimer.conformance.runner import LATE, Settings, judge
from latimer.conformance.target import Api, Exchange
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from suite.faults.edits import drop, reply
from suite.server import Server
from support.servers import serving

KEY = "sk-very-secret"


async def _nothing(api: Api) -> None:
    """Do nothing: this check never runs."""


def verdict(name: str, outcome: str, level: str = "must") -> Verdict:
    """Return a verdict with an exchange that could break a report."""
    check = Check(name, 'It <holds> & "stands".', level, "1.2 [SPEC]", _nothing)  # type: ignore[arg-type]
    exchange = Exchange("POST", "/completions", b'{"a": "\'</pre>"}', 200, (), b"\x00\xff<script>")
    return Verdict(check, outcome, "expected | <b>, got \x07", 3, 1, 0.5, (exchange,))  # type: ignore[arg-type]


DOCS = Path(__file__).parent.parent.parent / "docs" / "conformance"
PUBLISHED = sorted(set(DOCS.glob("*.json")) - {DOCS / "report.schema.json"})
RUN = Run(
    "a <server>",
    "http://127.0.0.1/v1",
    "m",
    "2026-01-31",
    [
        verdict("echo.length", "fail"),
        verdict("echo.first-null", "pass"),
        verdict("headers.version", "fail", "should"),
        verdict("chat.object", "flaky"),
        verdict("stops.chat", "unsupported"),
    ],
)


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format_is_written(tmp_path: Path, suffix: str) -> None:
    """No format breaks on the bytes of a reply, and each except the badge names the server."""
    path = tmp_path / f"report{suffix}"
    write(RUN, path)
    text = path.read_text()
    if suffix in (".xml", ".svg"):
        xml.dom.minidom.parseString(text)  # noqa: S318
    if suffix != ".svg":
        assert "server" in text
    if suffix == ".html":
        assert "<script>\n" in text
        assert "\x00\xff<script>" not in text


def test_a_failure_in_junit_is_explained(tmp_path: Path) -> None:
    """A failure has its reason as message, and the clause, the command and the reply as text."""
    write(RUN, tmp_path / "report.xml")
    suites = xml.dom.minidom.parse(str(tmp_path / "report.xml")).documentElement  # noqa: S318
    assert suites is not None
    counts = {name: suites.getAttribute(name) for name in ("tests", "failures", "skipped")}
    assert counts == {"tests": "5", "failures": "2", "skipped": "2"}
    failure = suites.getElementsByTagName("failure")[0]
    assert failure.getAttribute("message") == "fail: expected | <b>, got \ufffd"
    text = failure.toxml()
    for words in ("OpenAI's published specification", "$ curl -sS -X POST", "HTTP 200"):
        assert words in text


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """The HTML page loads nothing from other addresses, and shows a command to repeat a failure."""
    write(RUN, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page)
    assert "@import" not in page
    assert "curl -sS -X POST" in page
    assert page.count("<details") == len(RUN.verdicts)


def test_a_form_is_repeated_by_its_parts() -> None:
    """The command of a form in a report names its parts and files, and not their bytes."""
    body = form(("file", ("sentence.wav", spoken())), ("model", "it's"))
    exchange = Exchange("POST", "/audio/transcriptions", body, 400, (), b"")
    words = shlex.split(RUN.command(exchange), comments=True)
    assert words[words.index("-F") :] == ["-F", "file=@sentence.wav", "-F", "model=it's"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(("file", ("sentence.wav", wav(at_rate(8000), 8000, 2)))), FORM["content-type"]),
        (form(("file", ("sentence.wav", spoken())))[:3000], FORM["content-type"]),
        (b'{"prompt": "\xff"}', "application/json"),
        (json.dumps({"prompt": "a b " * 1000}).encode(), "application/json"),
    ],
)
def test_what_cannot_be_shown_is_in_a_file(body: bytes, kind: str) -> None:
    """The command of `--explain` sends exactly the bytes that the check has sent."""
    exchange = Exchange("POST", "/audio/transcriptions", body, 400, (), b"")
    words = shlex.split(RUN.command(exchange, kept))
    assert Path(words[words.index("--data-binary") + 1].removeprefix("@")).read_bytes() == body
    assert f"Content-Type: {kind}" in words
    assert "--data-binary" not in dataclasses.replace(RUN, content=False).command(exchange, kept)


def test_the_json_has_a_versioned_schema(tmp_path: Path) -> None:
    """The JSON report has a schema version, and each check's id, level and verdict."""
    write(RUN, tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["schema"] == 1
    assert [(c["id"], c["level"], c["verdict"]) for c in report["checks"]] == [
        (v.check.id, v.check.level, v.outcome) for v in RUN.verdicts
    ]
    assert report["profiles"]["lm-eval"] == "does not work"
    assert report["profiles"]["LMQL"] == "not judged"


def test_content_can_be_left_out(tmp_path: Path) -> None:
    """A report without content shows the sizes of requests and replies only."""
    write(dataclasses.replace(RUN, content=False), tmp_path / "report.html")
    assert "[16 bytes]" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("suffix", [".json", ".md", ".html"])
def test_notes_stand_beside_what_they_explain(tmp_path: Path, suffix: str) -> None:
    """A report shows a note with each verdict that its patterns match, except for passes."""
    path = tmp_path / f"report{suffix}"
    write(dataclasses.replace(RUN, notes={"headers.* echo.*": "It has none."}), path)
    assert path.read_text().count("It has none.") == 2


@pytest.mark.parametrize("text", ["{", '["a"]', '{"a": 1}'])
def test_notes_that_are_none_are_refused(url: str, tmp_path: Path, text: str) -> None:
    """A file of notes that is not an object of strings is a usage error."""
    path = tmp_path / "notes.json"
    path.write_text(text)
    arguments = [url, "--only", "models.list", "--notes", str(path)]
    assert CliRunner().invoke(conform, arguments).exit_code == 2


def judged(name: str, lacking: int, rest: str = "pass") -> tuple[str, list[Verdict]]:
    """Return the result of a client of whose `must` checks the first are unsupported."""
    checks = needed(name, all_checks())
    lost = [check.id for check in checks if check.level == "must"][:lacking]
    outcomes = ["unsupported" if check.id in lost else rest for check in checks]
    runs = 0 if rest == "skip" else 1
    return works(
        name,
        [Verdict(check, outcome, runs=1 if outcome == "unsupported" else runs)  # type: ignore[arg-type]
         for check, outcome in zip(checks, outcomes, strict=True)],
    )  # fmt: skip


def test_a_client_whose_checks_are_mostly_unsupported_does_not_work() -> None:
    """More than half of the `must` checks decide it, whether or not the others have run."""
    half = sum(check.level == "must" for check in needed("codex", all_checks())) // 2
    assert [judged("codex", count)[0] for count in (0, 1, half, half + 1)] == [
        "works", "works except", "works except", "does not work",
    ]  # fmt: skip
    assert judged("codex", half, "skip") == ("not judged", [])
    assert judged("codex", half + 1, "skip")[0] == "does not work"
    assert judged("codex", half, "fail")[0] == "does not work"


@pytest.mark.parametrize("suffix", [".md", ".html"])
def test_a_report_tells_what_is_missing_from_what_fails(tmp_path: Path, suffix: str) -> None:
    """A report says that the server lacks something only if nothing that the client needs fails."""
    path = tmp_path / f"report{suffix}"
    said = []
    for count, rest in ((37, "pass"), (20, "fail"), (2, "pass")):
        verdicts = judged("codex", count, rest)[1]
        passed = [Verdict(check, "pass") for check in needed("codex", all_checks())
                  if check.id not in {verdict.check.id for verdict in verdicts}]  # fmt: skip
        write(dataclasses.replace(RUN, verdicts=[*verdicts, *passed]), path)
        row = next(line for line in re.split("\n|(?=<tr>)", path.read_text())
                   if re.match("(<tr><th>|. )codex", line))  # fmt: skip
        said.append((re.findall("works except|does not work", row), "the server lacks" in row))
    assert said == [
        (["does not work"], True),
        (["does not work"], False),
        (["works except"], False),
    ]


class WithoutResponses:
    """The correct server without `/responses`, whose 404 has an error object."""

    def __init__(self) -> None:
        self._server = Server()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/responses"):
            await JSONResponse({"error": {"message": "no"}}, 404)(scope, receive, send)
        else:
            await self._server(scope, receive, send)


def test_a_client_without_its_endpoint_does_not_work() -> None:
    """Codex does not work without `/responses`, and no promise counts as broken."""
    with serving(WithoutResponses) as address:
        done = CliRunner().invoke(
            conform, [f"{address}/v1", "--profile", "codex", "--only", "responses.*"]
        )
    assert "\ncodex            does not work: the server lacks responses." in done.output
    missing = "responses.stream-type: the endpoint /responses does not exist: status 404, 'no'"
    assert missing in done.output
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_what_peers_fail_is_explained(path: Path) -> None:
    """Every broken check in the published reports has a note, and Latimer has no broken check."""
    checks = json.loads(path.read_text())["checks"]
    broken = [check for check in checks if check["verdict"] in ("fail", "flaky", "timeout")]
    assert [check["id"] for check in broken if not check["note"]] == []
    if path.stem.startswith("latimer"):
        assert [check["id"] for check in broken] == []


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the correct server, and yield its base URL."""
    with serving(Server) as address:
        yield f"{address}/v1"


def test_the_command_judges_and_reports(url: str, tmp_path: Path) -> None:
    """The command exits with 0 if all selected checks pass, and never shows the API key."""
    report = tmp_path / "report.html"
    arguments = [url, "--group", "models", "--group", "errors", "--api-key", KEY]
    done = CliRunner().invoke(conform, [*arguments, "--report", str(report)])
    assert done.exit_code == 0, done.output
    assert "models" in done.output
    assert KEY not in report.read_text() + done.output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "The base URL is missing"),
        (["http://127.0.0.1:1/v1"], 2, "does not respond: All connection attempts failed."),
        (["http://127.0.0.1:1/v1", "--only", "no.such"], 2, "No check matches"),
        (["--list", "--only", "models.*", "--only", "no.such"], 2, "matches --only no.such"),
        (["--list", "--group", "model", "--only", "models.*"], 2, "matches --group model"),
        (["http://127.0.0.1:1/v1", "--report", "x.pdf"], 2, "has an unknown suffix"),
        (["--changed-since", __file__, "http://127.0.0.1:1/v1"], 2, "is not valid JSON"),
        (["--schema"], 0, "json-schema.org"),
        (["--list", "--profile", "lm-eval"], 0, "echo.length"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, says: str) -> None:
    """The command exits with 2 and a message for a usage error, and with 0 for a list of checks."""
    done = CliRunner().invoke(conform, arguments)
    assert (done.exit_code, says in done.output) == (code, True), done.output


def test_a_broken_must_is_exit_code_1(url: str) -> None:
    """The command exits with 1 if a `must` check fails."""
    done = CliRunner().invoke(conform, [url, "--only", "completions.object", "--model", "nobody"])
    assert done.exit_code == 1


def test_two_reports_are_compared(tmp_path: Path) -> None:
    """`--diff` prints each verdict that differs, and exits with 1 if any does."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write(RUN, before)
    text = before.read_text()
    after.write_text(text.replace('"verdict": "flaky"', '"verdict": "pass"'))
    done = CliRunner().invoke(conform, ["--diff", str(before), str(after)])
    assert done.exit_code == 1
    assert "chat.object: flaky -> pass" in done.output
    assert CliRunner().invoke(conform, ["--diff", str(before), str(before)]).exit_code == 0


def test_the_json_follows_its_published_schema(tmp_path: Path) -> None:
    """Written and published reports are valid by the schema that docs/conformance has."""
    published = json.loads((DOCS / "report.schema.json").read_text())
    assert published == schema()
    write(RUN, tmp_path / "report.json")
    for path in (tmp_path / "report.json", *PUBLISHED):
        jsonschema.validate(json.loads(path.read_text()), published)


def test_the_verdicts_on_peers_are_the_published_ones() -> None:
    """The verdicts that are shown with a failure are those of docs/conformance."""
    reports = [json.loads(path.read_text()) for path in PUBLISHED]
    assert published() == collected(reports)


def test_sarif_has_a_rule_for_each_check_and_a_result_for_each_failure(tmp_path: Path) -> None:
    """The SARIF report names the level of each broken check, and where it was seen."""
    write(RUN, tmp_path / "report.sarif")
    run = json.loads((tmp_path / "report.sarif").read_text())["runs"][0]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == [
        v.check.id for v in RUN.verdicts
    ]
    assert [(result["ruleId"], result["level"]) for result in run["results"]] == [
        ("echo.length", "error"), ("headers.version", "warning"), ("chat.object", "error"),
    ]  # fmt: skip
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "completions"}


def test_a_workflow_of_github_gets_annotations_and_a_summary(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a workflow, a failure is an error annotation, and the summary has the report."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done = CliRunner().invoke(conform, [url, "--only", "completions.object", "--model", "nobody"])
    assert "::error title=completions.object::" in done.output
    assert "| `completions.object` | must | fail |" in (tmp_path / "summary.md").read_text()


def test_only_the_broken_checks_of_a_report_run_again(url: str, tmp_path: Path) -> None:
    """`--only-failed` runs what was broken, and a report without failures is a usage error."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write(RUN, before)
    arguments = [url, "--only-failed", str(before), "--report", str(after)]
    done = CliRunner().invoke(conform, arguments)
    assert done.exit_code == 0, done.output
    ids = {"echo.length", "headers.version", "chat.object"}
    assert {check["id"] for check in json.loads(after.read_text())["checks"]} == ids
    assert CliRunner().invoke(conform, [url, "--only-failed", str(after)]).exit_code == 2


def test_only_new_failures_count_since_a_report(url: str, tmp_path: Path) -> None:
    """With `--changed-since`, a check that was broken before does not fail the run."""
    arguments = [url, "--only", "completions.object", "--model", "nobody"]
    before = tmp_path / "before.json"
    assert CliRunner().invoke(conform, [*arguments, "--report", str(before)]).exit_code == 1
    done = CliRunner().invoke(conform, [*arguments, "--changed-since", str(before)])
    assert done.exit_code == 0, done.output
    assert "0 verdicts differ\nnew failures of must checks: none" in done.output
    done = CliRunner().invoke(
        conform, [*arguments, "--changed-since", str(before), "--annotations"]
    )
    assert "::error" not in done.output
    before.write_text(before.read_text().replace('"verdict": "fail"', '"verdict": "pass"'))
    done = CliRunner().invoke(conform, [*arguments, "--changed-since", str(before)])
    assert done.exit_code == 1
    assert "completions.object: pass -> fail" in done.output
    assert "new failures of must checks: completions.object" in done.output


def test_a_failure_is_explained(url: str) -> None:
    """`--explain` prints the clause, a command, the response and the verdicts on other servers."""
    arguments = [url, "--only", "completions.object", "--model", "nobody", "--explain"]
    out = CliRunner().invoke(conform, arguments).output
    for words in ("(must, contract ", "$ curl -sS", "HTTP 404", "x-request-id: ", "its own /v1: "):
        assert words in out


def test_a_key_that_is_missing_is_named() -> None:
    """A response without a key that a check needs is described by the key and its place."""
    fault = reply(drop("choices.*.logprobs.text_offset"))
    with serving(lambda: Server(fault)) as address:
        done = CliRunner().invoke(conform, [f"{address}/v1", "--only", "logprobs.offset-base"])
    assert "the key 'text_offset' is missing, where the check reads `" in done.output


def test_the_path_v1_may_be_left_out(url: str) -> None:
    """A base URL without `/v1` is one with it, if the server has its models there."""
    done = CliRunner().invoke(conform, [url.removesuffix("/v1"), "--only", "models.list"])
    assert done.exit_code == 0, done.output


def test_a_run_ends_in_time(url: str) -> None:
    """A run that reaches its time limit says which checks are left, and exits with 4."""
    done = CliRunner().invoke(conform, [url, "--time-limit", "0.3", "--group", "streaming"])
    assert done.exit_code == 4, done.output
    words = r"\d+ of them did not run(, and \d did not end)?: the run ended after 0\.3 s"
    assert re.search(words, done.output), done.output


def test_an_interrupted_run_keeps_its_verdicts(url: str, tmp_path: Path) -> None:
    """Ctrl-C ends a run as its time limit does: with a summary, a report, and exit code 4."""
    report = tmp_path / "report.json"
    run = subprocess.Popen(
        # A shell lets what it runs in the background ignore Ctrl-C.
        ["env", "--default-signal=INT", "latimer", "conform", url, "--report", str(report)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    with run:
        assert "checks" in run.stdout.readline()
        time.sleep(0.5)
        run.send_signal(signal.SIGINT)
        output = run.stdout.read()
    assert run.returncode == 4, output
    assert "did not run" in output
    assert "the run was interrupted" in output
    details = [check["detail"] for check in json.loads(report.read_text())["checks"]]
    assert any(one.startswith("not run: the run was interrupted") for one in details)


async def test_a_run_ends_with_its_server() -> None:
    """If the server ends, so does the run, and no check counts as failed because of that."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(serving(Server))
        settings = Settings(f"{address}/v1", restart=0.3)
        ended: list[Verdict] = []
        closing: list[asyncio.Task[None]] = []

        def end(verdict: Verdict) -> None:
            ended.append(verdict)
            if len(ended) == 5:
                # The server waits for requests that this loop has to send.
                closing.append(asyncio.create_task(asyncio.to_thread(stack.close)))

        verdicts = await judge(settings, all_checks(), end)
        await closing[0]
    left = [verdict for verdict in verdicts if not verdict.runs]
    assert len(left) > 400
    assert "the server has ended" in left[0].detail
    assert not [verdict for verdict in verdicts if verdict.broken]


async def _stuck(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request but those of chat."""
    if scope["path"].endswith("/chat/completions"):
        while (await receive())["type"] != "http.disconnect":
            pass
    else:
        await JSONResponse({"data": []})(scope, receive, send)


async def test_a_run_tells_what_waited_when_its_time_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Checks that wait when the time limit ends the run are named, apart from those left."""
    checks = [one for one in all_checks() if one.group == "chat" and not one.alone][:5]
    with serving(lambda: _stuck) as address:
        settings = Settings(f"{address}/v1", "m", at_once=2, most=1)
        verdicts = await judge(settings, checks)
    ran = ", ".join(sorted(one.id for one in checks[:2]))
    reason = f"the run ended after 1 s (while these ran: {ran})"
    assert [verdict.detail for verdict in verdicts] == [
        *[f"not ended: {reason}"] * 2, *[f"not run: {reason}"] * 3,
    ]  # fmt: skip
    assert [(verdict.outcome, verdict.runs) for verdict in verdicts] == [("skip", 0)] * 5
    summary(dataclasses.replace(RUN, verdicts=verdicts))
    assert f"3 of them did not run, and 2 did not end: {reason}\n" in capsys.readouterr().out


async def _mute(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer no request."""
    assert scope["type"] == "http"
    while (await receive())["type"] != "http.disconnect":
        pass


async def test_a_run_tells_that_its_first_request_had_no_response() -> None:
    """If the time limit ends a run before its first check, the reason is the first request."""
    with serving(lambda: _mute) as address:
        settings = Settings(f"{address}/v1", "m", most=0.3)
        verdicts = await judge(settings, all_checks()[:3])
    assert [verdict.detail for verdict in verdicts] == [
        "not run: the run ended after 0.3 s, before the server answered a first request for four "
        "tokens"
    ] * 3


async def test_checks_without_a_response_run_less() -> None:
    """After some checks without a response, others without one do not run three times."""
    brief = [
        dataclasses.replace(one, seconds=0.05)
        for one in all_checks()
        if one.group == "chat" and not one.alone
    ]
    with serving(lambda: _stuck) as address:
        settings = Settings(f"{address}/v1", "m", at_once=1)
        verdicts = await judge(settings, brief[:20])
    late = [verdict.runs for verdict in verdicts if verdict.outcome == "timeout"]
    assert late == [3] * LATE + [1] * (len(late) - LATE)
    assert len(late) > LATE + 5


async def pytest_on(tmp_path: Path, *arguments: str) -> tuple[int | None, str]:
    """Run pytest outside the checkout, and return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
        # To import this plugin takes a third of the time.
        "-p", "no:hypothesispytest", "--pyargs",
        "latimer.conformance", "-k", "models.list or models.fields", *arguments,
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, out.decode()


@pytest.mark.slow
async def test_a_server_is_judged_by_pytest(tmp_path: Path) -> None:
    """Each check is a pytest test of the server that `--openai-url` names."""
    with serving(Server) as address:
        code, out = await pytest_on(tmp_path, "--openai-url", f"{address}/v1")
    assert code == 0, out
    assert "2 passed" in out


@pytest.mark.slow
async def test_without_a_server_everything_is_skipped(tmp_path: Path) -> None:
    """Without `--openai-url`, pytest skips every check."""
    code, out = await pytest_on(tmp_path)
    assert code == 0, out
    assert "2 skipped" in out
