"""Tests of `latimer ps` and the other commands of the operator where they cannot work."""

from __future__ import annotations

import subprocess

import pytest
from support.servers import command, free_port


def latimer(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and standard error."""
    done = subprocess.run(["latimer", *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def test_a_server_without_paths_for_operators() -> None:
    """A server of one engine has no such paths, and the message says how to get them."""
    with command("--admin-key", "operator") as (_, address):
        for arguments in (("ps", address), ("load", "x", "--url", f"{address}/v1")):
            code, said = latimer(*arguments, "--admin-key", "operator")
            assert (code, said.count("\n")) == (1, 1)
            assert "has no paths for operators. Start it with --admin-key and with tables" in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ps"], 2, "or set LATIMER_ADMIN_KEY"),
        (["ps", "localhost:8000", "--admin-key", "x"], 2, "is not an address such as http://"),
        (["drain", "a", f"http://127.0.0.1:{free_port()}", "--admin-key", "x"], 1, "reached: Conn"),
    ],
)
def test_a_command_says_the_next_step(arguments: list[str], code: int, words: str) -> None:
    """A missing key and a wrong address are wrong usage, and a server that is away is a failure."""
    found, said = latimer(*arguments)
    assert (found, words in said) == (code, True), said
