"""Tests that an unusable key is rejected at the start and that no message shows a key."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from latimer.adapter import auth
from latimer.adapter.auth import Keys, UnusableKey, check_key, keys_of, owner_of
from latimer.adapter.settings import Settings
from support.servers import QUIET

SECRET = "s3cr3t"


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `latimer serve` with settings that make its start fail."""
    return subprocess.run(
        ["latimer", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **QUIET, "LATIMER_PORT": "0", **environment},
    )


def found(keys: Keys, *headers: tuple[bytes, bytes]) -> str | None:
    """Return the owner of a request with some headers."""
    return keys.find(headers, dict(headers))


def bearer(key: str) -> tuple[bytes, bytes]:
    """Return the header with a key."""
    return b"authorization", b"Bearer " + key.encode()


def test_an_accepted_header_is_found_again_until_its_key_is_removed() -> None:
    """A key has the same owner in each request, and none after it was replaced."""
    keys = Keys(["one", "two"])
    for _ in range(2):
        assert found(keys, bearer("one")) == owner_of("one")
        assert found(keys, bearer("two")) == owner_of("two")
        assert found(keys, bearer("three")) is None
    keys.replace(Keys(["two", "three"]))
    assert found(keys, bearer("one")) is None
    assert found(keys, bearer("two")) == owner_of("two")


def test_the_first_known_key_counts() -> None:
    """Of several keys in a request, the first known one is its owner, also in a later request."""
    keys = Keys(["one", "two"])
    for _ in range(2):
        assert found(keys, bearer("two")) == owner_of("two")
        assert found(keys, bearer("one"), bearer("two")) == owner_of("one")
        assert found(keys, (b"x-api-key", b"one"), bearer("two")) == owner_of("one")
        assert found(keys, bearer("no"), (b"x-api-key", b"one")) == owner_of("one")


def test_few_accepted_headers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that spells its key in ever other ways takes no memory, and stays known."""
    monkeypatch.setattr(auth, "_MOST_SEEN", 4)
    keys = Keys(["one"])
    for spaces in range(1, 20):
        header = (b"authorization", b"Bearer" + b" " * spaces + b"one")
        assert found(keys, header) == owner_of("one")
        assert len(keys._seen) <= 4


@pytest.mark.parametrize("key", ["k", "schlüssel", "日本 語", "a b", "a,b", "\u00a0x", "x" * 5000])
def test_any_text_can_be_a_key(key: str) -> None:
    """Any text that fits into a header can be a key, also one with spaces inside."""
    check_key(key, "api_key")
    assert Settings.load(None, api_key=(key,), engine_key=key).api_keys() == [key]


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "is empty"),
        ("s3cr3t\n", "contains a line break"),
        ("s3cr3t\r\nX-Evil: 1", "contains a line break"),
        ("s3cr3t\x00", "contains a line break or another control character"),
        ("s3cr3t\t", "control character"),
        ("\x85s3cr3t", "control character"),
        (" s3cr3t", "starts or ends with whitespace"),
        ("s3cr3t ", "starts or ends with whitespace"),
        ("s3cr3t\udcff", "is not valid UTF-8"),
    ],
)
def test_a_key_that_cannot_work_is_refused(key: str, reason: str) -> None:
    """A key that no request can match, or that splits a header, is rejected and not shown."""
    with pytest.raises(UnusableKey, match=reason) as raised:
        Settings.load(None, api_key=(key,)).api_keys()
    assert SECRET not in str(raised.value)
    if key:
        with pytest.raises(UnusableKey, match=f"engine_key: a key .*{reason}"):
            Settings.load(None, engine_key=key).api_keys()


def test_a_file_has_a_key_on_each_line(tmp_path: Path) -> None:
    """Each line of a key file is a key, spaces included, and empty lines are skipped."""
    file = tmp_path / "keys"
    file.write_bytes("\ufeffone\r\n\n  two words \nschlüssel\u2028x\n".encode())
    assert keys_of(file) == ["one", "two words", "schlüssel\u2028x"]
    for content, reason in (
        (b" \n\r\n", "contains no key"),
        (b"s3cr3t\xff", "is not UTF-8 text"),
        (b"s3cr3t\n # of team a\n", "starts with #. It has keys only; remove comments"),
    ):
        file.write_bytes(content)
        with pytest.raises(UnusableKey, match=reason) as raised:
            keys_of(file)
        assert SECRET not in str(raised.value)


@pytest.mark.slow
def test_the_start_fails_with_one_line() -> None:
    """A start with an unusable key exits with 3 and one line that names the setting."""
    for arguments, environment, setting in (
        (("--api-key", f"{SECRET}\n"), {}, "api_key"),
        (("--engine-key", f"{SECRET}\r\nX: y"), {}, "engine_key"),
        ((), {"LATIMER_ENGINE_KEY": f"{SECRET}\n"}, "engine_key"),
        (("--api-key", ""), {}, "api_key"),
    ):
        done = serve("http://127.0.0.1:1", *arguments, **environment)
        assert done.returncode == 3
        assert done.stderr.startswith(f"Latimer cannot start: {setting}: a key ")
        assert done.stderr.count("\n") == 1
        assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "api_key = 5313437",
        "engine_key = 5313437",
        'api_key = [["s3cr3t"]]',
        'api_key = {inner = "s3cr3t"}',
        'engine_key = ["s3cr3t"]',
        "engine_key = {s3 = 's3cr3t'}",
        'apikey = "s3cr3t"',
        'api_key = "s3cr3t',
        'api_key = ["s3cr3t", 5]',
        'model = ["http://u:s3cr3t@host"]',
    ],
)
def test_a_wrong_configuration_shows_no_key(tmp_path: Path, text: str) -> None:
    """A key with a wrong type, in a wrong place or in broken TOML is not in the error."""
    file = tmp_path / "latimer.toml"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match=r".") as raised:
        Settings.load(file).api_keys()
    assert not any(secret in str(raised.value) for secret in (SECRET, "5313437"))


def test_settings_show_no_secret() -> None:
    """The settings' repr has neither keys nor the password of an engine's URL."""
    shown = repr(
        Settings.load(None, model=f"http://u:{SECRET}@h", api_key=(SECRET,), engine_key=SECRET)
    )
    assert SECRET not in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        ("http://user:s3cr3t@127.0.0.1:1", ()),
        ("http://user:s3cr3t@127.0.0.1:1?key=s3cr3t", ("--backend", "llama-server")),
        ("http://user:s3cr3t@127.0.0.1:1", ("--backend", "koboldcpp")),
        ("http://user:s3cr3t@[::1", ()),
        ("http://user:s3cr3t@127.0.0.1:99999", ()),
        ("http://user:s3cr3t/x@127.0.0.1", ()),
        ("ws://user:s3cr3t@127.0.0.1", ()),
        ("user:s3cr3t@127.0.0.1", ("--backend", "koboldcpp")),
        ("http://user:s3cr3t@127.0.0.1\x01", ()),
    ],
)
def test_no_message_shows_a_password(model: str, more: tuple[str, ...]) -> None:
    """No message about an engine's URL shows the user name or password in it."""
    done = serve(model, *more)
    assert done.returncode == 3
    assert done.stderr.startswith("Latimer cannot start: ")
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr
