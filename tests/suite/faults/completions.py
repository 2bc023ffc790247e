"""Faults in fields, bodies, log-probabilities and streams of both completion endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from suite.faults.edits import (
    Edit,
    both,
    chunks,
    drop,
    given,
    has,
    ignores,
    keep,
    lacks,
    omits,
    put,
    refuses,
    reply,
    request,
    saying,
    swap,
    turn,
    valid,
    values,
)
from suite.server import COMPLETIONS, Fault
from suite.work import CHAT

FINISH = "choices.*.finish_reason"
LEGACY = "choices.*.logprobs"
ENTRIES = "choices.*.logprobs.content"
DELTA = "*.choices.*.delta"


def counted(more: int) -> Edit:
    """Return an edit that changes the number of prompt tokens in a usage."""

    def change(usage: dict[str, int]) -> dict[str, int]:
        prompt = usage["prompt_tokens"] + more
        return {**usage, "prompt_tokens": prompt,
                "total_tokens": prompt + usage["completion_tokens"]}  # fmt: skip

    return change


# Fields.


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _with_bos(prompt: Any) -> Any:
    if _are_ids(prompt):
        return [256, *prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        return [[256, *one] for one in prompt]
    return prompt


def _first(content: Any) -> Any:
    return content[:1] if isinstance(content, list) else content


FIELDS = {
    "ignores-max-tokens": valid(put("max_tokens", 40),
                                when=has("max_tokens", lambda count: count and count < 40)),
    "ignores-max-completion-tokens": ignores("max_completion_tokens"),
    "completion-unlimited": valid(put("max_tokens", 60), at=COMPLETIONS,
                                  when=lambda body: body.get("max_tokens") is None),
    "chat-limited": valid(put("max_tokens", 16), at=CHAT,
                          when=lacks("max_tokens", "max_completion_tokens")),
    "zero-is-one": valid(swap("max_tokens", 0, 1)),
    "refuses-nulls": refuses(lambda body: None in body.values(), status=400),
    "refuses-empty-stop": refuses(has("stop", []), status=400),
    "ids-with-bos": valid(turn("prompt", _with_bos), at=COMPLETIONS),
    "first-prompt-only": valid(turn("prompt", lambda prompt: (
        prompt if _are_ids(prompt) else _first(prompt)))),
    "one-id-list-only": valid(turn("prompt", lambda prompt: (
        [[token] for token in prompt] if _are_ids(prompt) else prompt))),
    "ignores-suffix": ignores("suffix"),
    "needs-a-prompt": refuses(omits("prompt"), COMPLETIONS),
    "ignores-stop": ignores("stop"),
    "first-stop-only": valid(turn("stop", _first)),
    "refuses-stop-strings": refuses(has("stop", str)),
    "refuses-four-stops": refuses(has("stop", lambda stop: (
        isinstance(stop, list) and len(stop) == 4))),
    "ignores-seed": ignores("seed"),
    "one-seed": valid(put("seed", 1)),
    "warm-at-zero": valid(put("temperature", 2), when=lambda body: (
        (body.get("prompt"), body.get("max_tokens")) == ("1, 2, 3,", 8) and lacks("stream")(body))),
    "greedy-by-default": valid(put("temperature", 0), when=omits("temperature")),
    "ignores-top-p": ignores("top_p"),
    "ignores-bias": ignores("logit_bias"),
    "bans-force": valid(turn("logit_bias.*", abs)),
    "refuses-fractions": refuses(has("logit_bias.*", float)),
    "ignores-frequency-penalty": ignores("frequency_penalty"),
    "ignores-presence-penalty": ignores("presence_penalty"),
    "ignores-best-of": ignores("best_of"),
    "refuses-best-of": refuses(lambda body: (
        body.get("best_of") is not None and body["best_of"] >= (body.get("n") or 1))),
    "streams-best-of": request(drop("best_of"), when=given("stream")),
    "ignores-echo": ignores("echo"),
    "ignores-logprobs": ignores("logprobs"),
    "ignores-first-part": request(turn("messages.*.content", _first)),
    "refuses-developer": refuses(has("messages.*.role", "developer"), status=400),
    "refuses-system-parts": refuses(has("messages.*[role=system].content", list)),
    "last-message-only": valid(turn("messages", lambda found: found[-1:]), at=CHAT),
    "500-for-same-role": refuses(lambda body: (
        any(one == other for one, other in pairwise(values("messages.*.role", body))))),
    "refuses-names": refuses(has("messages.*.name")),
    "refuses-without-effect": refuses(has("verbosity")),
    "tier-untold": reply(drop("service_tier")),
    "audio-ignored": request(drop("modalities")),
    "refuses-last-assistant": refuses(lambda body: (
        values("messages.*", body)[-1:] == [{"role": "assistant", "content": "Hi, I"}])),
    "refuses-empty-parts": refuses(has("messages.*.content", [])),
    "refuses-user": refuses(has("user")),
    "refuses-both-limits": refuses(given("max_tokens", "max_completion_tokens")),
    "500-for-surrogates": refuses(has("prompt", "\ud800")),
    "detail-original-refused": refuses(has("messages", saying("'original'")), CHAT, 422),
    "detail-original-unread": valid(put("messages.*.content", "Describe it."),
                                    when=has("messages", saying("'original'"))),
}  # fmt: skip

# Bodies.

BODIES = {
    "counts-drafts": reply(put("usage.completion_tokens_details", {
        "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 3}), at=CHAT),
    "completion-same-id": reply(put("id", "cmpl-1"), at=COMPLETIONS),
    "chat-no-refusal": reply(drop("choices.*.message.refusal"), at=CHAT),
    "chat-empty-tool-calls": reply(turn("choices.*.message", lambda message: (
        {"tool_calls": [], **message})), at=CHAT),
    "chat-null-content": reply(keep("choices.*.message.content", None), at=CHAT),
    "chat-role-bot": reply(keep("choices.*.message.role", "bot"), at=CHAT),
    "chat-usage-details-null": reply(put("usage.prompt_tokens_details", {"cached_tokens": "0"}),
                                     at=CHAT),
    "chat-fingerprint-changes": reply(lambda body: (
        {**body, "system_fingerprint": body["id"]}), at=CHAT),
    "other-answer": reply(turn("choices.*.message.content", lambda text: (
        text and text.replace("Paris", "Rome"))), at=CHAT),
    "control-tokens-count-one": reply(turn("usage", counted(-27)), at=CHAT,
                                      when=saying("<|im_end|>")),
}  # fmt: skip
for _kind, _path in (("completion", COMPLETIONS), ("chat", CHAT)):
    BODIES |= {
        f"{_kind}-object": reply(put("object", "reply"), at=_path),
        f"{_kind}-id": reply(put("id", "1"), at=_path),
        f"{_kind}-created-float": reply(put("created", 1.7e9), at=_path),
        f"{_kind}-created-zero": reply(put("created", 0), at=_path),
        f"{_kind}-created-milliseconds": reply(turn("created", lambda time: 1000 * time), at=_path),
        f"{_kind}-no-usage": reply(drop("usage"), at=_path),
        f"{_kind}-usage-sum": reply(put("usage.total_tokens", 0), at=_path),
        f"{_kind}-finish-word": reply(put(FINISH, "eos"), at=_path),
        f"{_kind}-always-stop": reply(put(FINISH, "stop"), at=_path),
        f"{_kind}-no-logprobs-key": reply(turn("choices.*", lambda choice: {
            key: one for key, one in choice.items() if key != "logprobs" or one}), at=_path),
        f"{_kind}-one-choice": valid(put("n", 1), put("best_of", None), at=_path),
    }  # fmt: skip

# Log-probabilities of completions.

ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def _without_entry(logprobs: dict[str, Any], at: int) -> dict[str, Any]:
    """Return log-probabilities without the first or the last entry."""
    kept = slice(1, None) if at == 0 else slice(None, -1)
    return {key: one[kept] if key in ARRAYS and one else one for key, one in logprobs.items()}


def _from_zero(offsets: list[int]) -> list[int]:
    return [offset - offsets[0] for offset in offsets]


def _without_own(logprobs: dict[str, Any]) -> dict[str, Any]:
    """Return log-probabilities whose alternatives lack a sampled token that is unlikely."""
    found = [
        {key: one for key, one in top.items() if key != token}
        if top and len(top) > 1 and list(top)[-1] == token else top
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]  # fmt: skip
    return {**logprobs, "top_logprobs": found}


def _lose_end(choice: dict[str, Any]) -> dict[str, Any]:
    found = choice["logprobs"]
    ended = found and found["tokens"] and found["tokens"][-1] == "<|im_end|>"
    return {**choice, "logprobs": _without_entry(found, -1)} if ended else choice


def _add_end(choice: dict[str, Any]) -> dict[str, Any]:
    found = choice["logprobs"]
    ended = found and found["tokens"] and choice["finish_reason"] == "stop"
    if not ended or found["text_offset"][0] == 0:
        return choice
    return {**choice, "logprobs": {**found, "tokens": [*found["tokens"], "<|im_end|>"]}}


def _odds(change: Callable[[float], float]) -> Edit:
    """Return an edit of the log-probabilities of tokens, except for null."""
    return turn(f"{LEGACY}.token_logprobs.*", lambda one: one and change(one))


LOGPROBS = {
    "offsets-from-zero": reply(turn(f"{LEGACY}.text_offset", _from_zero)),
    "offsets-by-bytes": reply(turn(f"{LEGACY}.text_offset.*", lambda at: at + 4 * (at > 12))),
    "offsets-all-alike": reply(turn(f"{LEGACY}.text_offset.*", lambda at: 11)),
    "tokens-replaced": both(turn(f"{LEGACY}.tokens.*", lambda token: (
        "\ufffd" if token.startswith("bytes:") else token))),
    "tokens-with-marks": both(turn(f"{LEGACY}.tokens.*", lambda token: token.replace(" ", "Ġ"))),
    "positive-logprobs": reply(_odds(lambda one: -one)),
    "rounded-logprobs": reply(_odds(lambda one: round(one, 2))),
    "zeros-for-null": reply(swap(f"{LEGACY}.token_logprobs.*", None, 0.0)),
    "one-alternative": both(turn(f"{LEGACY}.top_logprobs.*", lambda top: (
        dict(list(top.items())[:1]) if top else top))),
    "sampled-left-out": reply(turn(f"{LEGACY}[top_logprobs]", _without_own)),
    "all-logprobs-alike": reply(_odds(lambda one: -1.5)),
    "infinite-logprobs": reply(_odds(lambda one: -99999.0)),
    "zero-is-off": valid(drop("logprobs"), at=COMPLETIONS, when=has("logprobs", 0)),
    "short-top": reply(turn(f"{LEGACY}.top_logprobs", lambda tops: tops and tops[:-1])),
    "stream-untold-logprobs": chunks(turn("*.choices.*", lambda choice: {
        name: choice[name] for name in choice if choice[name] is not None or name != "logprobs"}),
        at=COMPLETIONS),
    "stream-loses-a-token": chunks(turn(f"*.{LEGACY}[tokens]", lambda found: (
        _without_entry(found, 0) if found["tokens"][0] == " " else found))),
    "logprobs-after-bias": reply(_odds(lambda one: max(one, -0.001))),
    "end-token-left-out": reply(turn("choices.*", _lose_end), at=COMPLETIONS),
    "end-token-without-echo": reply(turn("choices.*", _add_end), at=COMPLETIONS),
    "logprobs-with-temperature": reply(turn(f"{LEGACY}.top_logprobs.*", lambda top: (
        top and {key: one - 2 for key, one in top.items()})), when=has("temperature", 2)),
    "other-prompts-numbers": Fault(reply=lambda path, body, sent: (
        _odds(lambda one: one - len(str(sent.get("prompt"))))(body))),
    "bos-in-echo": reply(turn(f"{LEGACY}.tokens", lambda tokens: ["<s>", *tokens]),
                         when=given("echo")),
}  # fmt: skip

# Stop sequences.


def _append(path: str, body: Any, sent: Mapping[str, Any]) -> Any:
    """Append the stop sequence to each choice that it ended."""
    if not isinstance(sent.get("stop"), str):
        return body
    for where in ("choices.*[finish_reason=stop].text",
                  "choices.*[finish_reason=stop].message.content"):  # fmt: skip
        body = turn(where, lambda text: text + sent["stop"])(body)
    return body


def _stop_streamed(path: str, found: list[Any], sent: Mapping[str, Any]) -> list[Any]:
    if path != COMPLETIONS or not sent.get("stop") or not isinstance(sent["stop"], str):
        return found
    return [*found[:-1], put("choices.*.text", sent["stop"])(found[-1])]


STOPS = {
    "stop-in-prompt": valid(put("max_tokens", 0), at=COMPLETIONS, when=lambda body: (
        isinstance(body.get("stop"), str) and body["stop"].startswith("1, 2")
        and body["stop"] in str(body.get("prompt")))),
    "stop-kept": Fault(reply=_append),
    "stop-is-length": reply(put(FINISH, "length"), when=given("stop")),
    "held-text-lost": chunks(lambda found: found[:-2] + found[-1:], when=given("stop")),
    "stop-streamed": Fault(chunks=_stop_streamed),
}  # fmt: skip

# Log-probabilities of chat.


def _late(found: list[Any]) -> list[Any]:
    """Move all log-probabilities of a stream into its last chunk but one."""
    told = [entry for chunk in found[1:-1] for entry in values(f"{ENTRIES}.*", chunk)]
    empty = turn(f"*.{ENTRIES}", lambda entries: [])(found[1:-1])
    late = turn("choices.*.logprobs", lambda logprobs: {**logprobs, "content": told})
    return [found[0], *empty[:-1], *map(late, empty[-1:]), found[-1]]


CHAT_LOGPROBS = {
    "chat-logprobs-legacy": reply(turn(LEGACY, lambda found: (
        found and {"tokens": [], "token_logprobs": []})), at=CHAT),
    "chat-logprobs-no-refusal": both(drop(f"{LEGACY}.refusal")),
    "chat-bytes-untold": both(turn(f"{ENTRIES}.*.top_logprobs.*", lambda one: {
        name: one[name] for name in one if one[name] is not None})),
    "chat-bytes-null": both(put(f"{ENTRIES}.*.bytes", None)),
    "chat-bytes-of-text": both(turn(f"{ENTRIES}.*", lambda entry: (
        {**entry, "bytes": list(entry["token"].encode())}))),
    "chat-top-always": both(turn(f"{ENTRIES}.*", lambda entry: {
        **entry, "top_logprobs": entry["top_logprobs"]
        or [{key: entry[key] for key in ("token", "logprob", "bytes")}]})),
    "chat-top-unsorted": reply(turn(f"{ENTRIES}.*.top_logprobs", lambda top: top[::-1])),
    "chat-top-five": reply(turn(f"{ENTRIES}.*.top_logprobs", lambda top: top[:5])),
    "chat-positive-logprobs": reply(turn(f"{ENTRIES}.*.logprob", lambda one: 0.1 - one)),
    "chat-entries-without-bytes": reply(drop(f"{ENTRIES}.*.bytes")),
    "chat-entries-doubled": reply(turn(ENTRIES, lambda entries: [
        entry for entry in entries for _ in range(2)])),
    "chat-stream-logprobs-null": chunks(put(f"*.{LEGACY}", None), at=CHAT),
    "chat-stream-logprobs-late": chunks(_late, at=CHAT, when=given("logprobs")),
}  # fmt: skip

# Streams.


def _is_last(chunk: Any) -> bool:
    """Return True if a chunk finishes its first choice."""
    return bool(chunk["choices"] and chunk["choices"][0]["finish_reason"])


def _joined(found: list[Any]) -> list[Any]:
    """Put all text into the first chunk that has text."""
    at = [n for n, chunk in enumerate(found) if any(values("choices.*.delta.content", chunk))]
    whole = put("choices.*.delta.content", "".join(filter(None, values(f"{DELTA}.content", found))))
    return [
        whole(chunk) if n in at[:1] else chunk
        for n, chunk in enumerate(found) if n not in at[1:]
    ]  # fmt: skip


def _halved(text: Any) -> Any:
    return "\ufffd" if text and len(text.encode()) > 2 else text


def _at_done(change: Callable[[bytes], bytes]) -> Fault:
    return Fault(event=lambda data: change(data) if b"[DONE]" in data else data)


STREAMS = {
    "role-in-every-chunk": chunks(put(f"{DELTA}.role", "assistant"), at=CHAT),
    "no-role": chunks(drop(f"{DELTA}.role"), at=CHAT),
    "null-deltas": chunks(put("*.choices.*[finish_reason].delta", None), at=CHAT),
    "last-delta-with-text": chunks(put("*.choices.*[finish_reason].delta.content", ""), at=CHAT),
    "two-finishes": chunks(lambda found: [
        one for chunk in found for one in [chunk] * (1 + _is_last(chunk))]),
    "no-finish": chunks(put(f"*.{FINISH}", None)),
    "chunk-ids-differ": chunks(lambda found: [
        {**chunk, "id": f"{chunk['id']}-{number}"} for number, chunk in enumerate(found)]),
    "chunks-of-another-object": chunks(put("*.object", "chunk")),
    "chunk-created-float": chunks(put("*.created", 1.5)),
    "stream-loses-text": chunks(lambda found: (
        found[:2] + found[3:] if len(found) > 8 else found)),
    "all-in-one-chunk": chunks(_joined, at=CHAT, when=lambda sent: (
        sent.get("n", 1) == 1 and lacks("logprobs")(sent))),
    "usage-in-last-choice": chunks(lambda found: (
        found if found[-1]["choices"]
        else [*found[:-2], {**found[-2], "usage": found[-1]["usage"]}])),
    "usage-key-missing": chunks(turn("*", lambda chunk: {
        key: one for key, one in chunk.items() if key != "usage" or one})),
    "usage-always": chunks(lambda found: [*found, {**found[-1], "choices": [], "usage": {}}],
                           when=lacks("stream_options")),
    "usage-of-stream-differs": chunks(turn("*.usage", lambda usage: usage and counted(1)(usage))),
    "second-choice-first": chunks(lambda found: sorted(found, key=lambda chunk: (
        -chunk["choices"][0]["index"] if chunk["choices"] else 1))),
    "choices-in-one-chunk": chunks(lambda found: [
        turn("choices", lambda choices: [{**choices[0], "index": at} for at in (0, 1)])(found[0]),
        *found[1:]], at=CHAT, when=has("n", 2)),
    "second-choice-cut": chunks(lambda found: [
        chunk for chunk in found
        if not _is_last(chunk) or chunk["choices"][0]["index"] == 0]),
    "half-characters": chunks(turn(f"{DELTA}.content", _halved), at=CHAT),
    "no-done": _at_done(lambda data: b""),
    "two-dones": _at_done(lambda data: data * 2),
    "single-newlines": Fault(event=lambda data: data[:-1]),
    "no-last-blank-line": _at_done(lambda data: data[:-1]),
    "indented-json": Fault(event=lambda data: data.replace(b", ", b",\n")),
    "event-lines": Fault(event=lambda data: b"event: message\n" + data),
}  # fmt: skip
FAULTS = FIELDS | BODIES | LOGPROBS | STOPS | CHAT_LOGPROBS | STREAMS
