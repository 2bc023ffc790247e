"""One test for each check. All are skipped if no server is named."""

from __future__ import annotations

import asyncio

import pytest

from .check import Check, Verdict, all_checks
from .runner import Settings, judge


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> dict[str, Verdict]:
    """Run the selected checks once, and return their verdicts by id."""
    url = request.config.getoption("--openai-url", default=None)
    if not url:
        pytest.skip("this test needs a server: --openai-url http://127.0.0.1:8080/v1")
    settings = Settings(
        url,
        request.config.getoption("--openai-model"),
        request.config.getoption("--openai-key"),
        request.config.getoption("--openai-hint"),
        hosted=request.config.getoption("--openai-limits") == "openai",
    )
    wanted = {item.callspec.params["check"].id for item in request.session.items
              if hasattr(item, "callspec") and "check" in item.callspec.params}  # fmt: skip
    checks = [check for check in all_checks() if check.id in wanted]
    found = asyncio.run(judge(settings, checks))
    return {verdict.check.id: verdict for verdict in found}


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_promise(check: Check, verdicts: dict[str, Verdict]) -> None:
    """A server that breaks the promise of a `must` check fails its test.

    Any other verdict except a pass skips the test, with the reason.
    """
    verdict = verdicts[check.id]
    if verdict.broken and check.level == "must":
        pytest.fail(f"{check.promise} ({check.source})\n{verdict.detail}", pytrace=False)
    if verdict.outcome != "pass":
        pytest.skip(f"{verdict.outcome}: {verdict.detail[:300]}")
