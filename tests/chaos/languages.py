"""Strategies for grammars, regular expressions and JSON schemas: valid, almost valid, and any."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

GBNF = (
    'root ::= "yes" | "no"',
    "root ::= [a-z]+",
    'root ::= item (", " item){0,3}\nitem ::= [^"\\\\\\x00-\\x1f]{1,8} # a word',
    'root ::= object\nobject ::= "{" pair ("," pair)* "}"\npair ::= "\\"" [a-z]* "\\":" value\n'
    'value ::= object | [0-9]{1,3} | "null"',
    'root ::= (a | b)*\na ::= "x" b?\nb ::= "y" | "\\u00e9" | "\\U0001F600"',
    "root ::= .{1,20}",
    'root ::= ("a"? "b"?)*',
    "root ::= " + " | ".join(f'"w{n}"' for n in range(40)),
)
GBNF_TOKENS = (
    "root", "::=", "a", "b", "|", "(", ")", "*", "+", "?", "{", "}", "{2}", "{1,}", "{0,65535}",
    "{,3}", "{999999999999}", '"', '"x"', "[", "]", "[^", "[a-z]", "[^\n]", "[\\]]", "\\x0", "\\",
    "\\U00110000", "\\uD800", "#", "#" * 40, "\n", "\r\n", "\t", " ", ".", "-", "é", "\x00", "_",
    "::", "root ::= root", 'root ::= "" | root', "<[5]>", "!<[5]>", "%%",
)  # fmt: skip
REGEX_ATOMS = (
    "a", "b", "z", ".", "\\d", "\\w", "\\s", "\\S", "\\b", "\\B", "^", "$", "[a-z]", "[^a]", "[]",
    "[^]", "[\\w-]", "[z-a]", "\\n", "\\x41", "\\u0041", "\\u{1F600}", "\\p{L}", "\\pN", "\\P{Lu}",
    "\\1", "\\k<n>", "é", "漢", "🔥", "\\", "(", ")", "\\Q", "\\0", "\\cA", "\\/", "-", "]", "}",
    "{", "\x00", "[[:alpha:]]", "[a&&b]", "\\A", "\\z", "(?#x)", "<|im_end|>",
)  # fmt: skip
REGEX_GROUPS = (
    "(", "(?:", "(?=", "(?!", "(?<=", "(?<!", "(?<n>", "(?P<n>", "(?i)", "(?i:", "(?>", "(?-u:",
)  # fmt: skip
REGEX_COUNTS = (
    "*", "+", "?", "*?", "+?", "??", "*+", "{2}", "{2,}", "{0,3}", "{3,1}", "{1000}", "{65536}",
    "{0}", "{,5}", "{99999999999999999999}", "{", "**",
)  # fmt: skip
WORDS = ("a", "b", "name", "é", "", "x-y", "$ref", "a/b~c", "\x00", "p" * 300, "__proto__")
REFS = (
    "#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/definitions/none", "#a", "", "a.json",
    "http://127.0.0.1:9/x", "file:///etc/hostname", "#/allOf/0", "#/%24defs/a", "#/$defs/a/items",
    "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 5, 1.5, -0.0, 0.1, 1e308, -1e308, 5e-324, 2**31, 2**53 + 1, 2**63, -(2**63),
    10**30,
)  # fmt: skip


def pieces(tokens: tuple[str, ...], most: int = 30) -> st.SearchStrategy[str]:
    """Return a strategy for texts of some tokens in any order."""
    return st.lists(st.sampled_from(tokens), max_size=most).map("".join)


@st.composite
def _nearly(draw: st.DrawFn, whole: tuple[str, ...], tokens: tuple[str, ...]) -> str:
    """Draw a valid text with some tokens inserted, or some characters removed or doubled."""
    text = draw(st.sampled_from(whole))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(text)))
        length = draw(st.integers(0, 4))
        kind = draw(st.integers(0, 2))
        put = draw(st.sampled_from(tokens)) if kind == 0 else ""
        put = text[at : at + length] * 2 if kind == 1 else put
        text = text[:at] + put + text[at + length :]
    return text


def _long(kind: str, count: int) -> str:
    """Return a large text of one kind."""
    return {
        "comment": "root " + "#" * count,
        "rules": "\n".join(f"r{n} ::= r{n + 1}" for n in range(count // 10)) + "\nroot ::= r0",
        "nested": "root ::= " + "(" * count + '"a"' + ")" * count,
        "open": "root ::= " + "(" * count,
        "class": "root ::= [" + "a-z" * count + "]",
        "choice": "root ::= " + " | ".join(f'"w{n}"' for n in range(count // 5)),
        "counts": 'root ::= "a"' + "{2}" * (count % 64),
        "skips": f'root ::= ("a"? "b"? "c"?){{1,{count}}}',
        "doubling": "root ::= r0\n"
        + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(count % 64))
        + f'\nr{count % 64} ::= "a"?',
    }[kind]


_KINDS = ("comment", "rules", "nested", "open", "class", "choice", "counts", "skips", "doubling")
gbnf = st.one_of(
    st.sampled_from(GBNF),
    _nearly(GBNF, GBNF_TOKENS),
    pieces(GBNF_TOKENS).map(lambda text: "root ::= " + text),
    pieces(GBNF_TOKENS),
    st.builds(_long, st.sampled_from(_KINDS), st.sampled_from((10, 100, 1_000, 20_000))),
)


def _regexes() -> st.SearchStrategy[str]:
    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds(lambda a, n: a + n, inner, st.sampled_from(REGEX_COUNTS)),
            st.builds(lambda g, a: f"{g}{a})", st.sampled_from(REGEX_GROUPS), inner),
            st.lists(inner, max_size=4).map("|".join),
            st.lists(inner, max_size=4).map("".join),
        )

    return st.recursive(st.sampled_from(REGEX_ATOMS), grow, max_leaves=12)


regex = st.one_of(
    st.sampled_from(("[a-z ]*", "yes|no", "(\\d{3}-){2}\\d{4}", "[A-Z][a-z]{2,8}(, [a-z]+)*")),
    _regexes(),
    pieces((*REGEX_ATOMS, *REGEX_GROUPS, *REGEX_COUNTS, "|", ")")),
    st.builds(
        lambda text, n: text * n,
        st.sampled_from(("(", "[", "a|", "(a", "a?", "[^a]", "(a+)+", "a{50}", "\\", "(?=a)")),
        st.sampled_from((50, 1_000, 20_000)),
    ),
)
lark = st.one_of(
    st.sampled_from(('start: "a" | "b" start', "start: WORD\nWORD: /[a-z]+/")),
    _nearly(
        ('start: "a" | "b" start', "start: x+\nx: /[a-z]{1,9}/ | INT\nINT: /[0-9]+/"),
        ("start", ":", "|", "/", "(", ")", "*", '"', "~ 5", "%ignore", "%json", "{", "}", "\n",
         "@", "?", "!", "[", "lazy", "stop", "&", "/(/"),
    ),
)  # fmt: skip

_scalars: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(WORDS)
)
values: st.SearchStrategy[Any] = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=3)
    ),
    max_leaves=5,
)
_kinds = st.sampled_from(
    ("string", "integer", "number", "boolean", "null", "array", "object", "any", "", "file")
)


def _keyword(inner: st.SearchStrategy[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """Return a strategy for the values of each schema keyword, most of them valid."""
    named = st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    number, some = st.sampled_from(NUMBERS), st.lists(inner, max_size=3)
    names = st.lists(st.sampled_from(WORDS), max_size=4)
    return {
        "type": st.one_of(_kinds, st.lists(_kinds, max_size=3)),
        "properties": named, "$defs": named, "definitions": named, "dependentSchemas": named,
        "patternProperties": st.dictionaries(regex, inner, max_size=2),
        "additionalProperties": st.one_of(st.booleans(), inner),
        "unevaluatedProperties": st.one_of(st.booleans(), inner),
        "required": names, "dependentRequired": st.dictionaries(st.sampled_from(WORDS), names),
        "allOf": some, "anyOf": some, "oneOf": some, "prefixItems": some, "not": inner,
        "if": inner, "then": inner, "else": inner, "items": st.one_of(inner, some),
        "contains": inner, "propertyNames": inner, "enum": st.lists(values, max_size=4),
        "const": values, "default": values, "$ref": st.sampled_from(REFS),
        "$id": st.sampled_from(REFS),
        "$dynamicRef": st.sampled_from(REFS), "$anchor": st.sampled_from(WORDS),
        "$schema": st.one_of(st.sampled_from(REFS), values), "pattern": regex,
        "format": st.sampled_from(("date", "date-time", "uuid", "email", "ipv4", "regex", "x")),
        "minLength": number, "maxLength": number, "minItems": number, "maxItems": number,
        "minProperties": number, "maxProperties": number, "minimum": number, "maximum": number,
        "exclusiveMinimum": st.one_of(number, st.booleans()), "exclusiveMaximum": number,
        "multipleOf": number, "uniqueItems": st.booleans(), "nullable": st.booleans(),
        "title": values, "description": st.sampled_from((*WORDS, "d" * 10_000)),
    }  # fmt: skip


@st.composite
def _schema(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> Any:
    keywords = _keyword(inner)
    names = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True))
    found = {name: draw(keywords[name]) for name in names}
    if found and draw(st.integers(0, 9)) == 0:
        found[draw(st.sampled_from(sorted(found)))] = draw(values)
    return found


def _large_schema(kind: str, count: int) -> Any:
    names = [f"p{n}" for n in range(count)]
    nested: Any = {"type": "string"}
    for n in range(min(count, 110)):
        nested = {"properties": {"a": nested}} if n % 2 else {"items": nested}
    doubling = {
        f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 1}"}]}
        for n in range(min(count, 200))
    }
    return {
        "properties": {
            "properties": {name: {"type": "boolean"} for name in names},
            "type": "object",
        },
        "required": {"required": names, "type": "object"},
        "oneOf": {"oneOf": [{"const": name} for name in names]},
        "anyOf": {"anyOf": [{"properties": {n: {"type": "null"}}} for n in names]},
        "enum": {"enum": names},
        "nested": nested,
        "doubling": {"$ref": "#/$defs/d0", "$defs": doubling},
        "lengths": {"type": "string", "minLength": count, "maxLength": count * 3},
        "items": {"type": "array", "minItems": count, "items": {"type": "array", "minItems": 50}},
    }[kind]


_LARGE = ("properties", "required", "oneOf", "anyOf", "enum", "nested", "doubling", "lengths",
          "items")  # fmt: skip
schema: st.SearchStrategy[Any] = st.one_of(
    st.recursive(
        st.sampled_from(
            ({}, {"type": "string"}, {"type": "integer", "minimum": 0}, {"enum": ["a", 1]},
             {"$ref": "#/$defs/a"}, {"$ref": "#"}, True, False)
        ),
        _schema,
        max_leaves=8,
    ),
    st.builds(
        lambda whole, a: {**whole, "$defs": {"a": a}} if isinstance(whole, dict) else whole,
        st.recursive(st.just({"$ref": "#/$defs/a"}), _schema, max_leaves=4),
        st.recursive(st.just({"$ref": "#/$defs/a"}), _schema, max_leaves=4),
    ),
    st.builds(_large_schema, st.sampled_from(_LARGE), st.sampled_from((5, 100, 500, 3_000))),
)  # fmt: skip
