"""`/tokenizer_info`, `/tokenize` and `/detokenize`, which are endpoints of vLLM, not of OpenAI.

Evaluation harnesses use them as a model's tokenizer (lm-eval's `tokenizer_backend=remote`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from .. import limits
from .common import Request


class TokenizeRequest(Request):
    """Body of `POST /tokenize`."""

    prompt: Annotated[str, Field(max_length=limits.TEXT.most)]
    model: str | None = None
    add_special_tokens: bool | None = None


class Tokenized(TypedDict):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Request):
    """Body of `POST /detokenize`."""

    tokens: Annotated[
        list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=limits.IDS.most)
    ]
    model: str | None = None


class Detokenized(TypedDict):
    """Response of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Response of `GET /tokenizer_info`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None
