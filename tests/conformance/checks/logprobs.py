"""Log-probabilities of completions, in the legacy format (contract 2.6)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api, expect_finite

PROMPT = "Hello world"


async def _arrays(api: Api, prompt: str = PROMPT, **body: Any) -> tuple[str, Any]:
    full = {"temperature": 0, "max_tokens": 4, "logprobs": 1, **body}
    choice = (await api.complete(prompt, **full))["choices"][0]
    arrays = choice["logprobs"]
    expect(isinstance(arrays, dict), f"expected an object in logprobs, but got {arrays!r}")
    if not choice["text"]:
        raise Skip("the model ended its answer with its first token")
    return choice["text"], arrays


@check("logprobs.keys",
       "The logprobs of a completion are tokens, token_logprobs, top_logprobs and text_offset, "
       "arrays of one length.",
       "must", "2.6 [llama.cpp#11346]")  # fmt: skip
async def keys(api: Api) -> None:
    _text, arrays = await _arrays(api)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    missing = [name for name in names if name not in arrays]
    expect(not missing, f"expected {missing} in logprobs, but got {arrays}")
    lengths = {name: len(arrays[name]) for name in names}
    expect(len(set(lengths.values())) == 1, f"expected arrays of one length, but got {lengths}")


@check("logprobs.tokens", "The tokens in a completion's logprobs join to its text.", "must", "2.6")
async def tokens(api: Api) -> None:
    text, arrays = await _arrays(api)
    joined = "".join(arrays["tokens"])
    expect(joined == text, f"expected {text!r}, but got {joined!r}")


@check("logprobs.offset-base",
       "In a completion's logprobs, the first text_offset is the length of the prompt.",
       "must", "2.6.6 10.1 [LP0]")  # fmt: skip
async def offset_base(api: Api) -> None:
    _text, arrays = await _arrays(api)
    first = arrays["text_offset"][0]
    expect(first == len(PROMPT), f"expected offset {len(PROMPT)}, but got {first}")


@check("logprobs.offset-code-points",
       "In a completion's logprobs, text_offset counts Unicode code points.",
       "should", "2.6.6 10.1")  # fmt: skip
async def offset_code_points(api: Api) -> None:
    prompt = "Hello wörld 😀"
    _text, arrays = await _arrays(api, prompt)
    first = arrays["text_offset"][0]
    expect(first == len(prompt), f"expected offset {len(prompt)}, but got {first}")


@check("logprobs.offsets",
       "In a completion's logprobs, text_offset is the position of each token after the prompt.",
       "must", "2.6.6")  # fmt: skip
async def offsets(api: Api) -> None:
    text, arrays = await _arrays(api)
    for token, offset in zip(arrays["tokens"], arrays["text_offset"], strict=True):
        at = offset - len(PROMPT)
        part = text[at : at + len(token)]
        expect(part == token, f"expected {token!r} at offset {offset}, but got {part!r}")


@check("logprobs.finite", "The token_logprobs of a completion are finite and not greater than 0.",
       "must", "2.6.2 10.46")  # fmt: skip
async def finite(api: Api) -> None:
    _text, arrays = await _arrays(api)
    expect_finite(arrays["token_logprobs"])


@check("logprobs.top-count",
       "The top_logprobs of a completion have as many alternatives as requested, or one more.",
       "must", "2.6.3 10.10")  # fmt: skip
async def top_count(api: Api) -> None:
    for count in (1, 5):
        _text, arrays = await _arrays(api, logprobs=count)
        for top in arrays["top_logprobs"]:
            # Tokens with the same text share a key.
            expect(1 <= len(top) <= count + 1, f"expected {count} alternatives, but got {top}")
        longest = max(len(top) for top in arrays["top_logprobs"])
        expect(longest >= count, f"expected {count} alternatives, but got at most {longest}")


@check("logprobs.same-number",
       "At temperature 0, each token is the most likely in its top_logprobs, with exactly the "
       "value in token_logprobs.",
       "must", "10.9")  # fmt: skip
async def same_number(api: Api) -> None:
    _text, arrays = await _arrays(api)
    for token, value, top in zip(
        arrays["tokens"], arrays["token_logprobs"], arrays["top_logprobs"], strict=True
    ):
        expect(token in top, f"expected the token {token!r} among the alternatives, but got {top}")
        expect(
            top[token] == value, f"{token!r}: expected exactly {value!r}, but got {top[token]!r}"
        )
        expect(value == max(top.values()), f"expected {token!r} as the most likely, but got {top}")


@check("logprobs.sampled-added",
       "Each sampled token of a completion is among its top_logprobs, even if it is unlikely.",
       "should", "2.6.3")  # fmt: skip
async def sampled_added(api: Api) -> None:
    _text, arrays = await _arrays(api, logit_bias={"70": 100})
    for token, top in zip(arrays["tokens"], arrays["top_logprobs"], strict=True):
        expect(token in top, f"expected the token {token!r} among the alternatives, but got {top}")


@check("logprobs.before-bias",
       "The log-probabilities of a completion are computed before logit_bias is applied.",
       "should", "2.6.2")  # fmt: skip
async def before_bias(api: Api) -> None:
    _text, arrays = await _arrays(api, logit_bias={"70": 100}, max_tokens=1)
    value = arrays["token_logprobs"][0]
    expect(value < -0.01, f"expected the log-probability before the bias, but got {value}")


@check("logprobs.before-temperature",
       "The log-probabilities of a completion do not depend on temperature and top_p.",
       "should", "2.6.2")  # fmt: skip
async def before_temperature(api: Api) -> None:
    _text, greedy = await _arrays(api, max_tokens=1, logprobs=1)
    _text, sampled = await _arrays(api, max_tokens=1, logprobs=1, temperature=2, top_p=0.0001)
    values = [max(arrays["top_logprobs"][0].values()) for arrays in (greedy, sampled)]
    expect(abs(values[0] - values[1]) < 0.3, f"expected the same log-probability, but got {values}")


@check("logprobs.zero",
       "A completion with logprobs 0 has token_logprobs, but top_logprobs null or with at most "
       "one entry per token.",
       "must", "2.6.3 [LP0]")  # fmt: skip
async def zero(api: Api) -> None:
    _text, arrays = await _arrays(api, logprobs=0)
    expect(arrays["tokens"] and arrays["token_logprobs"], f"expected tokens, but got {arrays}")
    top = arrays["top_logprobs"]
    expect(
        top is None or all(len(one) <= 1 for one in top),
        f"expected null or one entry per token, but got {top}",
    )


@check("logprobs.end",
       "Without echo, a completion's logprobs have no entry for the end-of-sequence token.",
       "should", "2.6.4 [LP0]")  # fmt: skip
async def end(api: Api) -> None:
    api.demo()
    prompt = "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"
    text, arrays = await _arrays(api, prompt, max_tokens=40)
    expect(
        "".join(arrays["tokens"]) == text,
        f"expected tokens of {text!r} only, but got {arrays['tokens']}",
    )


@check("logprobs.utf8",
       "Tokens in logprobs are text or bytes:\\x.., without replacement characters and tokenizer "
       "markers.",
       "must", "2.6.5")  # fmt: skip
async def utf8(api: Api) -> None:
    _text, arrays = await _arrays(api, "Say: 😀 é 漢", max_tokens=8, temperature=1, seed=5)
    joined = "".join(arrays["tokens"])
    for wrong in ("\ufffd", "Ġ", "▁", "<0x"):
        expect(wrong not in joined, f"expected text or bytes:\\x.., but got {arrays['tokens']}")


@check("logprobs.stream",
       "A streamed completion has the same tokens and text_offset in logprobs as one that is not "
       "streamed.",
       "must", "2.6.7 10.91")  # fmt: skip
async def stream(api: Api) -> None:
    _text, arrays = await _arrays(api, max_tokens=6)
    chunks = await api.complete_stream(PROMPT, temperature=0, max_tokens=6, logprobs=1)
    parts = [c["choices"][0].get("logprobs") for c in chunks if c["choices"]]
    for name in ("tokens", "text_offset"):
        joined = [item for part in parts if part for item in part[name]]
        expect(joined == arrays[name], f"{name}: expected {arrays[name]}, but got {joined}")
