"""Tests of the cells from which generated tokens are evaluated apart from prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from latimer.backends.llama_cpp import DEMO_MODEL, tiles
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.tiles import least_cells
from support import gguf_files

RECURRENT = Path(__file__).parent.parent.parent / "models" / "recurrent.gguf"


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    """The demo model."""
    made = LoadedModel(DEMO_MODEL, Options())
    yield made
    made.close()


@pytest.mark.parametrize(
    ("options", "has_tiles"),
    [
        (Options(), True),
        (Options(flash_attention=True), True),
        (Options(cache_type="f32"), True),
        (Options(flash_attention=False), False),
        (Options(cache_type="bf16"), False),
        (Options(cache_type="q8_0"), False),
        (Options(exact=True), False),
    ],
    ids=["default", "flash", "f32", "no flash", "bf16", "q8_0", "exact"],
)
def test_only_some_options_have_tiles(
    model: LoadedModel, options: Options, has_tiles: bool
) -> None:
    """Batches are apart only with flash attention, and with a cache of f16 or f32."""
    assert (least_cells(model, options) < math.inf) is has_tiles


@pytest.mark.parametrize(("layers", "has_tiles"), [(-1, False), (0, True)])
def test_a_gpu_has_no_tiles(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, layers: int, has_tiles: bool
) -> None:
    """With layers on a GPU no batches are apart."""
    monkeypatch.setattr(tiles, "has_gpu", lambda: True)
    assert (least_cells(model, Options(gpu_layers=layers)) < math.inf) is has_tiles


def test_a_recurrent_model_has_no_tiles() -> None:
    """A model without attention has no batches apart."""
    model = LoadedModel(RECURRENT, Options())
    assert least_cells(model, Options()) == math.inf
    model.close()


def test_cells_follow_the_weights_and_the_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile costs by the width of all heads, which a file may name, and a pass by the weights."""
    shape = {"width": 256, "layers": 3, "inner": 1024}
    model = LoadedModel(gguf_files.larger(DEMO_MODEL, tmp_path / "m.gguf", **shape), Options())
    assert model.attention == 256 * 3
    weights = 3 * (4 * 256 * 256 + 3 * 256 * 1024 + 2 * 256) + 256
    assert least_cells(model, Options()) == 8 * weights / (128 * 256 * 3)
    facts = {"llama.attention.key_length": "128"}
    monkeypatch.setattr(model, "_fact", lambda key: facts.get(key, ""))
    assert model.attention == 4 * 128 * 3
    model.close()
