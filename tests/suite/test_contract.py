"""Tests that the checks cover the contract, and that each check belongs to a promise of it."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest
from latimer.conformance.check import all_checks
from latimer.conformance.profiles import PROFILES
from suite.faults import FAULTS

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "conformance" / "contract.md"
CHANCES = "## Checks that can be wrong by chance"
LEVELS = {"must": ("must",), "should": ("must", "should"), "may": ("must", "should", "may")}
SECTIONS = (
    *(f"1.{i}" for i in range(1, 8)), *(f"2.{i}" for i in range(1, 9)),
    # Models without reasoning cannot show section 3.8.
    *(f"3.{i}" for i in (1, 2, 3, 4, 5, 6, 7, 9)), "4", "5", "6",
    # The contract of the Responses API.
    *(f"R{i}" for i in ("1", "2", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "3", "4", "5.1", "5.2",
                        "5.3", "5.4", "5.5", "6", "7", "8", "9.1", "9.2", "9.3", "9.4")),
    *(f"R10.{i}" for i in range(1, 59)),
    # The contract of the Messages API.
    *(f"M{i}" for i in ("1", "2.1", "2.3", "3.1", "3.2", "3.4", "4", "5.1", "5.3", "6.1", "6.2",
                        "7", "8", "11.1")),
    # The contract of audio, and those of its checks that need no engine of their own.
    *(f"A{i}" for i in ("1.1", "1.2", "1.3", "1.4", "2", "3", "4")),
    *(f"A9.{i}" for i in range(1, 41) if i not in (23, 34, 35, 36, 37, 38)),
    # The checks of responses over a WebSocket; tests of Latimer hold the others.
    *(f"W8.{i}" for i in range(1, 28) if i != 3),
)  # fmt: skip
ROOT = DOCUMENT.parent.parent.parent
CHECKS = {check.id: check for check in all_checks()}


def rows() -> list[tuple[list[str], str, str, list[str]]]:
    """Return the sections, the level, the promise and the check ids of each row."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCUMENT.read_text().partition(CHANCES)[0].splitlines()
        if line.startswith("| ") and not line.startswith("| section")
    ]
    return [
        (a.split(", "), level, what, re.findall("`(.+?)`", ids)) for a, level, what, ids in cells
    ]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[2])
def test_a_promise_is_held(row: tuple[list[str], str, str, list[str]]) -> None:
    """The checks of each promise exist, and one of them has its level or a stricter one."""
    _sections, level, _promise, ids = row
    assert [name for name in ids if name not in CHECKS] == []
    assert any(CHECKS[name].level in LEVELS[level] for name in ids)


def test_no_section_is_left_out() -> None:
    """The document lists each section of the contracts, and each of their checks."""
    named = {section for sections, *_ in rows() for section in sections}
    assert sorted({*SECTIONS, *(f"10.{number}" for number in range(1, 96))} - named) == []


def test_every_check_stands_for_a_promise() -> None:
    """Every `must` and `should` check belongs to a promise in the document."""
    held = {name for *_, ids in rows() for name in ids}
    assert [name for name, one in CHECKS.items() if one.level != "may" and name not in held] == []


# The texts with numbers of checks, faults or client profiles, and what each number counts.
COUNTS = (
    ("README.md", r"a suite of (\d+) checks", len(CHECKS)),
    ("CHANGELOG.md", r"`latimer conform`: (\d+) checks", len(CHECKS)),
    ("docs/conformance/README.md", r"with (\d+) checks", len(CHECKS)),
    ("docs/conformance/README.md", r"(\d+) faults can be", len(FAULTS)),
    ("docs/conformance/README.md", r"lists (\d+) clients", len(PROFILES)),
)


@pytest.mark.parametrize(("path", "text", "count"), COUNTS)
def test_the_documents_have_the_right_numbers(path: str, text: str, count: int) -> None:
    """A document that names the number of checks, faults or profiles has the current one.

    `LATIMER_SNAPSHOT=1` writes the numbers again.
    """
    document = ROOT / path
    if os.environ.get("LATIMER_SNAPSHOT"):
        said = document.read_text()
        said = re.sub(text, lambda found: found[0].replace(found[1], str(count)), said)
        document.write_text(said)
    assert re.findall(text, document.read_text()) == [str(count)]


# What draws samples, in the source of a check; the rest of `temperature` is 0.
# Checks that ask for a temperature above 0, and expect the same values at any.
EXACT = {"logprobs.before-temperature", "logprobs.utf8", "sampling.top-p"}
SAMPLES = re.compile(r"RANDOM|temperature(=|\": )(1|2)")


def test_what_can_be_wrong_by_chance_is_stated() -> None:
    """The contract has the error rates of all checks that have some, as `--explain` shows them.

    `LATIMER_SNAPSHOT=1` writes the table again.
    """
    rows = (f"| `{one.id}` | {one.chance} |\n" for one in all_checks() if one.chance)
    table = "| check | in one run |\n|---|---|\n" + "".join(rows)
    before, _, after = DOCUMENT.read_text().partition(CHANCES)
    text = after.partition("|")[0]
    if os.environ.get("LATIMER_SNAPSHOT"):
        DOCUMENT.write_text(before + CHANCES + text + table)
    assert DOCUMENT.read_text() == before + CHANCES + text + table


def test_checks_that_draw_samples_state_their_error_rates() -> None:
    """A check whose own source asks for a temperature above 0, or allows exceptions, has rates."""
    silent = [
        name for name, one in CHECKS.items()
        if not one.chance and name not in EXACT and SAMPLES.search(inspect.getsource(one.run))
    ]  # fmt: skip
    assert silent == []
