"""Tool calls in every format, complete, broken, and split anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.chat.formats import FORMATS, ToolCallFormat, format_of
from latimer.adapter.chat.parsers import StrictCallParser
from latimer.adapter.generation.choice import Parser, Part

from .outputs import OUTPUTS, Expected

CITY = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = {"get_weather": CITY, "get_time": None, "brave_search": None, "python": None}
BY_TITLE = {form.title: form for form in FORMATS}
CASES = [(title, *case) for title, cases in OUTPUTS.items() for case in cases]
# MARKED: cases whose markers may be tokens. SURE: cases with a call that a marker begins.
MARKED = [case for case in CASES if BY_TITLE[case[0]].markers]
SURE = [
    case
    for case in CASES
    if case[0] not in ("llama3", "bare") and any(isinstance(one, tuple) for one in case[2])
]
ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "tests" / "templates"


def read(
    form: ToolCallFormat,
    chunks: Iterable[tuple[bytes, bool]],
    special: frozenset[str] = frozenset(),
    enforced: bool = False,
) -> list[Part]:
    """Return the parsed parts of chunks of (bytes, True for a control token)."""
    parser = form.parser(FUNCTIONS, special, enforced, False)
    return [*(part for data, mark in chunks for part in parser.feed(data, mark)), *parser.end()]


def whole(parts: Sequence[Part]) -> list[str | tuple[str, str]]:
    """Join parts into texts, reasoning in parentheses, and (name, arguments) pairs."""
    joined: list[Part] = []
    for part in (one for one in parts if one.kind != "nothing"):
        if joined and joined[-1].kind == part.kind and part.kind != "call":
            joined[-1] = Part(part.kind, joined[-1].data + part.data, 0)
        else:
            joined.append(part)
    out: list[str | tuple[str, str]] = []
    for part in joined:
        text = part.data.decode(errors="replace")
        if part.kind == "arguments":
            out[-1] = (out[-1][0], text)
        elif part.kind == "call":
            out.append((text, ""))
        else:
            out.append(f"({text})" if part.kind == "reasoning" else text)
    return out


def end_of_calls(parts: Sequence[Part]) -> int:
    """Return the number of bytes up to the end of the last arguments."""
    sizes = list(accumulate(part.size for part in parts))
    return max(
        size for part, size in zip(parts, sizes, strict=True) if part.kind in ("call", "arguments")
    )


def halves(data: bytes) -> Iterator[list[tuple[bytes, bool]]]:
    """Yield every split of bytes in two, and the split into single bytes."""
    for at in range(len(data) + 1):
        yield [(data[:at], False), (data[at:], False)]
    yield [(data[at : at + 1], False) for at in range(len(data))]


@pytest.mark.parametrize(("title", "output", "expected"), CASES)
def test_outputs_are_read_alike_in_every_split(title: str, output: str, expected: Expected) -> None:
    """Calls, content and broken output are parsed the same at every split."""
    form, data = BY_TITLE[title], output.encode()
    for chunks in halves(data):
        parts = read(form, chunks)
        assert whole(parts) == list(expected)
        assert sum(part.size for part in parts) == len(data)


class Parsed(Parser):
    """A parser that has read its text already."""

    in_call = False

    def __init__(self, parts: Iterable[list[Part]]) -> None:
        self._parts = iter(parts)

    def feed(self, data: bytes, is_control: bool = False) -> list[Part]:
        """Return the next parts."""
        return next(self._parts)

    def end(self) -> list[Part]:
        """Return the last parts."""
        return next(self._parts)


def test_every_format_is_tested_and_documented() -> None:
    """Every format has outputs for the tests, and docs/tools.md, README and CHANGELOG count it."""
    assert OUTPUTS.keys() == BY_TITLE.keys()
    _, _, page = (ROOT / "docs" / "tools.md").read_text().partition("| models | a call |")
    assert page.partition("\n\n")[0].count("\n| ") == len(FORMATS)
    for name in ("README.md", "CHANGELOG.md"):
        assert f" {len(FORMATS)} formats" in (ROOT / name).read_text()


@pytest.mark.parametrize(("title", "output", "expected"), CASES)
def test_calls_of_strict_functions_match_their_schemas(
    title: str, output: str, expected: Expected
) -> None:
    """At every split, a call whose arguments match is a call, and one whose arguments do not is
    the text that the model wrote."""
    schemas: dict[bool, Any] = {True: {}, False: {"not": {}}}
    seen = {is_valid: set[str]() for is_valid in schemas}
    for chunks in halves(output.encode()):
        own = BY_TITLE[title].parser(FUNCTIONS, frozenset(), False, False)
        given = [*(own.feed(data) for data, _ in chunks), own.end()]
        for is_valid, schema in schemas.items():
            parser = StrictCallParser(Parsed(given), dict.fromkeys(FUNCTIONS, schema))
            parts = [*(part for data, _ in chunks for part in parser.feed(data)), *parser.end()]
            assert sum(part.size for part in parts) == len(output.encode())
            seen[is_valid].add(json.dumps(whole(parts)))
            if not is_valid:
                assert not {"call", "arguments"} & {part.kind for part in parts}
    assert seen[True] == {json.dumps(expected)}
    assert len(seen[False]) == 1


@pytest.mark.parametrize(("title", "output", "expected"), MARKED)
def test_markers_that_are_tokens(title: str, output: str, expected: Expected) -> None:
    """The parser reads markers that arrive as tokens like markers in text."""
    form = BY_TITLE[title]
    markers = sorted(form.markers, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, markers))})")
    chunks = [(text.encode(), text in markers) for text in pattern.split(output) if text]
    inside = re.search(r'": "[^"]*(</tool_call>)', output)
    if inside is not None:
        chunks = [(text, mark and text != b"</tool_call>") for text, mark in chunks]
    parts = read(form, chunks, frozenset(markers))
    assert whole(parts) == list(expected)
    assert sum(part.size for part in parts) == len(output.encode())


@pytest.mark.parametrize(
    "title",
    ["hermes", "mistral", "mistral-args", "tool-call-list", "glm", "minimax", "deepseek-v3.1"],
)
def test_text_that_is_spelled_like_a_token_is_text(title: str) -> None:
    """Text that spells a control token's marker makes no call."""
    form = BY_TITLE[title]
    output = OUTPUTS[title][0][0]
    for chunks in halves(output.encode()):
        assert whole(read(form, chunks, frozenset(form.markers))) == [output]


@pytest.mark.parametrize(("title", "output", "expected"), SURE)
def test_calls_that_are_sure_come_as_they_are_written(
    title: str, output: str, expected: Expected
) -> None:
    """A call that the grammar enforces is parsed the same from single bytes as from the whole."""
    form, data = BY_TITLE[title], output.encode()
    chunks = [(data[at : at + 1], False) for at in range(len(data))]
    at_once = read(form, [(data, False)], enforced=True)
    parts = read(form, chunks, enforced=True)
    assert whole(at_once) == whole(parts)
    assert end_of_calls(at_once) == end_of_calls(parts)
    assert sum(part.size for part in parts) == len(data)


@given(st.sampled_from(sorted(OUTPUTS)), st.data(), st.booleans())
def test_whatever_comes_is_read(title: str, data: st.DataObject, enforced: bool) -> None:
    """Any mix of outputs gives parts that cover every byte and do not depend on the split."""
    words = [output for output, _ in OUTPUTS[title]]
    text = "".join(
        word[data.draw(st.integers(0, len(word))) :][: data.draw(st.integers(0, 60))]
        for word in data.draw(st.lists(st.sampled_from([*words, "é", '"', "}"]), max_size=5))
    ).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    chunks = [(text[a:b], False) for a, b in pairwise(edges)]
    parts = read(BY_TITLE[title], chunks, enforced=enforced)
    assert sum(part.size for part in parts) == len(text)
    assert whole(parts) == whole(read(BY_TITLE[title], [(text, False)], enforced=enforced))
    if not enforced:
        for one in whole(parts):
            if isinstance(one, tuple):
                assert one[0] in FUNCTIONS
                assert isinstance(json.loads(one[1]), dict)


@pytest.mark.parametrize(
    ("template", "title"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", "hermes"),
        ("meta-llama-Llama-3.1-8B-Instruct", "llama3"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "mistral"),
        ("openai-gpt-oss-120b", "harmony"),
        ("ibm-granite-granite-3.3-2B-Instruct", "tool-call-list"),
        ("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "command-r7b"),
        ("GLM-4.6", "glm"),
        ("GLM-4.7-Flash", "glm"),
        ("deepseek-ai-DeepSeek-V3.1", "deepseek-v3.1"),
        ("deepseek-ai-DeepSeek-V3.2", "deepseek-v3.2"),
        ("deepseek-ai-DeepSeek-V4", "deepseek-v4"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("Kimi-K2-Thinking", "kimi-k2"),
        ("moonshotai-Kimi-K2", "kimi-k2-first"),
        ("MiniMax-M2", "minimax"),
        ("LFM2-8B-A1B", "lfm2"),
        ("LFM2.5-8B-A1B", "lfm2"),
        ("LFM2.5-Instruct", "lfm2"),
        ("google-gemma-4-31B-it", "gemma4"),
        ("google-gemma-4-31B-it-interleaved", "gemma4"),
        ("meetkai-functionary-medium-v3.1", "functionary-v3.1"),
        ("meetkai-functionary-medium-v3.2", "functionary-v3.2"),
        ("ibm-granite-granite-4.0", "hermes"),
        ("google-gemma-2-2b-it", None),
        ("microsoft-Phi-3.5-mini-instruct", None),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", None),
    ],
)
def test_a_template_says_how_its_model_calls(template: str, title: str | None) -> None:
    """A published template's tool call format is detected from its text."""
    form = format_of((TEMPLATES / f"{template}.jinja").read_text())
    assert (form.title if form is not None else None) == title


def test_no_marker_stands_in_another() -> None:
    """No marker contains another, so parsing does not depend on how the text is split."""
    for form in FORMATS:
        for one in form.markers:
            assert not [other for other in form.markers if one != other and one in other]


@pytest.mark.parametrize("form", [form for form in FORMATS if form.begin], ids=lambda f: f.title)
def test_what_a_format_writes_it_reads(form: ToolCallFormat) -> None:
    """A format's parser reads back the calls that the format writes."""
    calls = [("get_weather", {"city": 'Köln "am" Rhein', "days": 2}), ("get_time", {})]
    found = whole(read(form, [(form.render(calls).encode(), False)]))
    pairs = [one for one in found if isinstance(one, tuple)]
    assert [(name, json.loads(arguments)) for name, arguments in pairs] == calls
    assert len(pairs) == len(found)


@pytest.mark.parametrize("size", [65, 258])
@pytest.mark.parametrize(
    "form", [form for form in FORMATS if form.title != "harmony"], ids=lambda f: f.title
)
def test_the_longest_names_are_read(form: ToolCallFormat, size: int) -> None:
    """A name may be that of a namespace and a function, each with 128 characters."""
    name = "n" * size
    text = form.render([(name, {"city": "Rome"})]).encode()
    for enforced in (False, True):
        parser = form.parser({name: CITY}, frozenset(), enforced, False)
        (call,) = whole([*parser.feed(text), *parser.end()])
        assert call[0] == name
        assert json.loads(call[1]) == {"city": "Rome"}


@pytest.mark.parametrize("form", [form for form in FORMATS if form.openers], ids=lambda f: f.title)
def test_a_part_of_a_marker_is_not_content_if_a_call_is_forced(form: ToolCallFormat) -> None:
    """A forced call that ends inside its first marker has no content."""
    for begin in map(str.encode, form.openers):
        for size in range(1, len(begin)):
            parser = form.parser(FUNCTIONS, frozenset(form.markers), True, True)
            parts = [*parser.feed(begin[:size]), *parser.end()]
            assert whole(parts) == []
            assert sum(part.size for part in parts) == size


def test_a_part_of_a_marker_with_a_token_is_not_content() -> None:
    """Text that ends inside a marker after the marker's token is not content."""
    form = BY_TITLE["deepseek-v3.2"]
    begin, token, _ = form.begin.partition("｜DSML｜")
    chunks = [(b"So " + begin.encode(), False), (token.encode(), True), (b"functi", False)]
    parts = read(form, chunks, frozenset(form.markers))
    assert whole(parts) == ["So "]
    assert sum(part.size for part in parts) == sum(len(data) for data, _ in chunks)


def test_a_blank_after_the_python_tag_is_part_of_the_call() -> None:
    """A blank between Llama's marker and JSON belongs to the call, also if it arrives alone."""
    form = BY_TITLE["llama3"]
    texts = [b"<|python_tag|>", b" ", b'{"name": "get_time", "parameters": {}}']
    apart = read(form, [(text, False) for text in texts])
    assert end_of_calls(apart) == end_of_calls(read(form, [(b"".join(texts), False)]))
