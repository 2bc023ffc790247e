"""The short form of a fleet under load, whose engines are killed, stopped, and replaced."""

from __future__ import annotations

import pytest

from chaos.fleet import fleet


@pytest.mark.timeout(300)
async def test_a_fleet_hides_the_troubles_of_its_engines() -> None:
    """No request hangs, fails before its first event, or gets the answer of another one."""
    report = await fleet(600, seed=7)
    assert not report.wrong, report.table()
    assert report.outcomes["right"] > 400
