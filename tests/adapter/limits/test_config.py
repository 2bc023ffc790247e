"""Tests of the tables of keys and of the store of their limits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import AdmissionConfig, KeyConfig, digest_of, store_of
from latimer.adapter.limits.leases import LimitsError
from latimer.adapter.settings import Settings
from support.copies import fed
from support.engines.echo import Echo

SECRET = "s3cr3t"
DIGEST = f'digest = "{digest_of(SECRET)}"\n'
KEY = f"[keys.team-a]\n{DIGEST}"


def load(tmp_path: Path, text: str) -> Settings:
    """Return the settings of a file."""
    file = tmp_path / "latimer.toml"
    file.write_text(text)
    return Settings.load(file)


def test_a_table_has_every_field(tmp_path: Path) -> None:
    """A table of a key is read with all its fields, and has defaults for the others."""
    text = f"""
        {KEY}
        models = ["qwen3-*", "demo"]
        weight = 2
        requests_per_minute = 600
        tokens_per_minute = 200_000
        concurrent = 16
        [keys.b]
        digest = "{digest_of("b")}"
        [admission]
        store = "redis://:{SECRET}@h:6379/0"
        unavailable = "refuse"
    """
    settings = load(tmp_path, text)
    assert settings.keys["team-a"] == KeyConfig(
        digest=digest_of(SECRET),
        models=["qwen3-*", "demo"],
        weight=2.0,
        requests_per_minute=600,
        tokens_per_minute=200_000,
        concurrent=16,
    )
    assert settings.keys["b"] == KeyConfig(digest=digest_of("b"))
    assert settings.admission.unavailable == "refuse"
    assert settings.admission.describe() == "Redis at h:6379"
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[keys.a]\n", "keys.a.digest is missing"),
        (f'[keys.a]\ndigest = "{SECRET}"', "keys.a.digest: expected sha256: and 64 hexadecimal"),
        (f"{KEY}weigth = 2", "keys.team-a.weigth: unknown setting (did you mean 'weight'?)"),
        (f"{KEY}weight = 0", "keys.team-a.weight must be at least 0.01, not 0"),
        (f"{KEY}weight = true", "keys.team-a.weight must be a number, not true"),
        (f"{KEY}concurrent = 0", "keys.team-a.concurrent must be at least 1, not 0"),
        (f'{KEY}concurrent = "5"', "keys.team-a.concurrent must be a whole number, not '5'"),
        (f"{KEY}tokens_per_minute = 1.5", "keys.team-a.tokens_per_minute must be a whole number"),
        (f'{KEY}models = "demo"', "keys.team-a.models must be a list of strings"),
        (f'{KEY}models = ["a*b"]', "keys.team-a.models: 'a*b' is not the name of a model"),
        (f"{KEY}[keys.b]\n{DIGEST}", "keys.b.digest: it is the digest of keys.team-a, too"),
        (f'[keys."a b"]\n{DIGEST}', "keys.a b: a name has up to 64 letters"),
        ("keys = 5", "keys must be a table"),
        ('[admission]\nstore = "mysql://h"', "admission.store: expected memory, or a URL such as"),
        (f'[admission]\nstore = "redis://u:{SECRET}@h:port"', "admission.store: expected memory"),
        ('[admission]\nunavailable = "wait"', "admission.unavailable must be one of admit, refuse"),
        ("[admission]\nurl = 5", "admission.url: unknown setting"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_named(tmp_path: Path, text: str, message: str) -> None:
    """An error names the file, the table and the field, says what is allowed, and has no secret."""
    with pytest.raises(ValueError, match=r".") as raised:
        load(tmp_path, text)
    assert str(raised.value).startswith(f"{tmp_path / 'latimer.toml'}: {message}")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("memory", "in memory"),
        ("redis://u:s3cr3t@h", "Redis at h:6379"),
        ("rediss://[::1]:7000/2", "Redis at [::1]:7000"),
        ("unix:///run/redis.sock", "Redis at /run/redis.sock"),
        ("postgresql://u:s3cr3t@h/limits", "PostgreSQL at h:5432/limits"),
        ("postgresql:///limits?host=/run", "PostgreSQL at /run:5432/limits"),
        ("postgresql:///limits", "PostgreSQL at the local socket, database limits"),
    ],
)
def test_a_place_is_shown_without_its_password(store: str, shown: str) -> None:
    """The line about the store has no user name and no password."""
    assert AdmissionConfig(store=store).describe() == shown


@pytest.mark.parametrize(
    ("store", "package"), [("redis://h", "redis"), ("postgresql://h/x", "psycopg")]
)
def test_a_missing_client_is_named(
    store: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store whose package is not installed is an error that names the extra."""
    for name in [one for one in sys.modules if one.startswith("latimer.adapter.limits.")]:
        if name.endswith((".redis", ".postgresql")):
            monkeypatch.delitem(sys.modules, name)
    for name in [one for one in sys.modules if one.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    import builtins

    usual: Any = builtins.__import__

    def hidden(name: str, *args: Any, **named: Any) -> Any:
        if name.split(".")[0] == package and not (args and len(args) > 3 and args[3]):
            raise ModuleNotFoundError(name, name=package)
        return usual(name, *args, **named)

    monkeypatch.setattr(builtins, "__import__", hidden)
    with pytest.raises(LimitsError, match=r"requires the extra '(redis|postgres)'"):
        store_of(AdmissionConfig(store=store))


def test_wrong_keys_of_an_app() -> None:
    """An app cannot be made with a table that is wrong, so that no key is open by mistake."""
    wrong: list[dict[str, dict[str, Any]]] = [
        {"a": {}},
        {"a": {"digest": SECRET}},
        {"a b": {"digest": digest_of("a")}},
    ]
    for keys in wrong:
        with pytest.raises(ValueError, match=r"digest|name") as raised:
            OpenAIAdapter(Echo(), keys=keys)
        assert SECRET not in str(raised.value)


def test_keys_change_while_a_server_runs() -> None:
    """Keys can be replaced, but not by none: the server would be open."""
    app = OpenAIAdapter(Echo(), keys={"a": {"digest": digest_of("a")}})
    app.replace_keys([], {"b": {"digest": digest_of("b")}})
    with pytest.raises(ValueError, match="cannot do without one"):
        app.replace_keys([], {})


@pytest.mark.parametrize("text", ["secret", "secret\n", "secret\r\n"])
def test_the_command_prints_a_digest(text: str) -> None:
    """`latimer config digest` prints the digest of the line on standard input."""
    done = fed(text, "config", "digest")
    assert done.stdout == digest_of("secret") + "\n"


@pytest.mark.parametrize("text", ["", "\n", " a", "a\nb", "\x00"])
def test_the_command_refuses_what_cannot_be_a_key(text: str) -> None:
    """A key that no client can send has no digest, and exit code 2."""
    done = fed(text, "config", "digest")
    assert done.returncode == 2
    assert not done.stdout
