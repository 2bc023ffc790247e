"""The identity that a llama-server reports, which shows when another model is at its address."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from ..base import MediaKind, Model
from ..errors import text_of, whole_of

# The largest number of slots to accept.
MOST_SLOTS = 65_536
# Kinds of media by the server's names for them.
MODALITIES: Mapping[str, MediaKind] = {"vision": "image", "audio": "audio"}
# The fields of `/v1/models` that describe the model's file; others may change while it is served.
_META = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


class Identity(NamedTuple):
    """The model and the configuration of a server.

    Args:
        path, alias, build: the model's file, its name, and the server's version.
        slots: the number of calls that the server runs at a time.
        media: the kinds of input that the model accepts besides text.
        marker: the media placeholder in the server's prompts; it changes with each start.
        meta: the model's sizes, which distinguish files of the same name; None if not reported.
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
        """The model's name; without `--alias` its file name, since the full path is private."""
        return self.alias if self.alias and self.alias != self.path else PurePath(self.path).name

    @property
    def names(self) -> frozenset[str]:
        """The names of the model in the server's responses."""
        return frozenset({self.path, self.alias, self.name, PurePath(self.path).name} - {""})

    @property
    def sizes(self) -> dict[str, int]:
        """The model's sizes, by the server's names for them, as far as reported."""
        facts = [fact.partition(" ") for fact in self.meta or ()]
        return {name: int(value) for name, _, value in facts if value.isdigit()}

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens in the model's vocabulary; None if not reported."""
        return self.sizes.get("n_vocab")

    def is_same(self, other: Identity) -> bool:
        """Return True if the facts read about one identity apply to the other."""
        left, right = self, other
        if left.meta is None or right.meta is None:
            left, right = left._replace(meta=None), right._replace(meta=None)
        if not left.media and not right.media:
            left, right = left._replace(marker=""), right._replace(marker="")
        return left == right

    def model(self, adds_bos: bool) -> Model:
        """Return the model; `adds_bos` comes from a separate question to the server."""
        facts = (
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
            fingerprint="fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10],
            modified=int(time.time()),
            media=self.media,
            sizes=self.sizes,
        )


def read_identity(props: Any) -> Identity:
    """Read the identity from `/props`.

    Raises:
        KeyError, TypeError, ValueError: the response is not llama-server's.
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
    """Read the description of the model's file from `/v1/models`.

    Raises:
        KeyError, IndexError, TypeError: the response is not llama-server's.
    """
    meta = models["data"][0]["meta"]
    return tuple(f"{name} {meta[name]!s:.40}" for name in _META if name in meta)
