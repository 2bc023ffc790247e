"""Tests of the options of the commands."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from latimer.adapter.cli import main
from latimer.adapter.cli.options import _OF_LLAMA_SERVER
from latimer.adapter.settings import Settings


@pytest.mark.parametrize("name", _OF_LLAMA_SERVER)
def test_options_of_llama_server_have_a_hint(name: str) -> None:
    """The error of an option of llama-server names the option that it is called here."""
    done = CliRunner().invoke(main, ["serve", "--port", "0", name, "4"])
    wanted = _OF_LLAMA_SERVER[name]
    assert done.exit_code == 2
    assert f"No such option '{name}'. llama-server's '{name}' is {wanted} here." in done.output
    option = wanted.removeprefix("--").partition(" ")[0].replace("-", "_")
    assert option in ("the", "cache_ram", *Settings.model_fields)


def test_other_options_have_no_hint() -> None:
    """An option of nobody, or one that the command has under no name, has click's own error."""
    for arguments in (["serve", "-x", "-c", "4"], ["check", "--alias", "x"]):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 2
        assert f"No such option '{arguments[1]}'." in done.output
        assert "llama-server's" not in done.output
    joined = CliRunner().invoke(main, ["check", "--ctx-size=4096"])
    assert "llama-server's '--ctx-size' is --context here." in joined.output
