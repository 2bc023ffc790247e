"""Tests of llama.cpp's tokenizer with long texts."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from latimer.backends import offload
from latimer.backends.errors import RequestError, WordTooLong
from latimer.backends.llama_cpp import DEMO_MODEL, vocabulary
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from latimer.backends.spellings import STEP
from latimer.schemas.limits import WORD
from support.marks import MODELS, VOCABULARIES, with_marks

PLAIN = (
    " ",
    "\n",
    " \n ",
    "hello",
    "wor ld",
    "\u00e9",
    "\U0001f600",
    "<|im",
    "<",
    "|>",
    "  a",
    "[",
    "]",
)


@pytest.fixture(scope="module", params=VOCABULARIES)
def known(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Vocabulary]:
    """The vocabulary of each kind of tokenizer."""
    source, changes = VOCABULARIES[request.param]
    target = tmp_path_factory.mktemp("marks") / "marks.gguf"
    path = with_marks(MODELS / f"{source}.gguf", target, changes)
    model = LoadedModel(path, Options(threads=1))
    yield Vocabulary(model)
    model.close()


def test_pieces_come_to_the_same_ids(known: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is tokenized in pieces gives the same ids as in one call."""
    monkeypatch.setattr(vocabulary, "PIECE", 20)
    marks = [special.spelling for special in known.specials]
    numbers = random.Random(0)
    cut = 0
    for _ in range(300):
        words = numbers.choices([*marks, *PLAIN], k=numbers.randint(3, 60))
        text = "".join(words)
        for special in (True, False):
            for begins in (True, False):
                whole = vocabulary.tokenize(known.pointer, text.encode(), begins, special)
                assert whole == known.tokenize(text, add_special=begins, parse_special=special)
            cut += len(list(known._cutters[special].pieces(text.encode()))) > 1
    assert cut > 100


def test_long_texts_of_control_tokens_take_time_by_their_size(known: Vocabulary) -> None:
    """A megabyte of control tokens takes less than five seconds. In one call it would take half a
    minute."""
    mark = next(one.spelling for one in known.specials if one.spelling == "<|im_end|>")
    start = time.thread_time()
    known.tokenize(f"{mark}hi" * 80_000, add_special=False, parse_special=True)
    assert time.thread_time() - start < 5


def test_the_first_long_text_loops_over_no_vocabulary() -> None:
    """The event loop tokenizes a first text of 5,000 letters in a few calls, for any size of
    the vocabulary."""
    model = LoadedModel(DEMO_MODEL, Options(threads=1))
    fresh = Vocabulary(model)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        fresh.tokenize("a b" * 2_000, add_special=True, parse_special=True)
        assert fresh.longest > 1
    finally:
        sys.setprofile(None)
    assert calls < 200 < fresh.size
    fresh.close()
    model.close()


def test_thousands_of_special_tokens_are_compared_in_time() -> None:
    """A cutter for the 6,000 special tokens of Gemma 3 is made in less than two seconds."""
    marks = [(b"<unused%d>" % number, False) for number in range(6_242)]
    runs = [(byte * size, False) for byte in (b"\n", b" ") for size in range(2, 32)]
    start = time.thread_time()
    cutter = vocabulary.Cutter([*marks, *runs, (b"<1>", False), (b"used1", False)])
    assert time.thread_time() - start < 2
    # Where one token is in another, the text is not cut.
    for mark in (b"\n\n", b"used1"):
        assert len([*cutter.pieces(mark.center(20, b".") * 1_000)]) == 1
    assert len([*cutter.pieces(b"<unused6000>a" * 1_000)]) == 4


def test_long_runs_are_refused_in_time_by_the_size(known: Vocabulary) -> None:
    """A run that would overflow llama.cpp's stack is rejected, and the check takes less than a
    second."""
    for blank, letter in ((" ", "a"), ("a", " ")):
        almost = (letter * WORD.maximum)[:-1] + blank
        start = time.thread_time()
        vocabulary._check_runs(almost * 4)
        assert time.thread_time() - start < 1
        with pytest.raises(RequestError, match="without a change"):
            known.tokenize(letter * (WORD.maximum + 1), add_special=False, parse_special=False)


def test_long_runs_side_by_side_are_several() -> None:
    """Runs of letters and of spaces that are searched in whole parts are not taken for one."""
    part = vocabulary._PART
    assert WORD.maximum - part < 15 * part < WORD.maximum
    vocabulary._check_runs(("a" * 15 * part + " " * part) * 3)
    with pytest.raises(WordTooLong) as found:
        vocabulary._check_runs(" " * part + "a" * (WORD.maximum + 1))
    assert found.value.beginning == "a" * 20


def test_texts_of_beginnings_weigh_more(known: Vocabulary) -> None:
    """A text full of what special tokens begin with weighs by their number; words do not."""
    count = sum(one.spelling.startswith("<") for one in known.specials)
    assert known.weight("a b " * 100) == 400
    assert known.weight("<" * 400) == 400 + 400 * count // 20


def test_a_search_of_beginnings_is_bounded(
    known: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes with a beginning everywhere are searched for a place to cut in bounded steps."""
    ends: list[int] = []

    class Counted:
        def finditer(self, data: bytes, start: int, end: int) -> Iterator[object]:
            ends.append(end - start)
            return iter(())

    own = known._cutters[True]
    monkeypatch.setattr(own._spellings, "_pattern", Counted())
    assert list(own.pieces(b"<|" * 100_000)) == [b"<|" * 100_000]
    assert max(ends) < STEP + 100


def test_work_that_is_abandoned_leaves_the_vocabulary_free() -> None:
    """Abandoned at the start of any function, a thread leaves no lock taken and no call counted."""
    model = LoadedModel(DEMO_MODEL, Options(threads=1))
    real = Vocabulary(model)
    ended = threading.Event()

    def work() -> None:
        at = 0
        while True:
            at += 1
            left = at

            def trace(*_: object) -> None:
                nonlocal left
                left -= 1
                if not left:
                    raise offload.Abandoned

            sys.settrace(trace)
            try:
                real.tokenize("Hello", add_special=False, parse_special=False)
            except offload.Abandoned:
                continue
            finally:
                sys.settrace(None)
            break
        assert at > 3
        real.close()
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(10)
    model.close()
