"""`POST /completions` (contract, section 2)."""

from __future__ import annotations

from ..check import Skip, check, expect
from ..target import Api, expect_seconds, expect_usage, only

KEYS = {"text", "index", "logprobs", "finish_reason"}


@check("completions.object",
       "A completion has the object text_completion and an id that begins with cmpl-.",
       "must", "2.3")  # fmt: skip
async def object_and_id(api: Api) -> None:
    body = await api.complete(max_tokens=1)
    expect(
        body["object"] == "text_completion", f"expected text_completion, but got {body['object']!r}"
    )
    expect(body["id"].startswith("cmpl-"), f"expected cmpl-…, but got {body['id']!r}")


@check("completions.ids", "Every completion has a unique id.", "must", "2.3")
async def ids(api: Api) -> None:
    found = {(await api.complete(max_tokens=1))["id"] for _ in range(3)}
    expect(len(found) == 3, f"expected three different ids, but got {found}")


@check("completions.created", "The created field of a completion is a Unix time in whole seconds.",
       "must", "2.3 [EXP]")  # fmt: skip
async def created(api: Api) -> None:
    expect_seconds((await api.complete(max_tokens=1))["created"])


@check("completions.choice-keys",
       "A choice of a completion has the keys text, index, logprobs and finish_reason.",
       "must", "2.3")  # fmt: skip
async def choice_keys(api: Api) -> None:
    choice = only((await api.complete(max_tokens=1))["choices"], "choice")
    expect(choice.keys() >= KEYS, f"expected {sorted(KEYS)}, but got {sorted(choice)}")


@check("completions.logprobs-null",
       "Unless the request asks for logprobs, a choice of a completion has logprobs null.",
       "must", "2.3")  # fmt: skip
async def logprobs_null(api: Api) -> None:
    for value in ({}, {"logprobs": None}):
        choice = only((await api.complete(max_tokens=1, **value))["choices"], "choice")
        found = choice.get("logprobs", "no key")
        expect(found is None, f"expected null for logprobs, but got {found!r}")


@check("completions.usage",
       "The usage of a completion has integer prompt_tokens and completion_tokens that add up to "
       "total_tokens.",
       "must", "2.3 [LC]")  # fmt: skip
async def usage(api: Api) -> None:
    expect_usage((await api.complete(max_tokens=3)).get("usage"))


@check("completions.max-tokens", "A completion has at most max_tokens tokens.", "must", "2.1")
async def max_tokens(api: Api) -> None:
    for limit in (1, 4):
        body = await api.complete("1, 2, 3, 4,", max_tokens=limit, temperature=0)
        count = body["usage"]["completion_tokens"]
        expect(count <= limit, f"expected at most {limit} tokens, but got {count}")


@check("completions.default-16",
       "Without max_tokens, or with null, a completion is limited to 16 tokens.",
       "must", "2.1")  # fmt: skip
async def default_16(api: Api) -> None:
    for value in ({}, {"max_tokens": None}):
        body = await api.complete(api.stable("1, 2, 3, 4,"), temperature=0, **value)
        count, reason = body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]
        expect(count <= 16, f"expected at most 16 tokens, but got {count}")
        if reason == "stop":
            raise Skip("the model ended its answer before 16 tokens")
        expect(count == 16, f"expected 16 tokens, but got {count}")


@check("completions.length", "A completion that reaches max_tokens has the finish_reason length.",
       "must", "2.3")  # fmt: skip
async def length(api: Api) -> None:
    body = await api.complete("1, 2, 3, 4,", max_tokens=1, temperature=0)
    reason = body["choices"][0]["finish_reason"]
    if reason == "stop" and not body["choices"][0]["text"]:
        raise Skip("the model ended its answer with its first token")
    expect(reason == "length", f"expected length, but got {reason!r}")


@check("completions.finish-words",
       "The finish_reason of a completion is stop, length or content_filter.",
       "must", "2.3 10.59")  # fmt: skip
async def finish_words(api: Api) -> None:
    for body in ({"max_tokens": 1}, {"max_tokens": 40, "stop": [" ", "e"]}):
        reason = (await api.complete(**body))["choices"][0]["finish_reason"]
        known = reason in ("stop", "length", "content_filter")
        expect(known, f"expected stop, length or content_filter, but got {reason!r}")


@check("completions.zero-tokens",
       "A completion with max_tokens 0 has an empty text and no completion tokens.",
       "must", "2.4")  # fmt: skip
async def zero_tokens(api: Api) -> None:
    # A sampled answer can be empty by chance.
    body = await api.complete(api.stable("1, 2, 3,"), max_tokens=0, temperature=0)
    expect(
        body["choices"][0]["text"] == "", f"expected an empty text, but got {body['choices'][0]}"
    )
    expect(body["usage"]["completion_tokens"] == 0, f"expected 0 tokens, but got {body['usage']}")


@check("completions.nulls",
       "A completion request with null in its optional fields is served with one choice.",
       "must", "2.1 [LC] [HELM]")  # fmt: skip
async def nulls(api: Api) -> None:
    names = (
        "best_of", "echo", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs",
        "n", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "top_p",
    )  # fmt: skip
    body = await api.complete(max_tokens=1, **dict.fromkeys(names))
    expect(len(body["choices"]) == 1, f"expected one choice, but got {len(body['choices'])}")


@check("completions.stop-empty",
       "A completion request with an empty list of stop sequences is accepted.",
       "must", "2.1 [LMEVAL]")  # fmt: skip
async def stop_empty(api: Api) -> None:
    await api.complete(max_tokens=1, stop=[])


@check("completions.prompt-ids",
       "A list of token ids is one prompt, and usage counts exactly these tokens.",
       "must", "2.2")  # fmt: skip
async def prompt_ids(api: Api) -> None:
    body = await api.complete([70, 71, 72], max_tokens=1)
    only(body["choices"], "choice")
    count = body["usage"]["prompt_tokens"]
    expect(count == 3, f"expected exactly 3 prompt tokens, but got {count}")


@check("completions.prompt-id-lists",
       "A list of lists of token ids is several prompts, and usage counts exactly these tokens.",
       "must", "2.2 [LMEVAL]")  # fmt: skip
async def prompt_id_lists(api: Api) -> None:
    body = await api.complete([[70, 71], [72]], max_tokens=1)
    indices = [choice["index"] for choice in body["choices"]]
    expect(indices == [0, 1], f"expected choices 0 and 1, but got {indices}")
    count = body["usage"]["prompt_tokens"]
    expect(count == 3, f"expected 3 prompt tokens, but got {count}")


@check("completions.suffix",
       "The suffix of a completion request is part of the prompt, or is rejected by name; it is "
       "never ignored.",
       "should", "2.1 10.92")  # fmt: skip
async def suffix(api: Api) -> None:
    prompt = "The capital of France is"
    plain = await api.complete(prompt, max_tokens=2, temperature=0)
    filled = await api.complete(prompt, max_tokens=2, temperature=0, suffix=" is a river.")
    counts = [body["usage"]["prompt_tokens"] for body in (plain, filled)]
    expect(counts[1] > counts[0], f"expected more prompt tokens with a suffix, but got {counts}")


@check("completions.default-prompt",
       "A completion request without a prompt is served, or rejected with 400.",
       "should", "2.1 [SPEC]")  # fmt: skip
async def default_prompt(api: Api) -> None:
    body = {"model": api.model, "max_tokens": 1}
    reply = await api.post("/completions", body)
    if reply.status != 200:
        # A model without a BOS token cannot serve this.
        reply.error(400)
