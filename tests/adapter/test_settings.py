"""Tests that an error in a setting is one line that says where the setting comes from."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import click
import pytest
from latimer.adapter.arguments import DEFAULTS, Options
from latimer.adapter.cli.check import check
from latimer.adapter.cli.commands import serve
from latimer.adapter.cli.options import option
from latimer.adapter.option import FLEET, SERVER, option_of
from latimer.adapter.settings import FlatSettings, Settings
from latimer.adapter.settings_file import WrongSettings
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.documents import blocks

ROOT = Path(__file__).parents[2]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
MOUNTING, SERVING = ROOT / "docs" / "mounting.md", ROOT / "docs" / "serving.md"
ENGINES = {"llama-cpp": LlamaCpp, "llama-server": LlamaServer, "koboldcpp": KoboldCpp}
FLEET_PAGE = ROOT / "docs" / "fleet.md"
# A vertical bar in a cell of a table.
BAR = r"\|"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a settings file, without settings in the environment."""
    monkeypatch.delenv("LATIMER_PORT", raising=False)
    return tmp_path / "latimer.toml"


def complaint(file: Path) -> str:
    """Return the error for a file, which names the file and has no wording of pydantic."""
    with pytest.raises(WrongSettings) as caught:
        Settings.load(file)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    assert not [word for word in ("Input should", "type=", "pydantic", "http") if word in message]
    return message.replace(str(file), "FILE")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('port = "x"', "FILE: port must be a whole number, not 'x'."),
        ("port = 99999", "FILE: port must be at most 65535, not 99999."),
        ("port = true", "FILE: port must be a whole number, not true."),
        ("port = 1.5", "FILE: port must be a whole number, not 1.5."),
        ("port = [1]", "FILE: port must be a whole number, not a list."),
        ("context = 0", "FILE: context must be at least 1, not 0."),
        ("host = 3", "FILE: host must be a string, not 3."),
        ("model_name = 5", "FILE: model_name must be a list of strings, not 5."),
        ('model_name = ["a", 5]', "FILE: model_name[1] must be a string, not 5."),
        ('strict = "maybe"', "FILE: strict must be true or false, not 'maybe'."),
        ("engine_timeout = inf", "FILE: engine_timeout must be a number, not inf."),
        ("keepalive = -1", "FILE: keepalive must be at least 0.0, not -1."),
        (
            "keepalive = 1e-9",
            "FILE: keepalive: expected 0 for never, or at least 0.1 seconds, not 1e-09.",
        ),
        ('gpu_layers = "many"', "FILE: gpu_layers must be a whole number of layers, or all, not "),
        ('flash_attention = "some"', "FILE: flash_attention must be auto, on or off, not 'some'."),
        ('pooling = "max"', "FILE: pooling must be one of mean, cls, last, rank, not 'max'."),
        ('embeddings = "some"', "FILE: embeddings must be true or false, not 'some'."),
        ("mmproj = 5", "FILE: mmproj must be the path of a file, not 5."),
        (
            'chat_format = "x"',
            "FILE: chat_format: unknown format 'x'; supported formats are alpaca, ",
        ),
        ("store = 5", "FILE: store must be a string."),
        (
            'store = ""',
            "FILE: store: expected memory, off, the path of an SQLite file such as FILE.db, or a "
            "URL such as postgresql://USER:PASSWORD@HOST:5432/NAME, but got nothing.",
        ),
        (
            "store_age = true",
            "FILE: store_age must be a duration such as 90s, 15m, 24h or 30d, or forever, not true",
        ),
        (
            "store_age = 24",
            "FILE: store_age: expected a duration such as 90s, 15m, 24h or 30d, or forever, not "
            "'24', which has no unit.",
        ),
        (
            'store_age = "1w"',
            "FILE: store_age: expected a duration such as 90s, 15m, 24h or 30d, or forever, not "
            "'1w'.",
        ),
        ("store_size = 0", "FILE: store_size must be at least 1, not 0."),
        ("store_size = 1.5", "FILE: store_size must be a whole number, not 1.5."),
        (
            'store_media = "http://x"',
            "FILE: store_media: expected a folder, or s3://BUCKET/PREFIX, without",
        ),
        ('store_required = "x"', "FILE: store_required must be true or false, not 'x'."),
        (
            'store = "off"\nstore_required = true',
            "FILE: store_required: expected a store, but store is off.",
        ),
        (
            'store_media = "x"',
            "FILE: store_media: expected a database on disk: store is memory.",
        ),
        ("[engines.a]\nurll = 'x'", "FILE: engines.a.urll: unknown setting (did you mean 'url'?)."),
        (
            "[engines.a]",
            "FILE: engines.a: expected one of url, file and command, but got none of them.",
        ),
        (
            "[engines.a]\nmodel = 'hf:a/b:Q8_0'",
            'FILE: engines.a: write file = "hf:a/b:Q8_0" for a model of the hub.',
        ),
        ("engines = 3", "FILE: engines must be a table, not 3."),
        ("[engines]\na = 3", "FILE: engines.a must be a table, not 3."),
        (
            "[engines.a]\nfile = 'x'\ncontext = 0",
            "FILE: engines.a.context must be at least 1, not 0",
        ),
        ("[engines.a]\nurl = 5", "FILE: engines.a.url must be a string."),
        (
            "[engines.a]\nurl = 'x'\nidle = 3",
            "FILE: engines.a.idle: expected a duration such as 30s, 15m or 24h, not 3.",
        ),
        (
            "[engines.a]\ncommand = ['x']",
            "FILE: engines.a: command must contain {port}, which becomes the engine's port.",
        ),
        (
            "[engines.a]\nurl = 'x'\nmachine = 'z'",
            "FILE: engines.a.machine: there is no table machines.z; there are: none.",
        ),
        (
            "[engines.a]\nurl = 'x'\nmachine = 'm'\nmemory = '3GiB'\n[machines.m]\nmemory = '2GiB'",
            "FILE: engines.a.memory: 3221225472 bytes of 'memory' are more than machines.m has.",
        ),
        (
            "[machines.a]\nmemory = '4'",
            'FILE: machines.a.memory: expected a size such as "22GiB" or "512MiB", not \'4\'.',
        ),
        (
            "[machines.a]\nmemory = 24",
            'FILE: machines.a.memory: expected a size such as "22GiB" or "512MiB", not 24.',
        ),
        ("[models.x]", "FILE: models.x.engines is missing."),
        ("[models.x]\nengines = []", "FILE: models.x.engines must not be empty."),
        ("[models.x]\nengines = ['q']", "FILE: models.x.engines[0]: there is no table engines.q; "),
        (
            "[engines.a]\nurl = 'x'\n[models.x]\nengines = ['a']\naliases = ['x']",
            "FILE: models.x.aliases[0]: 'x' is already a name: models.x.",
        ),
        (
            "[engines.a]\nurl = 'x'\n[models.x]\nengines = ['a']\nfallback = ['x']",
            "FILE: models.x.fallback[0]: 'x' is the model itself, or given twice.",
        ),
        (
            "[engines.a]\nurl = 'x'\n[models.x]\nengines = ['a']\nchat_format = 'gtp'",
            "FILE: models.x.chat_format: unknown format 'gtp'; supported formats are alpaca, ",
        ),
        (
            "model = 'y'\n[engines.a]\nurl = 'x'",
            "FILE: model: it has no meaning with the tables of FILE; omit it.",
        ),
        ("prot = 1", "FILE: unknown setting 'prot' (did you mean 'port'?)."),
        ("[server]\nport = 1", "FILE: unknown setting 'server'."),
        ('"\\u001b[31m" = 1', "FILE: unknown setting '\\x1b[31m'."),
        ("port = 1\nhost = = 2", "FILE is not valid TOML: Invalid value (at line 2, column 8)."),
        ("x = " + "[" * 100_000, "FILE is nested too deeply"),
        ("x = " + "{a=" * 100_000, "FILE is nested too deeply"),
        ("port = " + "9" * 5000, "FILE contains an invalid number or date."),
        ("port = " + "9" * 500, "FILE: port must be at most 65535."),
    ],
    ids=lambda text: text[:24],
)
def test_a_wrong_value_is_named(file: Path, text: str, said: str) -> None:
    """A wrong value is an error with the file, the key, the allowed values and the given value."""
    file.write_text(text)
    assert complaint(file).startswith(said)


def test_no_secret_is_shown(file: Path) -> None:
    """No error shows a key's value."""
    file.write_text('api_key = ["first", 7654321]\nengine_key = 7654321\nprot = 1\n')
    message = complaint(file)
    assert "api_key[1] must be a string;" in message
    assert "engine_key must be a string;" in message
    assert "7654321" not in message
    assert "first" not in message


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xff\xfe\x00", "cannot be read: it is not UTF-8 text."),
        (b"#" * (2**20 + 1), "is too large for settings; at most 1048576 bytes"),
    ],
    ids=["binary", "large"],
)
def test_a_file_that_is_no_text(file: Path, data: bytes, said: str) -> None:
    """A file that cannot hold settings is an error that names it."""
    file.write_bytes(data)
    assert said in complaint(file)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('lora = ["a=b"]', "engines.one: lora: 'a=b' must end with a number after '='"),
        ('lora = ["a=nan"]', "engines.one: lora: 'a=nan' must end with a number after '='"),
        ('engine_key = "a\\nb"', "engines.one: engine_key: a key contains a line break"),
    ],
    ids=["lora", "scale", "key"],
)
def test_a_value_in_a_table_is_checked(file: Path, table: str, said: str) -> None:
    """A value that an engine's table gets wrong is an error at the start, and at a reload."""
    file.write_text(f'[engines.one]\nurl = "http://127.0.0.1:1"\n{table}\n')
    assert said in complaint(file)


def test_an_address_of_ipv6_may_have_its_brackets() -> None:
    """`--host` takes an address of IPv6 also in the form that it has in a URL."""
    assert Settings(host="[::1]").host == Settings(host="::1").host == "::1"


def test_a_file_can_begin_with_a_byte_order_mark(file: Path) -> None:
    """A file of an editor that writes a byte order mark first is read as without it."""
    file.write_bytes(b"\xef\xbb\xbfport = 1234\n")
    assert Settings.load(file).port == 1234


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """A folder as `--config` is an error that says so."""
    assert complaint(tmp_path) == "FILE cannot be read: Is a directory."


def test_flags_and_variables_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error names the source that takes precedence: flag, then variable, then file."""
    file.write_text('port = "x"\n')
    monkeypatch.setenv("LATIMER_PORT", "abc")
    with pytest.raises(WrongSettings, match=r"^--port must be at most 65535, not 99999\.$"):
        Settings.load(file, port=99999)
    with pytest.raises(WrongSettings, match=r"^LATIMER_PORT must be a whole number, not 'abc'\.$"):
        Settings.load(file)
    assert Settings.load(file, port=1).source_of("port") == "--port"


def test_a_name_that_is_not_utf_8_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or a model with a name that is not UTF-8 text is an error, also from a variable."""
    with pytest.raises(WrongSettings, match="The model: the name of a file is UTF-8"):
        Settings.load(None, model="gr\udcf6\xdf.gguf")
    monkeypatch.setenv("LATIMER_MODEL_NAME", "gr\udcf6\xdf")
    with pytest.raises(WrongSettings, match="LATIMER_MODEL_NAME: a model name is UTF-8 text"):
        Settings.load(None)


def test_the_password_of_a_store_is_not_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No error and no repr shows the URL of a store."""
    secret = "pa55word"
    for wrong in (f"mysql://me:{secret}@h/d", f"postgresql://me:{secret}@h", f"me:{secret}@h/d"):
        monkeypatch.setenv("LATIMER_STORE", wrong)
        with pytest.raises(WrongSettings, match=r"^LATIMER_STORE: expected [^\n]*\.$") as caught:
            Settings.load(None)
        assert secret not in str(caught.value)
    monkeypatch.setenv("LATIMER_STORE", f"postgresql://me:{secret}@h/d")
    settings = Settings.load(None, store_age="30d")
    assert secret not in repr(settings)
    place = settings.store_place()
    assert place is not None
    assert place.describe() == "PostgreSQL at h:5432/d, 30 d"


def test_the_store_is_set_by_every_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's settings come from flags, the environment and the file."""
    file.write_text('store_age = "90s"\nstore_size = 7\nstore = "off"\n')
    monkeypatch.setenv("LATIMER_STORE_SIZE", "8")
    place = Settings.load(file, store="memory").store_place()
    assert place is not None
    assert place.describe() == "in memory, 8 MiB, 90 s"
    assert Settings.load(file).store_place() is None


def test_every_setting_is_a_flag() -> None:
    """`latimer serve` has a flag for every setting, and `latimer check` has no others."""
    flags = {one.name for one in serve.params} - {"config"}
    tables = {name for name, one in Settings.model_fields.items() if option_of(one).is_table}
    assert flags == Settings.model_fields.keys() - tables
    assert tables
    assert {one.name for one in check.params} <= flags | {"config", "as_json", "report"}


def test_the_cache_has_the_option_of_llama_server() -> None:
    """`--cache-ram` is `--cache-memory`, with llama-server's unit and its value for no limit."""
    for value, size in (("0", 0), ("5", 5 << 20), ("-1", sys.maxsize)):
        flags = serve.make_context("serve", ["--cache-ram", value]).params
        settings = Settings.load(None, cache_memory=flags["cache_memory"])
        assert settings.arguments("llama-cpp")["cache_memory"] == size


def test_every_argument_of_an_engine_is_a_setting() -> None:
    """The settings have the arguments of the engines' classes, with the same defaults."""
    for engine, kind in ENGINES.items():
        arguments = Settings.model_construct().arguments(engine)
        known = inspect.signature(kind).parameters
        assert known.keys() - arguments.keys() <= {
            *("path", "progress", "url", "client", "silence", "model", "build")
        }
        for name, value in arguments.items():
            assert value == (list(known[name].default) if value == [] else known[name].default)


def test_every_option_of_the_adapter_is_documented() -> None:
    """The table in docs/mounting.md and the help of `Options` have every option."""
    assert Options.__annotations__.keys() == DEFAULTS.keys()
    for name in Options.__annotations__:
        assert f"\n    {name}: " in inspect.cleandoc(Options.__doc__ or ""), name
        assert re.search(rf"^\| `{name}=.*` \|", MOUNTING.read_text(), re.MULTILINE), name


def table(settings: type[Settings], group: str) -> str:
    """Return the settings of a group as a table in Markdown, with the words of the help."""
    if group == FLEET:
        return fleet_table(settings)
    rows = [f"### {group}", "", "| option | default | effect |", "|---|---|---|"]
    for name, field in settings.model_fields.items():
        if option_of(field).group == group and name != "model":
            (parameter,) = click.command()(option(name, field)(lambda: None)).params
            flag, text = parameter.get_help_record(click.Context(click.Command(""))) or ("", "")
            effect, _, default = text.partition("  [")
            cells = (f"`{flag}`", default.removesuffix("]"), effect)
            rows.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(rows) + "\n"


def fleet_table(settings: type[Settings]) -> str:
    """Return the tables of the settings file as a table in Markdown."""
    pages = "[fleet.md](fleet.md) and [limits.md](limits.md) describe them"
    rows = [f"### {FLEET}", "", f"Tables of the file only; {pages}.", ""]
    rows += ["| table | content |", "|---|---|"]
    for name, field in settings.model_fields.items():
        if option_of(field).is_table:
            title = f"{name}.NAME" if get_origin(field.annotation) is dict else name
            text = field.description or ""
            rows.append(f"| `[{title}]` | {text[:1].upper()}{text[1:]} |")
    return "\n".join(rows) + "\n"


def table_keys(name: str) -> str:
    """Return the keys of a table of the settings file as a table in Markdown."""
    rows = [f"### `[{name}.NAME]`", "", "| key | default | effect |", "|---|---|---|"]
    tables: Any = Settings.model_fields[name].annotation
    for key, field in get_args(tables)[1].model_fields.items():
        if key in FlatSettings.model_fields and option_of(field).group != FLEET:
            continue
        value = field.get_default(call_default_factory=True)
        empty = field.is_required() or value in (None, (), {}, False)
        shown = "" if empty else f"{value:g} s" if isinstance(value, float) else str(value)
        rows.append(f"| `{key}` | {shown} | {field.description} |")
    return "\n".join(rows) + "\n"


def test_the_documentation_has_every_key_of_a_table() -> None:
    """docs/fleet.md has the keys of the tables; LATIMER_SNAPSHOT=1 writes them again."""
    tables = "\n".join(map(table_keys, ("engines", "machines", "models")))
    before, begin, rest = FLEET_PAGE.read_text().partition("<!-- tables -->\n\n")
    _, end, after = rest.partition("\n<!-- end of tables -->")
    if os.environ.get("LATIMER_SNAPSHOT"):
        FLEET_PAGE.write_text(before + begin + tables + end + after)
    assert begin + tables + end in FLEET_PAGE.read_text()


def test_the_documentation_has_every_setting() -> None:
    """docs/serving.md has the tables of the settings; LATIMER_SNAPSHOT=1 writes them again."""
    groups = dict.fromkeys(option_of(field).group for field in Settings.model_fields.values())
    tables = "\n".join(table(Settings, group) for group in groups)
    before, begin, rest = SERVING.read_text().partition("<!-- settings -->\n\n")
    _, end, after = rest.partition("\n<!-- end of settings -->")
    if os.environ.get("LATIMER_SNAPSHOT"):
        SERVING.write_text(before + begin + tables + end + after)
    assert begin + tables + end in SERVING.read_text()


def test_every_setting_is_read() -> None:
    """A setting is an argument of the adapter or an engine, or the code of a command reads it."""
    sources = [path.read_text() for path in (ROOT / "adapter").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\.([a-z_]+)\b", text)}
    fields = Settings.model_fields.items()
    assert [name for name, field in fields if not option_of(field).to and name not in read] == []


def test_the_setting_for_developers_works(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting of CONTRIBUTING.md is a flag, a variable, a key, and a row of the tables."""
    (block,) = (one for one in blocks(CONTRIBUTING) if "server_setting" in one.text)
    names: dict[str, Any] = {"__name__": "example", "__package__": "latimer.adapter"}
    exec(block.text, names)  # noqa: S102
    toy: type[Settings] = names["MySettings"]
    file.write_text('greeting = "file"\n')
    assert toy.load(None).model_dump()["greeting"] == "Hello."
    assert toy.load(file).model_dump()["greeting"] == "file"
    monkeypatch.setenv("LATIMER_GREETING", "variable")
    assert toy.load(file).model_dump()["greeting"] == "variable"
    assert toy.load(file, greeting="flag").model_dump()["greeting"] == "flag"
    assert "| `--greeting TEXT` | Hello. | Line that the server prints at its start. |" in table(
        toy, SERVER
    )
