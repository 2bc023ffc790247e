"""Tests that reasoning is separated from content, complete and split anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from latimer.adapter.chat.formats import HERMES
from latimer.adapter.chat.parsers import TextParser
from latimer.adapter.chat.reasoning import ReasoningParser, Tags, tags_of
from latimer.adapter.generation.choice import Parser, Part

from .test_formats import halves, whole

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
# Each: True if the prompt opens the reasoning, the output, the expected parts.
CASES: Sequence[tuple[bool, str, Sequence[str | tuple[str, str]]]] = [
    (False, "<think>\nSo é.\n</think>\n\nYes.", ["(So é.)", "Yes."]),
    (False, "\n<think>So.</think>Yes.", ["(So.)", "Yes."]),
    (False, "<think>\n\n</think>\n\nYes.", ["Yes."]),
    (False, "Yes, <think> is a tag.", ["Yes, <think> is a tag."]),
    (False, " Yes.", [" Yes."]),
    (False, "<thin", ["<thin"]),
    (False, "<think>So. <", ["(So. <)"]),
    (False, "<think>a </thin> b</think>c", ["(a </thin> b)", "c"]),
    (False, "<think>a</think> b </think> c", ["(a)", "b </think> c"]),
    (False, f"<think>{CALL}</think>{CALL}", [f"({CALL})", ("f", "{}")]),
    (False, "", []),
    (False, "<think>", []),
    (True, "So.\n</think>\n\nYes.", ["(So.)", "Yes."]),
    (True, "So.", ["(So.)"]),
    (True, "</think>Yes.", ["Yes."]),
    (True, f"So.</think>\n{CALL}", ["(So.)", ("f", "{}")]),
]


THINK = Tags("<think>", "</think>")
GEMMA, GRANITE = (
    tags_of(one) or THINK for one in ("<|channel>thought\n", "<think></think><response></response>")
)


def read(
    is_open: bool,
    chunks: Sequence[tuple[bytes, bool]],
    special: frozenset[str] = frozenset(),
    tags: Tags = THINK,
) -> list[Part]:
    """Return the parsed parts of some chunks."""
    answer: Parser = HERMES.parser({"f": None}, frozenset(), False, False)
    parser = ReasoningParser(tags, is_open, special, answer)
    return [*(part for data, mark in chunks for part in parser.feed(data, mark)), *parser.end()]


@pytest.mark.parametrize(("is_open", "output", "expected"), CASES)
def test_thoughts_are_read_alike_in_every_split(
    is_open: bool, output: str, expected: Sequence[str | tuple[str, str]]
) -> None:
    """Reasoning never becomes content, at any split of the text."""
    data = output.encode()
    for chunks in halves(data):
        parts = read(is_open, chunks)
        assert whole(parts) == list(expected)
        assert sum(part.size for part in parts) == len(data)


# Each: the tags, the output, the expected parts.
LABELLED: Sequence[tuple[Tags, str, Sequence[str | tuple[str, str]]]] = [
    (GEMMA, "<|channel>thought\nSo é.\n<channel|>Yes.", ["(So é.)", "Yes."]),
    (GEMMA, "<|channel>thought<channel|>Yes.", ["Yes."]),
    (GEMMA, "<|channel>\n<channel|>Yes.", ["Yes."]),
    (GEMMA, "<|channel>So.<channel|>Yes.", ["(So.)", "Yes."]),
    (GEMMA, "<|channel>though", []),
    (GEMMA, "<|channel>thought\nSo", ["(So)"]),
    (GEMMA, "thought\nYes.", ["thought\nYes."]),
    (GEMMA, f"<|channel>thought\nA\n<channel|>B <|channel>thought\nC\n<channel|>{CALL}",
     ["(A)", "B", "(\nC)", ("f", "{}")]),
    (GEMMA, f"{CALL}<|channel>thought\nA<channel|>\n<|channel>thoughtC<channel|>B",
     [("f", "{}"), "(A\nC)", "B"]),
    (GEMMA, "A <|tool<|channel>thought\nB<channel|>_call>", ["A <|tool", "(B)", "_call>"]),
    (GEMMA, "<|channel>\n<|channel><|channel>thought\nA<channel|>B", ["(A)", "B"]),
    (GEMMA, "A <|channel>thou", ["A <|channel>thou"]),
    (GEMMA, "A <|channel>x", ["A <|channel>x"]),
    (GEMMA, CALL.replace("{}", '{"a": "<|channel>thought"}'),
     [("f", '{"a": "<|channel>thought"}')]),
    (GRANITE, "<think>So.</think>\n<response>\nYes.\n</response>\n", ["(So.)", "Yes."]),
    (GRANITE, "<think>So.</think><response>Yes.", ["(So.)", "Yes."]),
    (GRANITE, "<think>So.</think><response>Yes. </respo", ["(So.)", "Yes. </respo"]),
    (GRANITE, "<think>So.</think><response>", ["(So.)"]),
    (GRANITE, "<think>So.</think><respo", ["(So.)", "<respo"]),
    (GRANITE, "<think>So.</think>Yes </response>", ["(So.)", "Yes </response>"]),
    (GRANITE, "<think>So.</think><response>a</response> b</response>",
     ["(So.)", "a</response> b"]),
    (GRANITE, "<response>Yes.</response>", ["<response>Yes.</response>"]),
    (GRANITE, f"<think>So.</think><response>{CALL}</response>", ["(So.)", ("f", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("tags", "output", "expected"), LABELLED)
def test_labels_and_tags_of_the_answer_are_no_content(
    tags: Tags, output: str, expected: Sequence[str | tuple[str, str]]
) -> None:
    """A label before reasoning, and tags around the answer, are dropped at any split."""
    data = output.encode()
    for chunks in halves(data):
        parts = read(False, chunks, tags=tags)
        assert whole(parts) == list(expected)
        assert sum(part.size for part in parts) == len(data)


def test_a_label_after_a_token() -> None:
    """A label is dropped after a tag that is a token, also without any reasoning."""
    special = frozenset(GEMMA[:2])
    chunks = [(b"<|channel>", True), (b"thou", False), (b"ght\na", False), (b"<channel|>", True)]
    assert whole(read(False, [*chunks, (b"b", False)], special, GEMMA)) == ["(a)", "b"]
    empty = [chunks[0], (b"thought", False), chunks[-1], (b"b", False)]
    assert whole(read(False, empty, special, GEMMA)) == ["b"]
    later = [*chunks, (b"b <|channel>thought", False), *chunks[:1], *chunks, (b"c", False)]
    parts = read(False, later, special, GEMMA)
    assert whole(parts) == ["(a)", "b <|channel>thought", "(\na)", "c"]
    assert sum(part.size for part in parts) == sum(len(data) for data, _ in later)
    cut = [(b"<think>a</think><response>b</response>", False), (b"<x>", True), (b"c", False)]
    assert whole(read(False, cut, frozenset({"<x>"}), GRANITE)) == ["(a)", "bc"]


def test_tags_that_are_tokens() -> None:
    """Text that spells reasoning tags is ordinary text if the tags are tokens."""
    special = frozenset({"<think>", "</think>"})
    chunks = [(b"<think>", True), (b"a </think> b", False), (b"</think>", True), (b"\nc", False)]
    assert whole(read(False, chunks, special)) == ["(a </think> b)", "c"]
    assert whole(read(False, [(b"<think>a</think>b", False)], special)) == ["<think>a</think>b"]
    assert whole(read(True, [(b"a\n", False), (b"</think>", True)], special)) == ["(a)"]


def test_a_token_of_calls_ends_reasoning() -> None:
    """The token before a call ends reasoning without an end tag; text that spells it does not."""
    special = frozenset(HERMES.markers)
    answer = HERMES.parser({"f": None}, special, False, False)
    parser = ReasoningParser(THINK, True, special, answer, HERMES.openers)
    begin, end = (one.encode() for one in HERMES.markers)
    chunks = [
        (b"a " + begin + b"{} \n", False), (begin, True), (b'{"name": "f"}', False), (end, True),
        (begin, True), (b'{"name": "g"}', False), (end, True),
    ]  # fmt: skip
    parts = [part for data, mark in chunks for part in parser.feed(data, mark)] + parser.end()
    assert whole(parts) == [
        "(a <tool_call>{})", ("f", "{}"), '<tool_call>{"name": "g"}</tool_call>'
    ]  # fmt: skip
    assert sum(part.size for part in parts) == sum(len(data) for data, _ in chunks)


def test_an_answer_without_calls() -> None:
    """A stray reasoning token in the content is dropped."""
    parser = ReasoningParser(THINK, False, frozenset({"<think>", "</think>"}), TextParser())
    chunks = [(b"a", False), (b"</think>", True), (b"b", False)]
    parts = [part for data, mark in chunks for part in parser.feed(data, mark)]
    assert whole(parts) == ["ab"]


def test_results_in_tags_are_no_answer() -> None:
    """Only Granite's template has tags around the answer; MiniMax's has them around results."""
    templates = Path(__file__).parents[2] / "templates"
    answers = {}
    for path in templates.glob("*.jinja"):
        tags = tags_of(path.read_text())
        if tags is not None and tags.answer is not None:
            answers[path.stem] = tags.answer
    assert answers == {"ibm-granite-granite-3.3-2B-Instruct": ("<response>", "</response>")}
