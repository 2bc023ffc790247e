"""`/tokenizer_info`, `/tokenize` and `/detokenize`: no endpoints of OpenAI's, but of vLLM's.

Evaluation harnesses ask them for a model's tokeniser (lm-eval's `tokenizer_backend=remote`).
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
    """Reply of `POST /tokenize`."""

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
    """Reply of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Reply of `GET /tokenizer_info`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None
