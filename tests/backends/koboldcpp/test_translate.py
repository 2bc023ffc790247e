"""Tests of koboldcpp's translator with recordings of a real server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from backends.llama_server.test_translate import payload as llama_server_payload
from latimer.backends.base import MEDIA, Generation, Media, Prompt, Sampling, Stops, Text
from latimer.backends.errors import Busy, EngineError, EngineUnavailable, RequestError
from latimer.backends.koboldcpp.translate import (
    NEUTRAL,
    ChoiceStream,
    longest_call,
    to_error,
    to_native,
    to_seed,
    tokens_before,
    with_media,
)
from latimer.backends.sse import EventParser
from latimer.schemas.native.koboldcpp import LastLogprobs
from support.recordings import body

TOLD = json.loads(body("koboldcpp", "last-logprobs"))["logprobs"]
BYTE_PIECES = json.loads(body("koboldcpp", "logprobs-byte-pieces"))["results"][0]["logprobs"]


def run(name: str, *stops: str, split: int | None = None) -> tuple[ChoiceStream, str | None]:
    """Feed a recorded stream, and return its state and the engine's finish reason."""
    data = body("koboldcpp", name)
    stream = ChoiceStream(Generation(Prompt(Text("x")), 40, stops=Stops(stops)), 0, 12)
    parser, reason = EventParser(), None
    for chunk in (data[:split], data[split:]) if split else (data,):
        for event_data in parser.feed(chunk):
            event = stream.parse(event_data)
            stream.feed(event["token"])
            reason = event["finish_reason"] or reason
    return stream, reason


@pytest.mark.parametrize("name", ["greedy-stream", "stop-word-stream", "story-stream"])
def test_recordings_are_the_same_at_every_split(name: str) -> None:
    """A recorded stream gives the same text for every split of its bytes."""
    whole, reason = run(name)
    for split in range(1, len(body("koboldcpp", name)), 3):
        again, same = run(name, split=split)
        assert (again.text, same) == (whole.text, reason)


def test_a_stop_string_is_a_stop() -> None:
    """A stop sequence ends the completion with `stop`, although koboldcpp reports `length`."""
    stream, reason = run("stop-word-stream", "5, 6")
    assert (reason, stream.stopped) == ("length", True)
    stream.end_call(TOLD, 0, ended=False)
    finish = stream.finish(ended=False)
    assert (finish.reason, finish.stop) == ("stop", "5, 6")


def reported(*tokens: str) -> LastLogprobs:
    """Return the engine's report of its last tokens, without log-probabilities."""
    return {"content": [], "tokens": list(tokens), "token_ids": [0] * len(tokens)}


def test_a_stop_inside_a_token_counts_the_token() -> None:
    """The count includes the token that the cut goes through."""
    stream, _ = run("stop-mid-token-stream", "pit")
    stream.end_call(reported("The", " capital"), 0, ended=False)
    assert stream.finish(ended=False).completion_tokens == 2


def test_an_end_token_is_not_counted() -> None:
    """The count excludes the end token that the engine reports."""
    stream, reason = run("emoji-stream")
    assert reason == "stop"
    stream.end_call(reported("🔥", "<|im_end|>"), 0, ended=True)
    finish = stream.finish(ended=True)
    assert (finish.reason, finish.completion_tokens, finish.prompt_tokens) == ("end", 1, 12)


def test_without_told_tokens_the_tokenisers_count_is_taken() -> None:
    """The tokenizer's count applies when the engine reports no tokens."""
    stream, _ = run("limit-stream")
    stream.end_call(None, 5, ended=False)
    assert stream.finish(ended=False).completion_tokens == 5


def test_fragments_of_characters_are_counted_where_they_lie() -> None:
    """Tokens inside a character count at their place, although the engine decodes them to
    nothing."""
    *tokens, end = BYTE_PIECES["tokens"]
    assert end == "<|im_end|>"
    assert "" in tokens
    text = "Zoë 漢".encode()
    assert tokens_before(tokens, text, len(text)) == len(tokens) == 7
    assert tokens_before(tokens, text, len(b"Zo")) == 1
    assert tokens_before(tokens, text, len("Zoë".encode())) == 3
    assert tokens_before(tokens, text, len("Zoë ".encode())) == 4


def test_an_engine_error_is_raised() -> None:
    """A finish reason of `error`, and an event that is not an object, raise an error."""
    stream = ChoiceStream(Generation(Prompt(Text("x")), 4), 0, 1)
    with pytest.raises(EngineError, match="failed while generating"):
        stream.parse(b'{"token": "", "finish_reason": "error"}')
    with pytest.raises(EngineError, match="invalid event"):
        stream.parse(b"null")


def payload(stops: tuple[str, ...] = (), **sampling: Any) -> dict[str, Any]:
    """Return the payload of a job with these sampling parameters."""
    job = Generation(Prompt(Text("x")), 5, stops=Stops(stops), sampling=Sampling(**sampling))
    return dict(to_native(job, 0, "x", 5, 2048, "KEY"))


def test_neutral_values_are_sent_every_time() -> None:
    """Every request turns off koboldcpp's own sampling, trimming and placeholders."""
    sent = payload(("a", "b"))
    assert all(sent[name] == value for name, value in NEUTRAL.items())
    assert sent["stop_sequence"] == ["a", "b"]
    assert (sent["trim_stop"], sent["replace_instruct_placeholders"]) == (False, False)
    assert (sent["temperature"], sent["top_p"], sent["genkey"]) == (1.0, 1.0, "KEY")


def test_extras_have_koboldcpps_names() -> None:
    """A sampling parameter that the request names is sent under koboldcpp's name."""
    extras = {"typical_p": 0.9, "repeat_penalty": 1.1, "ignore_eos": True, "dynatemp_range": 0.5}
    sent = payload(presence_penalty=0.5, extras=extras)
    assert (sent["typical"], sent["rep_pen"], sent["ban_eos_token"]) == (0.9, 1.1, True)
    assert (sent["presence_penalty"], sent["rep_pen_range"]) == (0.5, 2048)
    assert sent["dynatemp_range"] == 0.5


def test_samplers_of_koboldcpp_have_its_order_and_defaults() -> None:
    """Top-a and tail-free sampling apply in koboldcpp's order, and smoothing is quadratic."""
    both = payload(extras={"top_a": 0.2, "tfs": 0.9})
    assert (both["top_a"], both["tfs"], both["sampler_order"]) == (0.2, 0.9, [6, 0, 1, 3, 4, 2, 5])
    assert payload(extras={"top_a": 0.2, "tfs": 1})["sampler_order"] == NEUTRAL["sampler_order"]
    smooth = payload(extras={"smoothing_factor": 0.3})
    assert (smooth["smoothing_factor"], smooth["smoothing_curve"]) == (0.3, 1.0)
    cubic = payload(extras={"smoothing_factor": 0.3, "smoothing_curve": 2.0})
    assert cubic["smoothing_curve"] == 2.0


@pytest.mark.parametrize("sent_by", [payload, llama_server_payload])
@pytest.mark.parametrize(
    ("window", "sent"),
    [({}, (2.0, 2048)), ({"dry_penalty_last_n": -1}, (2.0, 2048)),
     ({"dry_penalty_last_n": 9}, (2.0, 9)), ({"dry_penalty_last_n": 0}, (0.0, 0))],
)  # fmt: skip
def test_dry_looks_back_over_the_whole_context(sent_by: Any, window: Any, sent: Any) -> None:
    """DRY looks at the whole context by default and with -1, at fewer tokens with fewer, and 0
    disables it, on llama-server, too."""
    found = sent_by(extras={"dry_multiplier": 2.0, **window})
    assert (found["dry_multiplier"], found["dry_penalty_last_n"]) == sent


@pytest.mark.parametrize(
    ("last", "window", "penalty"), [(7, 7, 1.1), (-1, 2048, 1.1), (2**31 - 1, 2048, 1.1), (0, 0, 1)]
)
def test_the_penaltys_window_has_koboldcpps_meaning(last: int, window: int, penalty: float) -> None:
    """A window of -1 is the context length, and a window of 0 switches the penalty off."""
    sent = payload(extras={"repeat_penalty": 1.1, "repeat_last_n": last})
    assert (sent["rep_pen_range"], sent["rep_pen"]) == (window, penalty)


@pytest.mark.parametrize("penalty", [0.5, 1, 1.5])
def test_a_repeat_penalty_has_all_spellings(penalty: float) -> None:
    """A penalty is sent in each spelling, because koboldcpp takes the largest of them."""
    sent = payload(extras={"repeat_penalty": penalty})
    names = ("rep_pen", "repeat_penalty", "repetition_penalty")
    assert [sent[name] for name in names] == [penalty] * 3


def test_dry_has_llama_cpps_defaults() -> None:
    """DRY has llama.cpp's breakers and numbers unless the request names others."""
    sent = payload(extras={"dry_multiplier": 1.0})
    assert list(sent["dry_sequence_breakers"]) == ["\n", ":", '"', "*"]
    assert (sent["dry_base"], sent["dry_allowed_length"]) == (1.75, 2)
    own = {"dry_multiplier": 1.0, "dry_sequence_breakers": [], "dry_base": 2.0}
    assert payload(extras=own).items() >= own.items()
    assert "dry_sequence_breakers" not in payload()


def test_a_bias_is_an_object_of_at_most_512() -> None:
    """A logit bias of more than 512 entries, which koboldcpp would drop, is rejected."""
    biases = tuple((token, 1.0) for token in range(513))
    assert payload(logit_bias=biases[:2])["logit_bias"] == {"0": 1.0, "1": 1.0}
    with pytest.raises(RequestError, match="at most 512"):
        payload(logit_bias=biases)


@pytest.mark.parametrize("seed", [None, 0, -1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63)])
def test_seeds_are_positive_and_31_bits(seed: int | None) -> None:
    """Every seed becomes a positive number of 31 bits, because others mean the clock."""
    assert 1 <= to_seed(seed) <= 2**31 - 1


def test_without_a_seed_each_call_draws_one() -> None:
    """Calls without a seed get seeds that nobody can compute."""
    random.seed(0)
    seed = to_seed(None)
    random.seed(0)
    assert seed != to_seed(None)


def test_seeds_that_differ_stay_different() -> None:
    """Neighbouring seeds stay different."""
    assert len({to_seed(seed) for seed in range(1000)}) == 1000


def test_one_call_gives_80_percent_of_the_context() -> None:
    """One call generates at most 80 % of the context, as koboldcpp does."""
    assert longest_call(2048) == 1639
    assert longest_call(64) == 48


def test_errors_of_the_server() -> None:
    """A 503 means busy, a 401 means unavailable, and other errors are quoted."""
    assert isinstance(to_error(503, b"{}"), Busy)
    assert isinstance(to_error(401, b"{}"), EngineUnavailable)
    assert "requires its --password" in to_error(401, b"{}").message
    assert "bad_input" in to_error(500, body("koboldcpp", "error-bad-json")).message


def test_media_are_files_and_words() -> None:
    """The payload has the files by kind, and the prompt has koboldcpp's text for each of them."""
    media = (Media("image", b"one", "p"), Media("audio", b"two", "p"), Media("image", b"3", "p"))
    job = Generation(Prompt(Text(f"a{MEDIA}b{MEDIA}{MEDIA}"), media=media), 5)
    assert with_media(job, f"a{MEDIA}b{MEDIA}{MEDIA}") == (
        "a\n(Attached Image 1)\nb\n(Attached Audio 1)\n\n(Attached Image 2)\n"
    )
    sent = to_native(job, 0, "a", 5, 100, "KEY")
    assert (sent["images"], sent["audio"]) == (["b25l", "Mw=="], ["dHdv"])


def test_an_end_token_that_is_shown_is_no_text() -> None:
    """An end token that koboldcpp sends as text is removed, in one piece or in several."""
    job = Generation(Prompt(Text("a")), 5, preserved_tokens=("<think>",))
    assert to_native(job, 0, "a", 5, 100, "KEY")["render_special"] is True
    for pieces in (["a", "<|im_end|>"], ["a<|im_", "end|>"], ["a<|im_end|>"]):
        stream = ChoiceStream(job, 0, 1, "<|im_end|>")
        assert b"".join(stream.feed(piece) for piece in pieces) + stream.rest() == b"a"
        assert stream.text == b"a"
    cut = ChoiceStream(job, 0, 1, "<|im_end|>")
    assert cut.feed("a<|im_") + cut.rest() == b"a<|im_"


def test_stops_that_do_not_count_everywhere_are_not_sent() -> None:
    """The reader cuts a choice at a stop sequence that does not apply everywhere, and the tokens
    before the cut count."""
    job = Generation(Prompt(Text("a")), 5, stops=Stops(("x",), by_reader=True))
    assert to_native(job, 0, "a", 5, 100, "KEY")["stop_sequence"] == []
    stream = ChoiceStream(job, 0, 1)
    stream.feed("<t>x</t>abx")
    assert not stream.stopped
    job.stops.ends[0] = 10
    assert stream.stopped
    stream.end_call(reported("<t>", "x", "</t>", "a", "b", "x"), 0, ended=False)
    finish = stream.finish(False)
    assert (finish.reason, finish.completion_tokens) == ("stop", 5)
