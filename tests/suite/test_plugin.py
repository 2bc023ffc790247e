"""Tests of the pytest plugin of the conformance suite, outside the checkout."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from suite.server import Server
from support.servers import serving

pytestmark = pytest.mark.slow


async def pytest_on(tmp_path: Path, *arguments: str) -> tuple[int | None, str]:
    """Run pytest outside the checkout, and return its exit code and its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
        "latimer.conformance", "-k", "models", *arguments,
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_a_server_is_judged_by_pytest(tmp_path: Path) -> None:
    """Each check is a pytest test of the server that `--openai-url` names."""
    with serving(Server) as address:
        code, out = await pytest_on(tmp_path, "--openai-url", f"{address}/v1")
    assert code == 0, out
    assert "10 passed" in out


async def test_without_a_server_everything_is_skipped(tmp_path: Path) -> None:
    """Without `--openai-url`, pytest skips every check."""
    code, out = await pytest_on(tmp_path)
    assert code == 0, out
    assert "10 skipped" in out
