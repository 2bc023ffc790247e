"""Tests of environment variables that are named like settings."""

from __future__ import annotations

import os

import pytest
from latimer.adapter.settings import Settings
from latimer.adapter.settings_file import WrongSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove all variables of this program."""
    for name in [*os.environ]:
        if name.upper().startswith("LATIMER_"):
            monkeypatch.delenv(name)


def test_a_variable_of_no_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error has the nearest setting, in any case, and its value is not shown."""
    for name in ("LATIMER_API_KEYS", "latimer_qeue", "LATIMER_ZZZZZZ", "LATIMER_PORT"):
        monkeypatch.setenv(name, "8000")
    settings = Settings.load(None)
    assert settings.port == 8000
    assert settings.unknown_variables() == [
        ("LATIMER_API_KEYS", "did you mean LATIMER_API_KEY?"),
        ("LATIMER_ZZZZZZ", "the settings are those of latimer serve --help."),
        ("latimer_qeue", "did you mean LATIMER_QUEUE?"),
    ]


def test_every_setting_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting is reported."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"LATIMER_{name.upper()}", "1")
    assert Settings.unknown_variables() == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LATIMER_SERVICE_HOST", "10.0.0.7"),
        ("LATIMER_SERVICE_PORT", "8000"),
        ("LATIMER_SERVICE_PORT_HTTP", "8000"),
        ("LATIMER_PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("LATIMER_PORT_8000_TCP_PROTO", "tcp"),
        ("LATIMER_PORT_8000_TCP_PORT", "8000"),
        ("LATIMER_PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("LATIMER_ENGINES_SERVICE_HOST", "10.0.0.8"),
        ("LATIMER_ENGINES_PORT", "tcp://10.0.0.8:8080"),
        ("LATIMER_ENGINES_PORT_8080_TCP_ADDR", "10.0.0.8"),
        ("LATIMER_ENGINE", "1234"),
    ],
)
def test_variables_of_others_are_silent(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """Variables that Kubernetes or Latimer itself sets are not reported."""
    monkeypatch.setenv(name, value)
    assert Settings.load(None).unknown_variables() == []


def test_the_port_of_kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a service in place of the port names its cause, unless a flag has the port."""
    monkeypatch.setenv("LATIMER_PORT", "tcp://10.0.0.7:8000")
    with pytest.raises(WrongSettings, match=r"Kubernetes sets it .* enableServiceLinks: false"):
        Settings.load(None)
    assert Settings.load(None, port=9000).port == 9000
