"""What a llama-server tells of itself, by which another model at its address is noticed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from ..base import MediaKind, Model
from ..errors import text_of, whole_of

# No server has more slots.
MOST_SLOTS = 65_536
# The server's names of what a model takes beside text.
MODALITIES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}
# What `/v1/models` tells of a model's file; the rest may change while it is served.
_META = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


class Identity(NamedTuple):
    """A server's model, and how it is served.

    Args:
        path, alias, build: the model's file, its name, and the server's version.
        slots: how many calls it works on at a time.
        media: what it takes beside text.
        marker: what stands for a picture in its prompts: another one after each start.
        meta: the model's sizes, which tell another file under the same name; None where they are
            not told.
    """

    path: str
    alias: str
    build: str
    context: int
    template: str
    bos: str
    eos: str
    slots: int
    media: frozenset[MediaKind]
    marker: str
    meta: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """How the model is called; without `--alias` that is its path, which is private."""
        return self.alias if self.alias and self.alias != self.path else PurePath(self.path).name

    @property
    def names(self) -> frozenset[str]:
        """What the server's answers call the model."""
        return frozenset({self.path, self.alias, self.name, PurePath(self.path).name} - {""})

    def is_same(self, other: Identity) -> bool:
        """Whether what was read of the one holds for the other."""
        left, right = self, other
        if left.meta is None or right.meta is None:
            left, right = left._replace(meta=None), right._replace(meta=None)
        if not left.media and not right.media:
            left, right = left._replace(marker=""), right._replace(marker="")
        return left == right

    def model(self, adds_bos: bool) -> Model:
        """The model; whether a BOS comes before prompts is asked for by itself."""
        told = (
            self.path, self.build, self.context, self.template, self.bos, self.eos,
            sorted(self.media), self.meta,
        )  # fmt: skip
        return Model(
            name=self.name,
            context=self.context,
            template=self.template or None,
            bos_token=self.bos,
            eos_token=self.eos,
            adds_bos=adds_bos,
            fingerprint="fp_" + hashlib.sha256(repr(told).encode()).hexdigest()[:10],
            modified=int(time.time()),
            media=self.media,
        )


def read_identity(props: Any) -> Identity:
    """What `/props` tells.

    Raises:
        KeyError, TypeError, ValueError: it is not llama-server's.
    """
    marker = text_of(props.get("media_marker") or "")
    modalities = props.get("modalities") or {}
    return Identity(
        path=text_of(props["model_path"]),
        alias=text_of(props.get("model_alias") or ""),
        build=text_of(props["build_info"]),
        context=whole_of(props["default_generation_settings"]["n_ctx"], least=1),
        template=text_of(props.get("chat_template") or ""),
        bos=text_of(props.get("bos_token") or ""),
        eos=text_of(props.get("eos_token") or ""),
        slots=whole_of(props.get("total_slots", 1), 1, MOST_SLOTS),
        media=frozenset(
            kind for name, kind in MODALITIES.items() if marker and modalities.get(name)
        ),
        marker=marker,
    )


def read_meta(models: Any) -> tuple[str, ...]:
    """What `/v1/models` tells of the model's file.

    Raises:
        KeyError, IndexError, TypeError: it is not llama-server's.
    """
    meta = models["data"][0]["meta"]
    return tuple(f"{name} {meta[name]!s:.40}" for name in _META if name in meta)
