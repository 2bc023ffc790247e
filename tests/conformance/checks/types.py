"""Validation of every body of the run by OpenAI's published types (contract 10.95)."""

from __future__ import annotations

from ..check import check, expect
from ..published import problem
from ..target import Api


async def _expect_valid(api: Api, path: str) -> None:
    wrong = api.wrong.get(path)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("types.completions", "Every completion of the run matches OpenAI's published type.",
       "must", "10.95", alone=True)  # fmt: skip
async def completions(api: Api) -> None:
    await api.complete(max_tokens=1)
    await _expect_valid(api, "/completions")


@check("types.chat", "Every chat completion of the run matches OpenAI's published type.",
       "must", "10.95", alone=True)  # fmt: skip
async def chat(api: Api) -> None:
    await api.chat(max_tokens=1)
    await _expect_valid(api, "/chat/completions")


@check("types.models", "The list of models matches OpenAI's published type.",
       "must", "10.95 5", alone=True)  # fmt: skip
async def models(api: Api) -> None:
    wrong = problem("/models", (await api.get("/models")).ok(), {})
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("types.completion-chunks",
       "Every chunk of a completion stream of the run matches OpenAI's published type.",
       "must", "10.95", alone=True)  # fmt: skip
async def completion_chunks(api: Api) -> None:
    await api.complete_stream(max_tokens=2)
    await _expect_valid(api, "stream of /completions")


@check("types.chat-chunks",
       "Every chunk of a chat completion stream of the run matches OpenAI's published type.",
       "must", "10.95", alone=True)  # fmt: skip
async def chat_chunks(api: Api) -> None:
    await api.chat_stream(max_tokens=2)
    await _expect_valid(api, "stream of /chat/completions")
