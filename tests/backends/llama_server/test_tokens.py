"""Tests of tokens from recorded streams at every split, and of those that a stream omits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Finish, Generation, Prompt, Stops, Text, Token
from latimer.backends.errors import EngineError, Unsupported
from latimer.backends.llama_server.tokens import TokenStream
from latimer.backends.llama_server.translate import ChoiceStream, Vocabulary, read_pieces
from latimer.backends.sse import EventParser
from support.recordings import body

PIECES = read_pieces((Path(__file__).parent / "vocabulary.json").read_bytes())
VOCABULARY = Vocabulary(PIECES, {0: b"<|endoftext|>", 1: b"<|im_start|>", 2: b"<|im_end|>"})
ID = {piece: token for token, piece in enumerate(PIECES) if piece}


def translate(*chunks: bytes) -> tuple[list[Token], TokenStream]:
    """Return the tokens of a recorded stream, and the reader of its tokens."""
    job = Generation(Prompt(Text("")), 64, logprobs=2)
    stream, reader = TokenStream(job, 0, 5, VOCABULARY), ChoiceStream(job, 0, False)
    parser = EventParser()
    tokens: list[Token] = []
    for chunk in chunks:
        if data := parser.feed(chunk):
            tokens += stream.feed(reader.parse(data))
    return tokens, stream


def event(*tokens: int, predicted: int, content: str, stop: bool = False) -> dict[str, Any]:
    """Return a partial event that carries the last of some tokens."""
    entries = [{"id": tokens[-1], "logprob": -1.0, "top_logprobs": []}] if tokens else []
    return {
        "content": content, "tokens": list(tokens[-1:]), "stop": stop,
        "tokens_predicted": predicted, "completion_probabilities": entries,
    }  # fmt: skip


def last(kind: str, predicted: int, word: str = "") -> dict[str, Any]:
    """Return a final event."""
    return {
        "content": "", "tokens": [], "stop": True, "stop_type": kind, "stopping_word": word,
        "tokens_predicted": predicted, "tokens_evaluated": 5, "timings": {"cache_n": 2},
    }  # fmt: skip


def stream_of(*stops: str) -> TokenStream:
    """Return the stream of a job with stop sequences."""
    return TokenStream(
        Generation(Prompt(Text("")), 64, stops=Stops(stops), logprobs=0), 0, 5, VOCABULARY
    )


def finish_of(stream: TokenStream) -> Finish:
    """Return the end of a stream, which has one."""
    assert stream.finish is not None
    return stream.finish


def test_a_recorded_stream_is_the_same_at_every_split() -> None:
    """A recorded stream gives the same tokens, log-probabilities and finish at every split."""
    data = body("llama_server", "probs-stream")
    whole, stream = translate(data)
    assert b"".join(token.data for token in whole)
    assert all(token.logprob is not None and len(token.top) == 2 for token in whole)
    assert stream.finish is not None
    for split in range(0, len(data), 7):
        tokens, other = translate(data[:split], data[split:])
        assert (tokens, other.finish) == (whole, stream.finish)


def test_tokens_inside_a_character_are_found_from_its_bytes() -> None:
    """The stream finds tokens inside a character from its bytes and the token count."""
    stream = stream_of()
    first, middle, end = (ID[bytes([byte])] for byte in "漢".encode())
    tokens = stream.feed([event(end, predicted=3, content="漢"), last("limit", 3)])
    assert [token.id for token in tokens] == [first, middle, end]
    assert [token.logprob for token in tokens] == [None, None, -1.0]
    assert finish_of(stream).completion_tokens == 3


def test_held_characters_come_with_what_releases_them() -> None:
    """The stream splits text into tokens when it stops holding the text for a stop sequence."""
    stream = stream_of("é!", "é?")
    first, second = (ID[bytes([byte])] for byte in "é".encode())
    assert stream.feed([event(second, predicted=2, content="")]) == []
    tokens = stream.feed([event(ID[b"a"], predicted=3, content="éa")])
    assert [token.id for token in tokens] == [first, second, ID[b"a"]]


def test_a_stop_inside_characters_tells_its_tokens() -> None:
    """The spelling of a stop sequence gives its tokens, and only tokens before the cut are
    counted."""
    stream = stream_of("漢")
    ids = [ID[bytes([byte])] for byte in "漢".encode()]
    tokens = stream.feed([event(ID[b"a"], predicted=1, content="a")])
    tokens += stream.feed([event(ids[2], predicted=4, content=""), last("word", 4, "漢")])
    assert [token.id for token in tokens] == [ID[b"a"], *ids]
    finish = finish_of(stream)
    assert (finish.reason, finish.completion_tokens) == ("stop", 1)


def test_an_end_token_is_no_token_of_the_text() -> None:
    """The finish carries the end token, and a control token in the text keeps its place."""
    stream = stream_of()
    tokens = stream.feed([
        event(1, predicted=1, content=""),
        event(ID[b"a"], predicted=2, content="a"),
        event(2, predicted=3, content=""),
        last("eos", 3),
    ])  # fmt: skip
    assert [token.id for token in tokens] == [1, ID[b"a"]]
    finish = finish_of(stream)
    assert finish.end is not None
    assert (finish.end.spelling, finish.completion_tokens) == (b"<|im_end|>", 2)


def test_what_the_stream_does_not_tell_is_settled_by_all_ids() -> None:
    """The token ids of the complete response settle broken and cut characters."""
    stream = stream_of()
    start, broken = ID[b"\xe6"], ID[b"\xbc"]
    assert stream.feed([event(ID[b"a"], predicted=3, content="\ufffd\ufffda")]) == []
    assert stream.feed([last("limit", 4)]) == []
    assert stream.unsettled is not None
    tokens = stream.settle([start, broken, ID[b"a"], start])
    assert [token.id for token in tokens] == [start, broken, ID[b"a"], start]
    assert [token.logprob for token in tokens] == [None, None, -1.0, None]
    assert finish_of(stream).completion_tokens == 4


def test_another_answer_settles_nothing() -> None:
    """Token ids that contradict the stream raise an error."""
    stream = stream_of()
    stream.feed([event(ID[b"a"], predicted=3, content="\ufffd\ufffda"), last("limit", 3)])
    with pytest.raises(EngineError, match="did not return"):
        stream.settle([ID[b"\xe6"], ID[b"\xbc"], ID[b"b"]])


def test_events_without_log_probabilities_are_drafted_ones() -> None:
    """An event without log-probabilities, as speculative decoding sends it, raises an error."""
    drafted = event(ID[b"a"], predicted=1, content="a")
    del drafted["completion_probabilities"]
    with pytest.raises(Unsupported, match="draft model"):
        stream_of().feed([drafted])
