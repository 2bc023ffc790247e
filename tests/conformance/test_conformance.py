"""One test for each check. All are skipped if no server is named."""

from __future__ import annotations

import asyncio
import datetime
import os

import pytest

from .check import Check, all_checks
from .discovery import Unreachable
from .reports.explanation import explanation
from .reports.run import Run, kept
from .runner import Settings, judge, resolved


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    """Run the selected checks once. Without a server that answers, the session ends."""
    url = request.config.getoption("--openai-url", default=None)
    if not url:
        pytest.skip("this test needs a server: --openai-url http://127.0.0.1:8080/v1")
    settings = Settings(
        url,
        request.config.getoption("--openai-model"),
        request.config.getoption("--openai-key") or os.environ.get("OPENAI_API_KEY"),
        request.config.getoption("--openai-hint"),
        hosted=request.config.getoption("--openai-limits") == "openai",
    )
    wanted = {item.callspec.params["check"].id for item in request.session.items
              if hasattr(item, "callspec") and "check" in item.callspec.params}  # fmt: skip
    checks = [check for check in all_checks() if check.id in wanted]

    async def judged() -> Run:
        found = await resolved(settings)
        verdicts = await judge(found, checks)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return Run(url, found.url, found.model or "", today, verdicts)

    try:
        return asyncio.run(judged())
    except Unreachable as error:
        pytest.exit(str(error), returncode=2)


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_promise(check: Check, run: Run) -> None:
    """A server that breaks the promise of a `must` check fails its test.

    Any other verdict except a pass skips the test, with the reason.
    """
    verdict = next(verdict for verdict in run.verdicts if verdict.check.id == check.id)
    if verdict.broken and check.level == "must":
        pytest.fail(explanation(run, verdict, kept), pytrace=False)
    if verdict.outcome != "pass":
        pytest.skip(f"{verdict.outcome}: {verdict.detail[:300]}")
