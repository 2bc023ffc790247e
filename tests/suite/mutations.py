"""Single edits of the correct server's responses, and the share that the checks catch.

    cd tests && python -m suite.mutations [--only PATTERN] [--part 1/8] [--json FILE]

The program records every response of the correct server, and finds all places in them: the keys of
the replies, of the chunks, of the events and of the errors. A mutant is a server that makes one
edit at one place of each response that has it: where a list repeats the place, at the last one. A
mutant is caught if a check fails. `harmless.json` lists the edits that break no clause of the
contract, as patterns with a reason; a check may catch one where the server states it twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import marshal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from suite.server import Fault
from suite.trial import Trial, opened

HARMLESS = Path(__file__).parent / "harmless.json"
# The hooks that get a response, each with the index of the response among its arguments, and of
# the name of the endpoint if there is one.
HOOKS: Mapping[str, tuple[int, int | None]] = {
    "reply": (1, 0),
    "chunks": (1, 0),
    "audio_events": (1, 0),
    "events": (0, None),
    "replay": (0, None),
    "error": (1, None),
}
# The client's own objects, of which each value is alike, and any key of which is as good.
DATA = {"metadata", "schema", "parameters", "top_logprobs"}
GONE = object()
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
    for name, (index, at) in HOOKS.items():
        for use in trial.uses.of(name):
            given = marshal.loads(use.given or b"")  # noqa: S302
            value = {"error": given[index]} if name == "error" else given[index]
            for place, kind in places(value):
                edits = EDITS[kind] if not place or place[-1] == "*" else {**ANY, **EDITS[kind]}
                where = "" if at is None else given[at]
                found |= {Mutant(name, where, place, kind, edit) for edit in edits}
    return sorted(found, key=lambda one: (str(one), one.kind.__name__))


def harmless() -> Mapping[str, str]:
    """Return the patterns of edits that break no clause, with the reasons."""
    listed: Mapping[str, str] = json.loads(HARMLESS.read_text())
    return listed


def reason_of(mutant: Mutant, listed: Mapping[str, str]) -> str:
    """Return why an edit breaks no clause, or an empty string."""
    name = str(mutant)
    return next((why for pattern, why in listed.items() if fnmatchcase(name, pattern)), "")


async def survivors(
    trial: Trial, chosen: Iterable[Mutant], say: Callable[[Mutant, str | None], None]
) -> None:
    """Run each mutant, and tell the check that catches it; None if none does."""
    for mutant in chosen:
        fault = mutant.fault()
        if trial.uses.noticing(fault):
            say(mutant, await trial.caught(fault))


async def main(words: Sequence[str]) -> int:
    """Print the survivors and a table of the shares; return 1 if one breaks a clause."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--only", default="*", metavar="PATTERN", help="of the mutants' names")
    options.add_argument("--part", default="1/1", help="such as 1/8: every eighth mutant")
    options.add_argument("--json", type=Path, help="a file for the result of each mutant")
    arguments = options.parse_args(words)
    number, count = map(int, arguments.part.split("/"))
    listed = harmless()
    results: dict[str, str] = {}
    table: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    wrong = 0

    def say(mutant: Mutant, check: str | None) -> None:
        nonlocal wrong
        why = reason_of(mutant, listed)
        results[f"{mutant} ({mutant.kind.__name__})"] = check or why or "SURVIVES"
        row = table[f"{mutant.hook} {mutant.at}".strip()]
        row[0 if check else 1 if why else 2] += 1
        if not check and not why:
            wrong += 1
            sys.stdout.write(f"survives: {mutant} ({mutant.kind.__name__})\n")
            sys.stdout.flush()

    async with opened() as trial:
        chosen = [one for one in mutants(trial) if fnmatchcase(str(one), arguments.only)]
        await survivors(trial, chosen[number - 1 :: count], say)
    sys.stdout.write("| responses | caught | harmless | survive | of those that break a clause |\n")
    sys.stdout.write("|---|--:|--:|--:|--:|\n")
    for name, (caught, fine, left) in table.items():
        share = f"{100 * caught / (caught + left):.1f} %" if caught + left else ""
        sys.stdout.write(f"| {name} | {caught} | {fine} | {left} | {share} |\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=0))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
