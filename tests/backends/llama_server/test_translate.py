"""Tests of llama-server's translator with recordings of a real server."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from latimer.backends.base import (
    MEDIA,
    Event,
    Finish,
    Generation,
    Grammar,
    Media,
    Piece,
    Prompt,
    Sampling,
    Stops,
    Text,
)
from latimer.backends.errors import (
    ContextExceeded,
    EngineError,
    InvalidGrammar,
    RequestError,
)
from latimer.backends.grammar import with_gbnf
from latimer.backends.llama_server.translate import (
    NEUTRAL,
    ChoiceStream,
    Vocabulary,
    read_pieces,
    to_error,
    to_native,
    with_media,
)
from latimer.backends.sse import EventParser
from support.recordings import RECORDINGS, body, exchange

STREAMS = [
    path.stem
    for path in sorted((RECORDINGS / "llama_server").glob("*-stream.json"))
    # No job asks for two prompts or choices in one call.
    if "list" not in path.stem and "n-2" not in path.stem and "exceeded" not in path.stem
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """The demo model's vocabulary, as a real llama-server returns it."""
    return Vocabulary(read_pieces((Path(__file__).parent / "vocabulary.json").read_bytes()), {})


def job_of(name: str) -> Generation:
    """Return the job that leads to a recorded request."""
    asked = exchange("llama_server", name)["request"]["json"]
    stops = tuple(asked.get("stop", ()))
    return Generation(Prompt(Text(asked["prompt"])), asked.get("n_predict"), stops=Stops(stops))


def translate(job: Generation, vocabulary: Vocabulary, *chunks: bytes) -> list[Event]:
    """Return all canonical events of a stream."""
    parser, stream = EventParser(), ChoiceStream(job, 0, bos_count=0)
    events: list[Event] = []
    for chunk in chunks:
        for event in stream.parse(parser.feed(chunk)):
            if stream.needs_vocabulary(event):
                stream.vocabulary = vocabulary
            events += stream.feed([event])
    assert stream.finished
    return events


def text_of(events: list[Event]) -> bytes:
    """Return the text of all pieces."""
    return b"".join(event.data for event in events if isinstance(event, Piece))


def finish_of(events: list[Event]) -> Finish:
    """Return the last event, which is the only `Finish`."""
    assert [isinstance(event, Finish) for event in events].count(True) == 1
    assert isinstance(events[-1], Finish)
    return events[-1]


@pytest.mark.parametrize("name", STREAMS)
def test_recordings_are_the_same_at_every_split(name: str, vocabulary: Vocabulary) -> None:
    """A recorded stream gives the same events for every split of its bytes."""
    data = body("llama_server", name)
    whole = translate(job_of(name), vocabulary, data)
    finish_of(whole)
    for split in range(1, len(data), 11):
        assert translate(job_of(name), vocabulary, data[:split], data[split:]) == whole
    bytewise = [data[i : i + 1] for i in range(len(data))]
    assert translate(job_of(name), vocabulary, *bytewise) == whole


@pytest.mark.parametrize("name", STREAMS)
def test_the_stream_loses_nothing_of_the_plain_reply(name: str, vocabulary: Vocabulary) -> None:
    """A stream contains the text of the unstreamed response, also text held back at the length
    limit."""
    events = translate(job_of(name), vocabulary, body("llama_server", name))
    plain = json.loads(body("llama_server", name.removesuffix("-stream")))
    text = text_of(events).decode(errors="ignore")
    assert text == (plain["content"] + plain["stopping_word"]).rstrip("\ufffd")


@pytest.mark.parametrize(
    ("name", "reason", "tokens"),
    [
        ("greedy-stream", "end", 7),
        ("limit-stream", "length", 5),
        ("emoji-stream", "end", 1),
        # "1, 2, 3, 4, " is nine tokens, and the token that contains the cut begins before it.
        ("stop-word-stream", "stop", 9),
        ("stop-mid-token-stream", "stop", 2),
        ("stop-held-at-limit-stream", "length", 6),
        ("byte-pieces-stream", "length", 6),
    ],
)
def test_reasons_and_counts(name: str, reason: str, tokens: int, vocabulary: Vocabulary) -> None:
    """The count excludes the end token and every token that begins after the cut."""
    finish = finish_of(translate(job_of(name), vocabulary, body("llama_server", name)))
    assert (finish.reason, finish.completion_tokens) == (reason, tokens)


def test_cached_tokens_are_told() -> None:
    """The finish carries the number of prompt tokens that the server reused."""
    finish = finish_of(
        translate(job_of("greedy-stream"), None, body("llama_server", "greedy-stream"))  # type: ignore[arg-type]
    )
    assert (finish.prompt_tokens, finish.cached_tokens) == (15, 14)


def test_a_bos_that_was_added_is_not_counted() -> None:
    """The prompt's count excludes a BOS token that the server added."""
    stream = ChoiceStream(job_of("greedy-stream"), 0, bos_count=1)
    data = EventParser().feed(body("llama_server", "greedy-stream"))
    assert finish_of(stream.feed(stream.parse(data))).prompt_tokens == 14


def test_the_vocabulary_is_exact(vocabulary: Vocabulary) -> None:
    """The vocabulary has each token's exact bytes, and none for control tokens."""
    assert len(vocabulary) == 1024
    for entry in json.loads(body("llama_server", "tokenize-pieces"))["tokens"]:
        piece = entry["piece"]
        expected = piece.encode() if isinstance(piece, str) else bytes(piece)
        assert vocabulary.piece(entry["id"]) == expected
    assert vocabulary.piece(2) == b""


@pytest.mark.parametrize(
    ("name", "kind", "param"),
    [
        ("error-bad-grammar", RequestError, "grammar"),
        ("error-bad-token", RequestError, "prompt"),
        ("error-type", RequestError, None),
        ("error-404", EngineError, None),
        ("context-exceeded", ContextExceeded, "prompt"),
        ("embedding-off", EngineError, None),
    ],
)
def test_errors_of_the_server(name: str, kind: type[Exception], param: str | None) -> None:
    """A client's mistake is an error of the request with its field, and all else is an engine
    error."""
    response = exchange("llama_server", name)["response"]
    error = to_error(response["status"], response["body"].encode(), job_of_any())
    assert isinstance(error, kind)
    assert getattr(error, "param", None) == param


def job_of_any() -> Generation:
    """Return a job for errors that refer to one."""
    return Generation(Prompt(Text("x")), 10)


def test_a_reply_that_is_no_error_object_is_shown() -> None:
    """The error quotes a proxy's page."""
    assert "502: <html>" in to_error(502, b"<html>").message


def payload(**sampling: Any) -> dict[str, Any]:
    """Return the payload of a job with these sampling parameters."""
    seeds = sampling.pop("seeds", (None,))
    job = Generation(Prompt(Text("x")), 5, seeds, Stops(("a",)), Sampling(**sampling))
    return dict(to_native(job, 0, "x", 2048))


def test_a_job_can_refuse_the_prompt_cache() -> None:
    """The server uses its prompt cache, unless the job must not."""
    job = Generation(Prompt(Text("x")), 5)
    assert to_native(job, 0, "x", 2048)["cache_prompt"] is True
    job.reuses = False
    assert to_native(job, 0, "x", 2048)["cache_prompt"] is False


def test_neutral_values_are_sent_every_time() -> None:
    """Every request sends neutral values, so that the server's flags do not change the sampling."""
    sent = payload()
    assert all(sent[name] == value for name, value in NEUTRAL.items())
    assert (sent["temperature"], sent["top_p"], sent["stream"]) == (1.0, 1.0, True)
    assert "grammar" not in sent
    assert "json_schema" not in sent


def test_extras_replace_neutral_values() -> None:
    """A sampling parameter that the request names is sent under the same name."""
    sent = payload(extras={"top_k": 5, "min_p": 0.1})
    assert (sent["top_k"], sent["min_p"]) == (5, 0.1)


def test_the_whole_context_is_a_number() -> None:
    """A window of -1, which the server rejects, is sent as the context length."""
    sent = payload(extras={"repeat_last_n": -1, "dry_penalty_last_n": -1})
    assert (sent["repeat_last_n"], sent["dry_penalty_last_n"]) == (2048, 2048)


async def test_a_grammar_is_sent_and_a_wrong_one_is_not() -> None:
    """Valid GBNF is sent unchanged, and invalid GBNF is rejected."""
    job = Generation(Prompt(Text("x")), 5, grammar=Grammar("gbnf", "root ::= [a-z]", "grammar"))
    assert to_native(await with_gbnf(job), 0, "x", 2048)["grammar"] == "root ::= [a-z]"
    for text in ("root ::= (", "root ::= )"):
        wrong = replace(job, grammar=Grammar("gbnf", text, "grammar"))
        with pytest.raises(InvalidGrammar, match="'grammar'"):
            await with_gbnf(wrong)


def test_a_grammar_may_end_though_ends_are_ignored() -> None:
    """A job with a grammar does not send `ignore_eos`, because the server fails where the grammar
    ends."""
    sampling = Sampling(extras={"ignore_eos": True})
    job = Generation(Prompt(Text("x")), 5, sampling=sampling)
    assert to_native(job, 0, "x", 2048)["ignore_eos"]
    job = replace(job, grammar=Grammar("gbnf", "root ::= [a-z]", "grammar"))
    assert not to_native(job, 0, "x", 2048)["ignore_eos"]


def test_a_grammar_whose_tokens_are_banned_is_the_clients_fault() -> None:
    """An error for a grammar without an allowed token is an error of the request."""
    job = replace(job_of_any(), grammar=Grammar("gbnf", "root ::= [a-z]", "regex"))
    message = "got exception: Unexpected empty grammar stack after accepting piece: a (5)"
    data = orjson.dumps({"error": {"code": 500, "message": message, "type": "server_error"}})
    error = to_error(500, data, job)
    assert isinstance(error, InvalidGrammar)
    assert error.param == "regex"
    assert not isinstance(to_error(500, data, job_of_any()), RequestError)


def test_penalties_look_back_over_the_whole_context() -> None:
    """Penalties apply to the whole context unless the request names a window."""
    assert payload(presence_penalty=0.5)["repeat_last_n"] == 2048
    assert payload(frequency_penalty=0.5, extras={"repeat_last_n": 7})["repeat_last_n"] == 7


def test_no_sequence_breakers_are_an_empty_text() -> None:
    """An empty list of sequence breakers, which the server rejects, is sent as one empty text."""
    assert payload(extras={"dry_sequence_breakers": []})["dry_sequence_breakers"] == [""]
    assert payload(extras={"dry_sequence_breakers": ["a"]})["dry_sequence_breakers"] == ["a"]


def test_a_bias_of_minus_100_bans() -> None:
    """A bias of -100 is sent as a ban, and any other as a number."""
    assert payload(logit_bias=((5, -100.0), (6, 1.5)))["logit_bias"] == [[5, False], [6, 1.5]]


@pytest.mark.parametrize("seed", [0, -1, 2**32 - 1, 2**63 - 1, -(2**63)])
def test_seeds_fit_and_are_never_the_random_one(seed: int) -> None:
    """Every int64 becomes a seed that the server does not read as "random"."""
    sent = payload(seeds=(seed,))
    assert 0 <= sent["seed"] < 2**32 - 1
    assert sent["cache_prompt"] is False


def test_without_a_seed_each_call_draws_one() -> None:
    """Calls without a seed get seeds that nobody can compute, and can use the prompt cache."""
    random.seed(0)
    seed = payload()["seed"]
    random.seed(0)
    assert 0 <= seed < 2**31
    assert seed != payload()["seed"]
    assert payload()["cache_prompt"] is True


def test_characters_that_take_several_tokens_are_counted_with_a_stop(
    vocabulary: Vocabulary,
) -> None:
    """Tokens that the stream does not show count from where their character begins."""
    job = Generation(Prompt(Text("x")), 6, stops=Stops((" ",)))
    data = body("llama_server", "byte-pieces-stream")
    events = translate(job, vocabulary, data)
    assert finish_of(events).completion_tokens == 3


def event(content: str, token: int, predicted: int) -> dict[str, Any]:
    """Return a partial event as the server sends it."""
    return {"index": 0, "content": content, "tokens": [token], "stop": False, "id_slot": 0,
            "tokens_predicted": predicted, "tokens_evaluated": 9,
            "timings": {"cache_n": 4}}  # fmt: skip


def test_a_text_whose_tokens_nobody_needs_is_one_piece() -> None:
    """The text that has arrived together is one piece, if the job allows it. The end is as it is
    for other jobs."""
    events = [event("a", 1, 1), event("", 2, 2), event("\u20a9", 3, 4), event(" b", 4, 5)]
    last = {**event("", 5, 6), "stop": True, "stop_type": "eos"}
    stream = ChoiceStream(job := Generation(Prompt(Text("x")), 9, is_joined=True), 0, 1)
    assert stream.feed(events[:1]) == [Piece(0, b"a", (), False, 1)]
    text, end = stream.feed([*events[1:], last])
    assert text == Piece(0, b"\xe2\x82\xa9 b", (), False, 4)
    one_by_one = ChoiceStream(replace(job, is_joined=False), 0, 1)
    assert one_by_one.feed([*events, last])[-1] == end
    assert ChoiceStream(job, 0, 1).feed([last]) == [Finish(0, "end", None, 8, 5, 4)]


def test_a_visible_token_is_a_piece_of_its_own() -> None:
    """A preserved control token is a marked piece after the text before it, and text with the same
    spelling is not marked."""
    job = Generation(Prompt(Text("a")), 9, preserved_tokens=("<m>",))
    assert list(to_native(job, 0, "a", 100)["preserved_tokens"]) == ["<m>"]
    marked = Vocabulary([b"", b"a", b"b x", b"<m> "], {0: b"<m>"})
    stream = ChoiceStream(job, 0, 0, marked)
    found = stream.feed([event("a<m>", 0, 3), event("<m> ", 3, 4)])
    assert found == [
        Piece(0, b"a", (), False, 2), Piece(0, b"<m>", (), True, 1), Piece(0, b"<m> ", (), False, 1)
    ]  # fmt: skip


def test_a_choice_that_the_reader_cuts() -> None:
    """Stop sequences that only the reader finds are not sent. All tokens have a piece, with the
    positions of several, and the end of a cut choice has the counts of the last event."""
    job = Generation(Prompt(Text("a")), 9, stops=Stops(("x",), by_reader=True))
    payload = to_native(job, 0, "a", 100)
    assert (list(payload["stop"]), payload["timings_per_token"]) == ([], True)
    vocabulary = Vocabulary([b"x", b"</t>", b"a", b"\xa9"], {})
    stream = ChoiceStream(job, 0, 1, vocabulary)
    events = stream.feed([event("x", 0, 1), event("", 1, 2), event(" \u20a9", 3, 5)])
    assert events == [
        Piece(0, b"x", (), False, 1),
        Piece(0, b"", (), False, 1),
        Piece(0, b" \xe2\x82\xa9", (), False, 3, (0, 1, 3)),
    ]
    assert stream.stopped() == Finish(0, "stop", None, 8, 5, 4)


def test_the_length_of_a_prompt_with_media() -> None:
    """The server's count of a prompt limits the completion with the BOS, and must be a count."""
    job = Generation(Prompt(Text(MEDIA), media=(Media("image", b"one", "p"),)), 9)
    stream = ChoiceStream(job, 0, 1)
    assert stream.prompt_tokens({"tokens_evaluated": 12}) == 11
    stream.check_room({"tokens_evaluated": 12}, 21)
    with pytest.raises(ContextExceeded) as caught:
        stream.check_room({"tokens_evaluated": 12}, 20)
    assert (caught.value.prompt_tokens, caught.value.context) == (12, 20)
    for wrong in ("12", 12.0, True, -1, 2**70):
        with pytest.raises((TypeError, ValueError)):
            stream.check_room({"tokens_evaluated": wrong}, 21)


def test_a_prompt_with_media() -> None:
    """Media are sent in order as base64, each with the server's marker in the prompt."""
    media = (Media("image", b"one", "p"), Media("image", b"two", "p"))
    job = Generation(Prompt(Text(f"a{MEDIA}b{MEDIA}"), media=media), 9)
    assert with_media(job, "<__m__>") == {
        "prompt_string": "a<__m__>b<__m__>", "multimodal_data": ["b25l", "dHdv"]
    }  # fmt: skip
    stream = ChoiceStream(job, 0, 0)
    stream.check_room(event("a", 1, 1), 18)
    with pytest.raises(ContextExceeded, match="9 in your prompt"):
        stream.check_room(event("a", 1, 1), 17)
