"""Tests of the command that tries faults."""

from __future__ import annotations

import pytest
from suite.trial import main


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["models-no-objec"], "no fault 'models-no-objec'; did you mean: models-no-object"),
        (["--expected", "+"], "no fault '+'; tests/suite/faults has their names."),
        (["--expectations"], "unrecognized arguments: --expectations"),
        ([], "name a fault, or use --expected"),
    ],
)
async def test_wrong_words_are_errors(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that no fault has, and an option that does not exist, end with a line about them."""
    with pytest.raises(SystemExit) as caught:
        await main(words)
    assert caught.value.code == 2
    assert error in capsys.readouterr().err
