"""Tests of names on a hub, and of the files that they choose."""

from __future__ import annotations

import pytest
from latimer.adapter.hub.names import (
    HubError,
    HubFile,
    HubName,
    choose,
    in_units,
    is_name,
    label_of,
    parse,
    tag_of,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:a/b", HubName("a/b")),
        ("a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("hf:a/b:UD-Q4_K_M@v1", HubName("a/b", "UD-Q4_K_M", revision="v1")),
        ("hf:a/b@refs/pr/1", HubName("a/b", revision="refs/pr/1")),
        ("hf:a.b-c/d_e.f/x/y-Q8_0.gguf", HubName("a.b-c/d_e.f", path="x/y-Q8_0.gguf")),
        ("hf:a/b/x.gguf@v1", HubName("a/b", path="x.gguf", revision="v1")),
    ],
)
def test_a_name_has_parts(text: str, name: HubName) -> None:
    """A name is read, and written again as it was."""
    assert parse(text) == name
    assert str(name).endswith(text)


@pytest.mark.parametrize(
    "text",
    ["hf:", "hf:a", "hf:a/", "hf:/b", "hf:a/b:", "hf:a/b@", "hf:a/b/", "hf:a/b/c", "hf:a//x.gguf",
     "hf:a/../x.gguf", "hf:a/b/../x.gguf", "hf:a/b:Q4/x.gguf", "hf:-a/b", "hf:a/b-", "hf:a b/c",
     "hf:a/b@../x", "hf:a/b/c\\d.gguf", "hf:" + "a" * 200 + "/" + "b" * 60],
)  # fmt: skip
def test_a_wrong_name_is_refused(text: str) -> None:
    """The message shows the forms that a name may have, and no path leaves its repository."""
    with pytest.raises(HubError, match="Write hf:ORG/REPO, hf:ORG/REPO:QUANT or"):
        parse(text)


def test_files_and_addresses_are_no_names() -> None:
    """Only the prefix makes a name."""
    assert is_name("hf:a/b")
    assert not any(map(is_name, (None, "a/b", "model.gguf", "http://hf:80/a/b")))


def files(*paths: str) -> list[HubFile]:
    """Return files of 1 MB."""
    return [HubFile(path, 10**6, "0") for path in paths]


def test_parts_are_chosen_together() -> None:
    """A split model is all of its parts, and an incomplete one is refused with their names."""
    parts = [f"d/m-Q8_0-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    choice = choose(parse("hf:a/b"), files(*parts))
    assert [file.path for file in choice.parts] == parts
    assert choice.size == 3 * 10**6
    with pytest.raises(HubError, match=r"has 3 parts, and these are missing: d/m-Q8_0-00002-of"):
        choose(parse("hf:a/b"), files(parts[0], parts[2]))


def test_a_wrong_quantization_lists_the_others() -> None:
    """The message has every model with its size, and neither projectors nor other files."""
    known = files("README.md", "m-Q2_K.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf", "UD-Q8_0.gguf")
    with pytest.raises(HubError) as caught:
        choose(parse("hf:a/b:Q5_0"), known)
    assert caught.value.message == (
        "hf:a/b does not have a file for 'Q5_0'. It has: Q2_K (1.0 MB), m-Q8_0.gguf (1.0 MB), "
        "UD-Q8_0.gguf (1.0 MB)."
    )
    with pytest.raises(HubError, match="has no GGUF file"):
        choose(parse("hf:a/b"), files("model.safetensors"))


def test_other_matches_are_named() -> None:
    """A quantization that matches several files chooses the first, and the choice has the rest."""
    known = files("m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf")
    choice = choose(parse("hf:a/b:q4_k_m"), known)
    assert choice.parts[0].path == "m-Q4_K_M.gguf"
    assert choice.others == ("m-UD-Q4_K_M.gguf",)
    assert str(label_of("a/b", known[0], known)) == "hf:a/b:Q4_K_M"
    assert str(label_of("a/b", known[1], known)) == "hf:a/b/m-UD-Q4_K_M.gguf"


def test_a_pattern_is_a_text() -> None:
    """A quantization is compared as text, and not as a regular expression."""
    with pytest.raises(HubError, match="does not have a file"):
        choose(parse("hf:a/b:Q.-0"), files("m-Q8-0.gguf"))


def test_tags_and_units() -> None:
    """The tag is the last word of a file's name, and sizes are decimal, as on the hub."""
    assert tag_of("x/m.q4_k_m.gguf") == "Q4_K_M"
    assert tag_of("m-F16-00001-of-00002.gguf") == "F16"
    assert tag_of("model.gguf") == ""
    assert [in_units(n) for n in (5, 1500, 655_200_000, 4_700_000_000)] == [
        "5 B", "1.5 kB", "655 MB", "4.7 GB",
    ]  # fmt: skip
