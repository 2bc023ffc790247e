"""The model's tokenizer, through the endpoints of vLLM that evaluation harnesses use."""

from __future__ import annotations

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import UnknownToken
from ...schemas.openai.tokenizer import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from ..request import Exchange
from ..service import Service
from ..validation import read

_TOKENIZE = TypeAdapter(TokenizeRequest)
_DETOKENIZE = TypeAdapter(DetokenizeRequest)


async def tokenizer_info(exchange: Exchange, service: Service) -> None:
    """Return the model's special tokens, context length and chat template."""
    model = (await service.first()).model
    info: TokenizerInfo = {
        "tokenizer_class": "LatimerTokenizer",
        "bos_token": model.bos_token or None,
        "eos_token": model.eos_token or None,
        "pad_token": None,
        "add_bos_token": model.adds_bos,
        "model_max_length": model.context,
        "chat_template": model.template,
    }
    await exchange.reply(200, orjson.dumps(info))


async def tokenize(exchange: Exchange, service: Service) -> None:
    """Return the token ids of a text, with special tokens unless the request turns them off."""
    request = await read(exchange, _TOKENIZE)
    served = await service.first()
    ids = await served.backend.tokenize(
        request.prompt,
        add_special=request.add_special_tokens is not False,
        parse_special=True,
    )
    context = served.model.context

    def reply() -> bytes:
        response: Tokenized = {"count": len(ids), "max_model_len": context, "tokens": list(ids)}
        return orjson.dumps(response)

    await exchange.reply(200, await offload.run(8 * len(ids), reply))


async def detokenize(exchange: Exchange, service: Service) -> None:
    """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
    request = await read(exchange, _DETOKENIZE)
    served = await service.first()
    try:
        data = await served.backend.detokenize(tuple(request.tokens))
    except UnknownToken as error:
        raise UnknownToken("tokens", error.size, error.token) from None
    reply: Detokenized = {"prompt": data.decode(errors="replace")}
    await exchange.reply(200, orjson.dumps(reply))
