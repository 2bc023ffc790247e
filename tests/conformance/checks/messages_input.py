"""The system prompt, the messages and the blocks of a Messages request (contract, section 3)."""

from __future__ import annotations

from typing import Any

from ..check import Skip, check, expect
from ..target import Api
from .messages import ASK, ask, expect_error, expect_same, said, send, size, text, text_of, user

BILLING = "x-anthropic-billing-header: cc_version=1.0; cch="
CACHED = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
LONG = "The sky is blue."


async def grows(api: Api, *messages: Any, **fields: Any) -> int:
    """Return the number of input tokens by which a request exceeds a short one."""
    return await size(api, *messages, **fields) - await size(api, user(ASK))


@check("messages.system",
       "system as a text and as one block give the same prompt, and two blocks both reach it.",
       "must", "M3.4 M13.14 M13.15")  # fmt: skip
async def system(api: Api) -> None:
    plain = await grows(api, system=LONG)
    expect(plain > 0, "expected more input tokens with a system prompt, but got as many")
    expect_same(await grows(api, system=[text(LONG)]), plain, "with a block")
    both = await grows(api, system=[text(LONG), text(LONG)])
    expect(both > plain, f"expected more than {plain} tokens with two blocks, but got {both}")


@check("messages.billing",
       "The billing block at the head of the system prompt does not reach the prompt.",
       "must", "M3.4 M13.16")  # fmt: skip
async def billing(api: Api) -> None:
    plain = await grows(api, system=[text(LONG)])
    for number in ("1", "12345"):
        found = await grows(api, system=[text(BILLING + number), text(LONG)])
        expect_same(found, plain, "with a billing block")


@check("messages.merged", "Messages of one role in a row are accepted, and all reach the prompt.",
       "must", "M3.1 M13.17")  # fmt: skip
async def merged(api: Api) -> None:
    found = await grows(api, user(LONG), user(LONG), user(ASK))
    one = await grows(api, user(LONG), user(ASK))
    expect(found > one > 0, f"expected more tokens for each message, but got {one} and {found}")


@check("messages.prefill", "A final assistant message is continued, and not repeated.",
       "must", "M3.1 M13.18")  # fmt: skip
async def prefill(api: Api) -> None:
    whole = text_of(await ask(api))
    start = whole[: len(whole) // 2].rstrip()
    if len(start) < 4:
        raise Skip("the answer is too short to be continued")
    found = text_of(await ask(api, messages=[user(ASK), said(start)]))
    expect(not found.startswith(start), f"expected a continuation of {start!r}, but got {found!r}")


@check("messages.prefill-space", "A final assistant message that ends in whitespace is rejected.",
       "must", "M3.1 M13.18")  # fmt: skip
async def prefill_space(api: Api) -> None:
    reply = await send(api, messages=[user(ASK), said("1, ")])
    expect_error(reply, 400, "invalid_request_error")


@check("messages.system-middle",
       "A message with the role system is accepted in the middle, at the end and at the head.",
       "must", "M3.1 M13.19 M13.20 M13.21")  # fmt: skip
async def system_middle(api: Api) -> None:
    told = {"role": "system", "content": LONG}
    for messages in (
        [user(ASK), told, said("1, 2"), user(ASK)], [user(ASK), told], [told, user(ASK)],
    ):  # fmt: skip
        found = await grows(api, *messages)
        expect(found > 0, "expected the instructions in the prompt, but it has as many tokens")


@check("messages.empty-user", "An empty text of the user is rejected.", "must", "M3.1 M13.22")
async def empty_user(api: Api) -> None:
    reply = await send(api, messages=[user(text(""))])
    expect_error(reply, 400, "invalid_request_error")


@check("messages.empty-assistant", "An empty answer in the history is accepted.",
       "must", "M3.1 M13.22")  # fmt: skip
async def empty_assistant(api: Api) -> None:
    empty: tuple[Any, ...] = ("", [])
    for content in empty:
        await size(api, user(ASK), {"role": "assistant", "content": content}, user(ASK))


@check("messages.cache-control",
       "cache_control is accepted everywhere, and changes nothing.",
       "must", "M2.1 M13.11")  # fmt: skip
async def cache_control(api: Api) -> None:
    plain = await size(api, user(text(ASK)), system=[text(LONG)])
    found = await size(
        api, user(text(ASK, cache_control=CACHED)), system=[text(LONG, cache_control=CACHED)],
        cache_control=CACHED,
    )  # fmt: skip
    expect_same(found, plain, "with cache_control")


@check("messages.inert",
       "Fields that only matter at Anthropic, and explicit nulls, are accepted and change nothing.",
       "must", "M2.1 M13.10 M13.12 M13.13")  # fmt: skip
async def inert(api: Api) -> None:
    plain = await size(api)
    keeps = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for fields in (
        {"metadata": {"user_id": '{"session_id": "s"}'}}, {"metadata": {"user_id": None}},
        {"service_tier": "auto"}, {"inference_geo": "us"}, {"context_management": keeps},
        {"stop_sequences": None, "system": None, "tools": None, "thinking": None},
    ):  # fmt: skip
        expect_same(await size(api, **fields), plain, f"with {sorted(fields)}")


@check("messages.unknown-field", "An unknown field is ignored.", "must", "M2.1 M13.9")
async def unknown_field(api: Api) -> None:
    await size(api, no_such_field=1)


@check("messages.document",
       "The text of a document is in the prompt, from a text and from blocks.",
       "must", "M3.2 M13.25")  # fmt: skip
async def document(api: Api) -> None:
    def sources(content: str) -> list[dict[str, Any]]:
        return [
            {"type": "text", "media_type": "text/plain", "data": content},
            {"type": "content", "content": [text(content)]},
        ]

    for sizes in zip(sources("a"), sources(LONG), strict=True):
        short, long = [
            await size(api, user({"type": "document", "source": source}, text(ASK)))
            for source in sizes
        ]
        expect(long > short, "expected the text in the prompt, but it has as many tokens")


@check("messages.search-result",
       "The title, the source and the text of a search result are in the prompt.",
       "must", "M3.2 M13.26")  # fmt: skip
async def search_result(api: Api) -> None:
    def block(title: str, source: str, content: str) -> dict[str, Any]:
        return {"type": "search_result", "title": title, "source": source,
                "content": [text(content)]}  # fmt: skip

    short = await grows(api, user(block("a", "b", "c"), text(ASK)))
    for texts in ((LONG, "b", "c"), ("a", LONG, "c"), ("a", "b", LONG)):
        found = await grows(api, user(block(*texts), text(ASK)))
        expect(found > short, "expected each text in the prompt, but it has as many tokens")


@check("messages.file-source", "An image by the id of a file is rejected.", "must", "M3.2 M13.24")
async def file_source(api: Api) -> None:
    source = {"type": "file", "file_id": "file_none"}
    reply = await send(api, messages=[user({"type": "image", "source": source}, text(ASK))])
    expect_error(reply, 400, "invalid_request_error")


@check("messages.unknown-block",
       "A block of an unknown type is rejected with its place and Anthropic's words.",
       "must", "M3.2")  # fmt: skip
async def unknown_block(api: Api) -> None:
    reply = await send(api, messages=[user(text(ASK), {"type": "no_such_block"})])
    found = expect_error(reply, 400, "invalid_request_error")
    valid = found.startswith("messages.0.content.1: Input tag 'no_such_block' found using 'type'")
    expect(valid, f"expected the place and the type, but got {found!r}")
