"""Single edits of the correct server's responses, and the share that the checks catch.

    cd tests && python -m suite.mutations [--only PATTERN] [--part 1/8] [--json FILE]
    cd tests && python -m suite.mutations --page FILE …

The program records every response of the correct server, and finds all places in them: the keys of
the replies, of the chunks, of the events, of the errors, and the headers. A mutant is a server that
makes one edit at one place of each response that has it: where a list repeats the place, at the
last one. A mutant is caught if a check fails. `harmless.json` lists the edits that break no clause
of the contract, as patterns with a reason; a check may catch one where the server states it twice.

The second form writes `docs/conformance/mutations.md` from the results of the parts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import marshal
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from suite.server import Fault
from suite.trial import Trial, opened

HARMLESS = Path(__file__).parent / "harmless.json"
PAGE = Path(__file__).parents[2] / "docs" / "conformance" / "mutations.md"
# The hooks that get a response, each with the index of the response among its arguments, and of
# the name of the endpoint if there is one.
HOOKS: Mapping[str, tuple[int, int | None]] = {
    "reply": (1, 0),
    "chunks": (1, 0),
    "audio_events": (1, 0),
    "events": (0, None),
    "replay": (0, None),
    "message_events": (0, None),
    "lane": (0, None),
    "refusal": (0, None),
    "error": (1, None),
    "headers": (1, None),
}
# The names of groups in the table, by the hook; a group of `reply` or `chunks` adds its endpoint.
TITLES: Mapping[str, str] = {
    "reply": "plain", "chunks": "streamed", "events": "streamed /responses",
    "replay": "/responses, streamed again", "message_events": "streamed /messages",
    "lane": "/responses over a WebSocket", "refusal": "errors over a WebSocket",
    "error": "errors", "headers": "headers", "audio_events": "streamed",
}  # fmt: skip
# The client's own objects, of which each value is alike, and any key of which is as good.
DATA = {"metadata", "schema", "parameters", "top_logprobs"}
GONE = object()
# The checks that run first, of those that caught the mutants before.
LIKELY = 12
# The mutants after which the file with the results is written again.
OFTEN = 50
Path_: TypeAlias = tuple[str, ...]
Edit: TypeAlias = Callable[[Any], Any]


def _other(value: Any) -> Any:
    """Return a value of another type."""
    return 7 if isinstance(value, str | list | dict) or value is None else str(value)


# The edits by the type of the value.
ANY: Mapping[str, Edit] = {"dropped": lambda value: GONE, "of another type": _other}
EDITS: Mapping[type, Mapping[str, Edit]] = {
    dict: {"emptied": lambda value: {} if value else GONE},
    list: {
        "without the last": lambda value: value[:-1],
        "with the last twice": lambda value: [*value, *value[-1:]],
        "reversed": lambda value: value[::-1],
    },
    str: {
        "empty": lambda value: "",
        "cut": lambda value: value[:-1],
        "longer": lambda value: value + "x",
    },
    int: {"one more": lambda value: value + 1, "negative": lambda value: -value - 1},
    float: {
        "rounded": lambda value: round(value, 3),
        "positive": lambda value: -value + 1e-3,
        "a bit less": lambda value: value - 0.01,
    },
    bool: {"flipped": lambda value: not value},
    type(None): {"a word": lambda value: "word"},
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A server that makes one edit at one place.

    Args:
        hook: the hook of `Fault` that makes the edit.
        at: the endpoint; empty for all.
        place: the keys that lead to the value; `*` is any element of a list.
        edit: the name of the edit, among those of the value's type.
    """

    hook: str
    at: str
    place: Path_
    kind: type
    edit: str

    def __str__(self) -> str:
        """Return the name, as patterns match it."""
        where = ".".join(self.place) or "itself"
        return " ".join(filter(None, (self.hook, self.at, where, self.edit)))

    def fault(self) -> Fault:
        """Return the server's fault."""
        index, at = HOOKS[self.hook]
        edit = {**ANY, **EDITS[self.kind]}[self.edit]

        def hook(*given: Any) -> Any:
            value = {"error": given[index]} if self.hook == "error" else given[index]
            if at is None or given[at] == self.at:
                _, value = edited(value, self.place, self.kind, edit)
            return (given[0], value) if self.hook == "error" else value

        return Fault(**{self.hook: hook})


def edited(value: Any, place: Path_, kind: type, edit: Edit) -> tuple[bool, Any]:
    """Edit the last value of a type at a place, in a copy.

    Returns:
        True if there was one that the edit changes, and the copy.
    """
    if not place:
        if type(value) is not kind:
            return False, value
        new = edit(value)
        return new is GONE or json.dumps(new) != json.dumps(value), new
    key, rest = place[0], place[1:]
    if key == "*" and isinstance(value, list):
        for index in reversed(range(len(value))):
            done, new = edited(value[index], rest, kind, edit)
            if done:
                return True, [*value[:index], *([] if new is GONE else [new]), *value[index + 1 :]]
    elif isinstance(value, dict):
        for name in [*reversed(value)] if key == "*" else [key] if key in value else []:
            done, new = edited(value[name], rest, kind, edit)
            if done:
                same = {one: other for one, other in value.items() if one != name}
                return True, same if new is GONE else {**value, name: new}
    return False, value


def places(value: Any, place: Path_ = ()) -> Iterator[tuple[Path_, type]]:
    """Yield the places in a value, with the type of what is there."""
    yield place, type(value)
    if isinstance(value, list):
        for one in value:
            yield from places(one, (*place, "*"))
    elif isinstance(value, dict):
        # In a legacy completion, an entry of `top_logprobs` has a key for each token.
        is_data = not DATA.isdisjoint(place[-2:]) and "logprob" not in value
        for name, one in value.items():
            if not is_data:
                yield from places(one, (*place, name))
            elif not isinstance(one, dict | list):
                yield (*place, "*"), type(one)


def mutants(trial: Trial) -> list[Mutant]:
    """Return all mutants of the recorded responses, sorted by name."""
    found: set[Mutant] = set()
    for name in HOOKS:
        for where, value, _ in _responses(trial, name):
            for place, kind in places(value):
                is_bare = not place or place[-1] == "*" or name == "headers"
                edits = EDITS[kind] if is_bare else {**ANY, **EDITS[kind]}
                found |= {Mutant(name, where, place, kind, edit) for edit in edits}
    return sorted(found, key=lambda one: (str(one), one.kind.__name__))


def harmless() -> Mapping[str, str]:
    """Return the patterns of edits that break no clause, with the reasons."""
    listed: Mapping[str, str] = json.loads(HARMLESS.read_text())
    return listed


def reason_of(mutant: Mutant, listed: Mapping[str, str]) -> str:
    """Return why an edit breaks no clause, or an empty string.

    A pattern may end in the type of the value, such as `(NoneType)`.
    """
    names = str(mutant), titled(mutant)
    found = (
        why for pattern, why in listed.items() if any(fnmatchcase(one, pattern) for one in names)
    )
    return next(found, "")


def titled(mutant: Mutant) -> str:
    """Return the name of a mutant with the type of the value."""
    return f"{mutant} ({mutant.kind.__name__})"


async def survivors(
    trial: Trial, chosen: Iterable[Mutant], say: Callable[[Mutant, str | None], None]
) -> None:
    """Run each mutant, and tell the check that catches it; None if none does.

    The checks that caught the mutants before, in the same responses, run first.
    """
    recorded = {name: [*_responses(trial, name)] for name in HOOKS}
    likely: dict[tuple[str, str], list[str]] = defaultdict(list)
    for mutant in chosen:
        edit = {**ANY, **EDITS[mutant.kind]}[mutant.edit]
        ids = {
            run
            for at, value, runs in recorded[mutant.hook]
            if at == mutant.at and edited(value, mutant.place, mutant.kind, edit)[0]
            for run in runs
        }
        if not ids:
            continue
        first = likely[mutant.hook, mutant.at]
        check = await trial.caught(mutant.fault(), ids, first[:LIKELY])
        if check:
            first[:] = [check, *(one for one in first if one != check)]
        say(mutant, check)


def _responses(trial: Trial, name: str) -> Iterator[tuple[str, Any, Collection[str]]]:
    """Yield each response that a hook got: its endpoint, its value, and the checks with it."""
    index, at = HOOKS[name]
    for use, runs in trial.uses.runs_of(name):
        given = marshal.loads(use.given or b"")  # noqa: S302
        value = {"error": given[index]} if name == "error" else given[index]
        yield "" if at is None else given[at], value, runs


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a mutant.

    Args:
        group: the responses that it edits.
        check: the check that catches it, or an empty text.
        reason: why the edit breaks no clause, or an empty text.
    """

    group: str
    check: str
    reason: str


def table(results: Iterable[Result]) -> str:
    """Return the numbers of edits by group, as a table."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        kind = "caught" if one.check else "harmless" if one.reason else "survives"
        counts[one.group][kind] += 1
        counts["all"][kind] += 1
    lines = ["| responses | edits | break no clause | break one | caught | percent |",
             "|---|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name in sorted(counts, key=lambda name: (name == "all", name)):
        own = counts[name]
        broken = own["caught"] + own["survives"]
        share = f"{math.floor(1000 * own['caught'] / broken) / 10:.1f} %" if broken else "–"
        cells = (name, own.total(), own["harmless"], broken, own["caught"], share)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# Single edits of right responses

A suite is as good as the breaches that it notices. A program records each response of a small \
server that keeps every promise, and makes every single edit of it. It drops a key, or gives it a \
value of another type. It cuts, lengthens or empties a text. It takes elements from lists, repeats \
them or turns them round. It rounds a number to three digits, or changes its sign. The server with \
one edit is judged by all checks; the edit is caught if one of them fails.

`cd tests && python -m suite.mutations --json ../all.json` makes the edits in five to ten minutes, \
`--part 1/4` a quarter of them, and `python -m suite.mutations --page ../all.json` this page.
"""


def page(results: Mapping[str, Result]) -> str:
    """Return the page of the documentation: the table, what survives, and what is harmless."""
    left = [name for name, one in results.items() if not (one.check or one.reason)]
    survivors = (
        "".join(f"- `{name}`\n" for name in left) or "Every edit that breaks one is caught.\n"
    )
    counts = Counter(one.reason for one in results.values() if one.reason and not one.check)
    reasons = "".join(f"| {why} | {counts[why]} |\n" for why in dict.fromkeys(harmless().values()))
    return (
        f"{INTRODUCTION}\n{table(results.values())}\n"
        f"## Edits that break a clause, and survive\n\n{survivors}\n"
        "## Edits that break no clause\n\n"
        "`tests/suite/harmless.json` has the patterns of these edits. A check may catch one "
        "nevertheless, where the server states the value twice.\n\n"
        f"| reason | edits |\n|---|--:|\n{reasons}"
    )


def _read(paths: Iterable[Path]) -> dict[str, Result]:
    """Return the results of all parts."""
    parts = [json.loads(path.read_text()) for path in paths]
    return {name: Result(**one) for part in parts for name, one in sorted(part.items())}


async def main(words: Sequence[str]) -> int:
    """Print the survivors and a table of the shares; return 1 if one breaks a clause."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", default="*", metavar="PATTERN", help="of the mutants' names")
    options.add_argument("--part", default="1/1", help="such as 1/8: every eighth mutant")
    options.add_argument("--json", type=Path, help="a file for the result of each mutant")
    options.add_argument("--page", type=Path, nargs="+", help="write the page from these files")
    arguments = options.parse_args(words)
    if arguments.page:
        PAGE.write_text(page(_read(arguments.page)))
        return 0
    number, count = map(int, arguments.part.split("/"))
    listed = harmless()
    results: dict[str, Result] = {}

    def say(mutant: Mutant, check: str | None) -> None:
        group = f"{TITLES[mutant.hook]} {mutant.at}".strip()
        name = titled(mutant)
        results[name] = Result(group, check or "", reason_of(mutant, listed))
        if not check and not results[name].reason:
            sys.stdout.write(f"survives: {name}\n")
            sys.stdout.flush()
        if arguments.json and len(results) % OFTEN == 0:
            write()

    def write() -> None:
        found = {name: asdict(one) for name, one in sorted(results.items())}
        arguments.json.write_text(json.dumps(found, indent=0))

    async with opened() as trial:
        chosen = [one for one in mutants(trial) if fnmatchcase(str(one), arguments.only)]
        # A run that is cut off has judged a sample of all groups.
        random.Random(0).shuffle(chosen)
        await survivors(trial, chosen[number - 1 :: count], say)
    sys.stdout.write(table(results.values()))
    if arguments.json:
        write()
    return 1 if any(not (one.check or one.reason) for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
