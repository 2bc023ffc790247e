"""Tests of aligning koboldcpp's tokens with the text that it sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from latimer.backends.base import Generation, Grammar, Prompt, Sampling, Text
from latimer.backends.errors import EngineError, Unsupported
from latimer.backends.koboldcpp.tokens import check, read
from support.recordings import body

COUNT = json.loads(body("koboldcpp", "last-logprobs"))["logprobs"]
BYTE_PIECES = json.loads(body("koboldcpp", "logprobs-byte-pieces"))["results"][0]["logprobs"]
CONTROL = frozenset({"<|im_end|>"})


def reported(*tokens: str, logprob: float = -1.0, top: Any = ()) -> Any:
    """Return the engine's report of some tokens."""
    content = [
        {"token": token, "token_id": 9, "logprob": logprob, "top_logprobs": list(top)}
        for token in tokens
    ]
    return {"content": content, "tokens": list(tokens), "token_ids": [9] * len(tokens)}


def test_recorded_tokens_are_the_text() -> None:
    """The tokens of a recorded completion join to its text, and the end token is separate."""
    text = b"1, 2, 3, 4, 5, 6, 7."
    found = read(COUNT, text, True, 1, CONTROL)
    assert b"".join(token.data for token in found.tokens) == text
    assert found.end is not None
    assert found.end.spelling == b"<|im_end|>"
    assert not found.inexact


def test_recorded_tokens_inside_characters_have_their_bytes() -> None:
    """Tokens that the engine decodes to nothing share the character's bytes."""
    found = read(BYTE_PIECES, "Zoë 漢".encode(), True, 1, CONTROL)
    data = [token.data for token in found.tokens]
    assert data == [b"Zo", b"\xc3", b"\xab", b" ", b"\xe6", b"\xbc", b"\xa2"]
    assert not found.inexact


def test_bytes_that_cannot_be_told_apart_are_marked() -> None:
    """Two tokens that share a character of three bytes are marked as inexact."""
    found = read(reported("a", "", "", "b"), "a漢b".encode(), False, 0, CONTROL)
    assert b"".join(token.data for token in found.tokens) == "a漢b".encode()
    assert found.inexact


def test_the_floor_is_no_number() -> None:
    """Alternatives at the engine's lowest value are dropped, and a token at that value is marked
    as inexact."""
    floor = -9.210340371976182
    top = [{"token": "a", "token_id": 9, "logprob": -0.1}, {"token": "b", "token_id": 8,
           "logprob": floor}]  # fmt: skip
    found = read(reported("a", top=top), b"a", False, 5, CONTROL)
    assert [other.spelling for other in found.tokens[0].top] == [b"a"]
    assert not found.inexact
    assert read(reported("a", logprob=floor), b"a", False, 0, CONTROL).inexact


def test_control_tokens_add_no_text() -> None:
    """A control token in the middle of the text has no bytes."""
    found = read(reported("a", "<|im_end|>", "b"), b"ab", False, 0, CONTROL)
    assert [(token.data, token.control) for token in found.tokens] == [
        (b"a", False), (b"", True), (b"b", False),
    ]  # fmt: skip


def test_what_was_generated_after_the_text_is_left_out() -> None:
    """Tokens after the text are dropped, and one that extends beyond it is cut."""
    found = read(reported("ab", "cd", "ef"), b"abc", False, 0, CONTROL)
    assert [token.data for token in found.tokens] == [b"ab", b"c"]


def test_the_tokens_of_another_text_are_refused() -> None:
    """Tokens of another text raise an error."""
    with pytest.raises(EngineError, match="another text"):
        read(reported("x", "y"), b"abc", False, 0, CONTROL)


@pytest.mark.parametrize(
    "job",
    [
        Generation(Prompt(Text("a")), 1, logprobs=1, sampling=Sampling(temperature=0.0)),
        Generation(Prompt(Text("a")), 1, logprobs=1, sampling=Sampling(top_p=0.9)),
        Generation(Prompt(Text("a")), 1, logprobs=1, sampling=Sampling(logit_bias=((5, 1.0),))),
        Generation(Prompt(Text("a")), 1, logprobs=1, sampling=Sampling(extras={"top_k": 5})),
        Generation(
            Prompt(Text("a")), 1, logprobs=1, grammar=Grammar("gbnf", "root ::= .", "grammar")
        ),
        Generation(Prompt(Text("a")), 1, logprobs=11),
        Generation(Prompt(Text("a"), logprobs=0), 1),
    ],
    ids=["temperature", "top_p", "bias", "extra", "grammar", "too-many", "prompt"],
)
def test_log_probabilities_that_it_does_not_know_are_refused(job: Generation) -> None:
    """Log-probabilities are rejected with sampling that changes them, and the error names
    llama-server."""
    with pytest.raises(Unsupported, match="llama-server"):
        check(job)


def test_neutral_sampling_is_served() -> None:
    """Log-probabilities are served with OpenAI's defaults, which leave the model's own
    unchanged."""
    check(Generation(Prompt(Text("a")), 1, logprobs=10))
    check(Generation(Prompt(Text("a")), 1, sampling=Sampling(temperature=0.0)))
