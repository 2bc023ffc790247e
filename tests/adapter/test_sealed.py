"""Tests of sealed reasoning."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.responses.sealed import PREFIX, Seal


@given(st.text(), st.text())
def test_a_sealed_text_is_opened_by_its_owner(text: str, owner: str) -> None:
    """A text comes back unchanged, and each seal differs."""
    seal = Seal("secret")
    one, two = seal.seal(text, owner), seal.seal(text, owner)
    assert one != two
    assert Seal("secret").unseal(one, owner) == seal.unseal(two, owner) == text


@pytest.mark.parametrize("change", [
    lambda sealed: sealed[:-4] + "AAA=", lambda sealed: sealed[:20], lambda sealed: PREFIX,
    lambda sealed: "other." + sealed, lambda sealed: PREFIX + "é", lambda sealed: "",
])  # fmt: skip
def test_a_changed_text_is_not_opened(change: object) -> None:
    """Text that was not sealed here opens as None, and never raises."""
    seal = Seal()
    assert seal.unseal(change(seal.seal("a thought", "me")), "me") is None  # type: ignore[operator]


def test_others_cannot_open_a_text() -> None:
    """Neither another owner, nor a server with another key, can open a text."""
    sealed = Seal("one").seal("a thought", "me")
    assert Seal("one").unseal(sealed, "you") is None
    assert Seal("two").unseal(sealed, "me") is None
    assert Seal().unseal(sealed, "me") is None


def test_an_empty_secret_is_refused() -> None:
    """A variable that is set to nothing does not become a key that everyone knows."""
    with pytest.raises(ValueError, match="reasoning_key"):
        Seal("")


def test_the_library_is_imported_with_the_first_text() -> None:
    """A server that seals nothing does not import `cryptography`."""
    code = (
        "import sys; from latimer.adapter.responses.sealed import Seal; Seal();"
        "sys.exit('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
