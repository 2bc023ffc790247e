"""DSPy, which calls through litellm."""

from __future__ import annotations

import dspy
import pytest
from common import ANSWER, ASK


@pytest.fixture
def lm(url: str) -> dspy.LM:
    """Return the language model of a compatible server."""
    return dspy.LM(
        "openai/demo", api_base=url, api_key="unused", temperature=0, max_tokens=200, cache=False
    )


def test_chat(lm: dspy.LM) -> None:
    """A call returns the answer."""
    assert lm(ASK) == [ANSWER]
