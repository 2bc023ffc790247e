"""The pages of the reference that are written from the program, and `llms.txt`.

`LATIMER_SNAPSHOT=1 pytest tests/website/test_reference.py` writes them into docs/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import click
from latimer.adapter.cli import main
from latimer.adapter.openapi import OPERATIONS, REPLY_HEADERS, REQUEST_HEADERS, document
from latimer.adapter.settings import Settings
from latimer.schemas.openai.common import EngineExtras
from website.build import DOCS, navigation, pages

BAR = "\\|"
EXTRAS = EngineExtras.model_fields.keys()

Schema: TypeAlias = Mapping[str, Any]


def cell(text: str) -> str:
    """Return a text as a cell of a table: one line, and no bars."""
    return " ".join(text.split()).replace("|", BAR)


def table(heads: str, rows: Iterator[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table.

    Args:
        heads: the heads, with ` | ` between them.
    """
    lines = [f"| {heads} |", "|---" * (heads.count("|") + 1) + "|"]
    return [*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)]


# The endpoints.


def endpoints() -> str:
    """Return the page of the endpoints, by subject, with the fields of their requests."""
    found = document()
    lines = [
        "# Endpoints",
        "",
        "Send requests to these paths below the base URL `http://127.0.0.1:8000/v1`:",
        "",
    ]
    lines += [f"- [{tag}](#{anchor(tag)})" for tag in tags()]
    lines += [
        "- [Fields of engines](#fields-of-engines)",
        "",
        "The prefix `/v1` may be missing, and slashes may be doubled. [openapi.json]"
        "(../openapi.json) has the schemas of all requests and replies. [Errors](../errors.md) are"
        " OpenAI's.",
        "",
    ]
    known: dict[tuple[Any, ...], str] = {}
    for tag in tags():
        lines += [f"## {tag}", ""]
        own = [
            (path, method, one)
            for path, item in found["paths"].items()
            for method, one in item.items()
            if method in ("get", "post", "delete") and one.get("tags") == [tag]
        ]
        calls = ((call(path, found, method), f"{one['summary']}.") for path, method, one in own)
        lines += table("request | effect", calls)
        lines.append("")
        for path, method, one in own:
            name, rows = f"`{method.upper()} {path}`", [*fields(one, found)]
            same = known.setdefault(tuple(rows), name)
            if rows and same != name:
                lines += [f"{name} has the fields of {same}.", ""]
            elif rows:
                lines += [f"### Fields of {name}", ""]
                lines += table("field | type | required", iter(rows))
                lines += ["", *([ENGINES, ""] if takes_extras(one, found) else [])]
    lines += ["## Fields of engines", "", EXTRA_TEXT, ""]
    body = found["components"]["schemas"]["ChatRequest"]["properties"]
    lines += table("field | type", ((f"`{name}`", words(body[name], found)) for name in EXTRAS))
    return "\n".join([*lines, ""])


ENGINES = "The [fields of engines](#fields-of-engines) work, too."
EXTRA_TEXT = (
    "OpenAI's API does not have these fields, which chat completions, completions and responses"
    " take. An engine that lacks one [rejects it](../errors.md)."
)


def tags() -> Iterator[str]:
    """Yield the subjects of the endpoints."""
    yield from dict.fromkeys(one.tag for one in OPERATIONS.values())


def anchor(title: str) -> str:
    """Return the anchor of a heading without punctuation."""
    return title.lower().replace(" ", "-")


def call(path: str, found: Schema, method: str) -> str:
    """Return a method and a path; one outside of `/v1` from the root."""
    is_root = "servers" in found["paths"][path]
    return f"`{method.upper()} {path}`" + " at the root" * is_root


def body_of(operation: Schema, found: Schema) -> Schema:
    """Return the schema of an operation's body, or an empty one."""
    if "requestBody" not in operation:
        return {}
    # JSON, or a form.
    (content,) = operation["requestBody"]["content"].values()
    return resolved(content["schema"], found)


def takes_extras(operation: Schema, found: Schema) -> bool:
    """Return True if a request has the fields of engines."""
    return bool(body_of(operation, found).get("properties", {}).keys() >= EXTRAS)


def fields(operation: Schema, found: Schema) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the type and the need of each field of a body or a query."""
    for one in operation.get("parameters", ()):
        yield f"`{one['name']}` in the query", words(one["schema"], found), ""
    body = body_of(operation, found)
    needed = body.get("required", ())
    without = EXTRAS if takes_extras(operation, found) else ()
    for name, one in body.get("properties", {}).items():
        if name not in without:
            yield f"`{name}`", words(one, found), "yes" * (name in needed)


def resolved(schema: Schema, found: Schema) -> Schema:
    """Return the schema that a reference names."""
    if "$ref" not in schema:
        return schema
    target: Schema = found["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return target


def words(schema: Schema, found: Schema) -> str:
    """Return the type of a field and its limits in words."""
    variants = schema.get("anyOf") or schema.get("oneOf")
    if variants:
        texts = dict.fromkeys(words(one, found) for one in variants if one.get("type") != "null")
        return " or ".join(texts)
    if "$ref" in schema:
        return "object" if "properties" in resolved(schema, found) else "any"
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        inner = words(schema.get("items", {}), found)
        kind = "array" if inner == "any" else f"array of {inner}"
    return ", ".join([kind, *limits(schema)])


def limits(schema: Schema) -> Iterator[str]:
    """Yield the limits of a value."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    # The limits of 32 and 64 bits are those of any integer.
    low, high = (None if one is None or abs(one) > 2**31 - 2 else one for one in (low, high))
    if low is not None and high is not None:
        yield f"{low:g} to {high:g}"
    elif low is not None or high is not None:
        yield f"at least {low:g}" if high is None else f"at most {high:g}"
    for key, noun in (
        ("maxLength", "characters"),
        ("maxItems", "items"),
        ("maxProperties", "keys"),
    ):
        if key in schema:
            yield f"at most {schema[key]:,} {noun}"


# The headers and the commands.


def headers() -> str:
    """Return the page of the headers."""
    lines = ["# Headers", "", "Send these headers, as far as you need them:", ""]
    lines += table("request header | effect", rows_of(REQUEST_HEADERS))
    lines += ["", "Replies have these, as far as they apply:", ""]
    lines += table("reply header | content", rows_of(REPLY_HEADERS))
    lines += [
        "",
        "- Pages of other origins can read all headers of replies, if they may send requests.",
        "- [operations.md](../operations.md#the-request-log) describes ids and traces,"
        " [limits.md](../limits.md) limits and waiting, and [fleet.md](../fleet.md) engines.",
        "",
    ]
    return "\n".join(lines)


def rows_of(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the rows of a table of headers."""
    for name, text in found.items():
        yield f"`{name}`", text


SETTINGS = {"--" + name.replace("_", "-") for name in Settings.model_fields}


def commands() -> str:
    """Return the page of the commands with their options, but not those of the settings."""
    lines = [
        "# Commands",
        "",
        "Run `latimer COMMAND --help` for the text of a command. The [settings]"
        "(../serving.md#settings) are options of `latimer serve`, and are not repeated here.",
        "",
    ]
    for path, context in walk(main, "latimer", None):
        command = context.command
        usage = command.get_usage(context).removeprefix("Usage: ")
        lines += [f"## {path}", "", f"`{' '.join(usage.split())}`", "", *described(command)]
        found = [*options(context)]
        if found:
            lines += [*table("option | default | effect", iter(found)), ""]
        if takes_settings(command):
            lines += ["Its other options are [settings](../serving.md#settings).", ""]
    return "\n".join(lines)


def walk(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[str, click.Context]]:
    """Yield each command below a command, with the words that call it."""
    # The context of a command that is imported on use has the command itself.
    context = command.make_context(name, [], parent, resilient_parsing=True)
    yield context.command_path, context
    if isinstance(context.command, click.Group):
        for sub in context.command.list_commands(context):
            found = context.command.get_command(context, sub)
            assert found is not None
            yield from walk(found, sub, context)


def described(command: click.Command) -> Iterator[str]:
    """Yield the paragraphs of a command's help; examples stay in the help itself."""
    for paragraph in (command.help or "").split("\n\n"):
        if "\b" not in paragraph and paragraph.strip():
            yield " ".join(paragraph.split())
            yield ""


def takes_settings(command: click.Command) -> bool:
    """Return True if most options of a command are settings."""
    return sum(bool(SETTINGS & {*one.opts}) for one in command.params) > 10


def options(context: click.Context) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a command, without the settings of a server."""
    without = SETTINGS if takes_settings(context.command) else set()
    for parameter in context.command.params:
        record = parameter.get_help_record(context)
        if record is None or isinstance(parameter, click.Argument) or without & {*parameter.opts}:
            continue
        effect, _, notes = record[1].partition("  [")
        shown = [note.removeprefix("default: ") for note in notes.removesuffix("]").split("; ")]
        # A range is a limit, such as x>=1.
        default = ", ".join(note for note in shown if not re.search(r"\bx\b", note))
        yield f"`{record[0]}`", default, effect


# The list of pages for language models.


def llms() -> str:
    """Return `llms.txt`: the pages of the manual in the order of the navigation."""
    lines = [
        "# Latimer",
        "",
        f"> {first_paragraph(DOCS / 'index.md')}",
        "",
        "Addresses are relative to this file. [openapi.json](openapi.json) describes the API.",
        "",
    ]
    for section in navigation():
        ((title, entries),) = section.items()
        paths = [path for _, path in pages(entries) if not path.startswith("source/")]
        if paths:
            lines += [f"## {title}", ""]
            lines += [f"- [{title_of(DOCS / path)}]({path}): {summary(path)}" for path in paths]
            lines.append("")
    return "\n".join(lines)


def title_of(path: Path) -> str:
    """Return the title of a page."""
    return path.read_text().partition("\n")[0].removeprefix("# ")


def first_paragraph(path: Path) -> str:
    """Return the first paragraph of a page, without links."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    found = next(
        part
        for part in text.split("\n\n")[1:]
        if part.strip() and not part.startswith(("#", "!", "|"))
    )
    return " ".join(re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", found).split())


def summary(path: str) -> str:
    """Return the first sentence of a page."""
    sentence = first_paragraph(DOCS / path).partition(". ")[0]
    return sentence.rstrip(":.") + "."


def openapi() -> str:
    """Return the OpenAPI document."""
    return json.dumps(document(), indent=1, ensure_ascii=False) + "\n"


GENERATED: Mapping[str, Callable[[], str]] = {
    "openapi.json": openapi,
    "reference/endpoints.md": endpoints,
    "reference/headers.md": headers,
    "reference/commands.md": commands,
    "llms.txt": llms,
}
