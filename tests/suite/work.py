"""Generation for a valid request: its choices, complete and in chunks."""

from __future__ import annotations

import codecs
import json
import marshal
import math
import random
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

from suite import calls, constraints, model
from suite.rules import Refused

CHAT = "/chat/completions"
# A bias against the end of the text.
ENDLESS = dict.fromkeys((model.END, model.TURN, model.TURN_END), -100)
# The characters of a text that are evaluated: those of a longer one exceed the context anyway.
MOST = 2 * model.CONTEXT
# The tokens of an image, as text.
IMAGE = "(image)"
# The length of a request, as JSON, whose choices are kept. The checks send most of them many times.
KEPT = 20_000


def work_of(path: str, sent: Mapping[str, Any], turn: int) -> Work:
    """Return the work of a request."""
    asked = json.dumps(sent)
    return _kept(path, asked, turn) if len(asked) < KEPT else Work(path, sent, turn)


@lru_cache(maxsize=4000)
def _kept(path: str, asked: str, turn: int) -> Work:
    return Work(path, json.loads(asked), turn)


class Work:
    """A valid request and its generated choices.

    Args:
        turn: how often the request was sent; without a seed, each turn samples other tokens.
    """

    def __init__(self, path: str, sent: Mapping[str, Any], turn: int = 1) -> None:
        self.turn = turn
        self.chat = path == CHAT
        self.sent = sent
        self.n = sent.get("n") or 1
        self.candidates = max(sent.get("best_of") or 1, self.n)
        limit = sent.get("max_tokens")
        if self.chat:
            limit = limit or sent.get("max_completion_tokens")
        self.limit = limit if limit is not None else (None if self.chat else 16)
        stop = sent.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else stop
        wanted = sent.get("logprobs")
        # Whether log-probabilities are needed: each costs as much as a token.
        self.scored = (wanted is not None and wanted is not False) or self.candidates > self.n
        self.calls = calls.plan(sent) if self.chat else None
        self.forced = self._forced()
        self.prompts = self._chat_prompt() if self.chat else self._prompts()

    def _forced(self) -> bytes | None:
        """Return the bytes that replace the model's completion for calls or formats, or None."""
        if self.calls is not None:
            return "".join(call.text for call in self.calls).encode()
        text = constraints.text_of(self.sent)
        return None if text is None else text.encode()

    def _chat_prompt(self) -> list[tuple[list[int], str]]:
        offered = self.sent.get("tools") or self.sent.get("functions")
        ids: list[int] = [*json.dumps(offered).encode()] if offered else []
        for message in self.sent["messages"]:
            content = _shown(message)
            text = f"{message['role']}\n{content}"[:MOST]
            ids += [model.TURN, *text.encode("utf-8", "replace"), model.TURN_END, 10]
        return [([*ids, model.TURN, *b"assistant\n"], "")]

    def _prompts(self) -> list[tuple[list[int], str]]:
        prompt = self.sent.get("prompt")
        if prompt is None:
            prompt = ""
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        return [self._one(item) for item in prompt]

    def _one(self, item: Any) -> tuple[list[int], str]:
        if isinstance(item, str):
            text = item[:MOST]
            ids = model.tokenize(text.encode("utf-8", "replace").decode(), True)
        else:
            if any(token >= model.SIZE for token in item):
                raise Refused("Invalid 'prompt': an id beyond the vocabulary.", "prompt")
            ids = item
            text = b"".join(map(model.piece, item)).decode(errors="replace")
        if self.sent.get("suffix"):
            ids = [*self.sent["suffix"].encode(), *ids]
        return ids or [model.END], text

    def check_context(self) -> None:
        for ids, _text in self.prompts:
            total = len(ids) + (self.limit or 0)
            if total > model.CONTEXT:
                raise Refused(
                    f"This model's maximum context length is {model.CONTEXT} tokens, however you "
                    f"requested {total} tokens.", "messages" if self.chat else "prompt",
                    "context_length_exceeded",
                )  # fmt: skip

    @cached_property
    def choices(self) -> list[Choice]:
        """The best `n` choices of each prompt, of all that are generated."""
        kept: list[Choice] = []
        self.generated = 0
        for ids, text in self.prompts:
            made = [Choice(self, ids, text, number) for number in range(self.candidates)]
            self.generated += sum(choice.count for choice in made)
            if self.candidates > self.n:
                made.sort(key=lambda choice: -choice.score)
            kept += made[: self.n]
        return kept

    def usage(self) -> dict[str, int]:
        prompt = sum(len(ids) for ids, _ in self.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
        }

    def whole(self) -> dict[str, Any]:
        found: dict[str, Any] = marshal.loads(self._whole)  # noqa: S302
        return found

    @cached_property
    def _whole(self) -> bytes:
        choices = [choice.whole(index) for index, choice in enumerate(self.choices)]
        return marshal.dumps({"choices": choices, "usage": self.usage()})

    def chunks(self) -> list[Any]:
        found: list[Any] = marshal.loads(self._chunks)  # noqa: S302
        return found

    @cached_property
    def _chunks(self) -> bytes:
        parts = [part for at, choice in enumerate(self.choices) for part in choice.chunks(at)]
        if (self.sent.get("stream_options") or {}).get("include_usage"):
            parts = [{**part, "usage": None} for part in parts]
            parts.append({"choices": [], "usage": self.usage()})
        return marshal.dumps(parts)


class Choice:
    """One choice, generated to its end."""

    def __init__(self, work: Work, ids: list[int], prompt: str, number: int) -> None:
        self.work = work
        self.prompt_ids, self.prompt = ids, prompt
        sent = work.sent
        seed = sent.get("seed")
        drawn = f"{work.turn} {number} {ids}"
        rng = random.Random(drawn if seed is None else seed + number)
        bias = {int(token): value for token, value in (sent.get("logit_bias") or {}).items()}
        self.tokens: list[tuple[int, list[float]]] = []
        logprobs: list[float] = []
        counts: Counter[int] = Counter()
        self.reason = "length"
        forced = work.forced
        least = math.inf if sent.get("ignore_eos") else sent.get("min_tokens") or 0
        limit = model.CONTEXT - len(ids) if work.limit is None else work.limit
        temperature = 1 if sent.get("temperature") is None else sent["temperature"]
        top_p = 1 if sent.get("top_p") is None else sent["top_p"]
        data = b""
        self.cut: int | None = None
        before = [*ids]
        while len(self.tokens) < limit:
            values = model.logits(before) if forced is None or work.scored else ()
            if forced is None:
                going = len(self.tokens) < least
                token = model.draw(values, rng, temperature, top_p, ENDLESS if going else bias,
                                   counts,
                                   sent.get("presence_penalty") or 0,
                                   sent.get("frequency_penalty") or 0)  # fmt: skip
            else:
                at = len(self.tokens)
                token = forced[at] if at < len(forced) else model.TURN_END
            if work.scored:
                logprobs = model.log_softmax(values)
            if token >= 256:
                self.reason, self.end = "stop", (token, logprobs)
                break
            counts[token] += 1
            before.append(token)
            self.tokens.append((token, logprobs))
            data += bytes([token])
            ends = [data.find(stop.encode("utf-8", "replace")) for stop in work.stops if stop]
            ends = [end for end in ends if end >= 0]
            if ends:
                self.reason, self.cut = "stop", min(ends)
                if sent.get("include_stop_str_in_output"):
                    self.cut = len(data)
                break
        if self.cut is not None:
            data, self.tokens = data[: self.cut], self.tokens[: self.cut]
        self.data = data
        self.calls = calls.cut(work.calls, data) if work.calls else None
        if work.calls and self.reason == "stop":
            self.reason = calls.reason(sent, work.calls)
        self.text = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
        self.count = len(self.tokens)
        own = [odds[token] for token, odds in self.tokens] if work.scored else []
        self.score = sum(own) / len(own) if own else -9999.0

    def entries(self) -> list[tuple[int, list[float] | None, int]]:
        """Return each token with the log-probabilities at its position and its text offset.

        The first token of a prompt has None instead of log-probabilities.
        """
        listed: list[tuple[int, list[float] | None]] = []
        echo = self.work.sent.get("echo")
        if echo:
            for at, token in enumerate(self.prompt_ids):
                scored = at and self.work.scored
                before = model.logits(self.prompt_ids[:at]) if scored else ()
                listed.append((token, model.log_softmax(before) if scored else None))
        listed += self.tokens
        if echo and self.reason == "stop" and self.cut is None and hasattr(self, "end"):
            listed.append(self.end)
        offset = 0 if echo else len(self.prompt)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = []
        last = len(listed) - 1
        for at, (token, logprobs) in enumerate(listed):
            found.append((token, logprobs, offset))
            ending = at == last and token >= 256 and at >= len(self.prompt_ids)
            if not ending:
                offset += len(decoder.decode(model.piece(token)))
        return found

    def legacy(self, entries: list[Any]) -> Any:
        count = self.work.sent.get("logprobs")
        if count is None:
            return None
        return {
            "tokens": [_legacy(token) for token, _, _ in entries],
            "token_logprobs": [p[token] if p else None for token, p, _ in entries],
            "top_logprobs": [
                {**{_legacy(o): p[o] for o in _best(p, count)}, _legacy(token): p[token]}
                if p else None
                for token, p, _ in entries
            ] if count else None,
            "text_offset": [offset for _, _, offset in entries],
        }  # fmt: skip

    def chat_logprobs(self, tokens: list[Any]) -> Any:
        if not self.work.sent.get("logprobs"):
            return None
        count = self.work.sent.get("top_logprobs") or 0
        return {
            "content": [
                {**_chat(token, p), "top_logprobs": [_chat(o, p) for o in _best(p, count)]}
                for token, p in tokens
            ],
            "refusal": None,
        }

    def whole(self, index: int) -> Any:
        if self.work.chat:
            message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
            if self.calls:
                message = calls.message(self.calls)
            return {"index": index, "message": message, "finish_reason": self.reason,
                    "logprobs": self.chat_logprobs(self.tokens)}  # fmt: skip
        text = (self.prompt if self.work.sent.get("echo") else "") + self.text
        return {"text": text, "index": index, "finish_reason": self.reason,
                "logprobs": self.legacy(self.entries())}  # fmt: skip

    def chunks(self, index: int) -> list[Any]:
        """Return a chunk for each character, with the log-probabilities of its tokens."""
        parts: list[Any] = []
        if self.calls:
            parts = [_delta(index, delta, None, None) for delta in calls.deltas(self.calls)]
            return [*parts, _delta(index, {}, None, self.reason)]
        if self.work.chat:
            first = {"role": "assistant", "content": "", "refusal": None}
            parts.append(_delta(index, first, self.chat_logprobs([]), None))
        entries = self.entries()
        at = 0
        if self.work.sent.get("echo"):
            at = len(self.prompt_ids)
            parts.append(_text(index, self.prompt, self.legacy(entries[:at]), None))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        waiting = 0
        for number, (token, _) in enumerate(self.tokens):
            text = decoder.decode(model.piece(token))
            waiting += 1
            if not text:
                continue
            start, end = number + 1 - waiting, number + 1
            waiting = 0
            if self.work.chat:
                told = self.chat_logprobs(self.tokens[start:end])
                parts.append(_delta(index, {"content": text}, told, None))
            else:
                parts.append(_text(index, text, self.legacy(entries[at + start : at + end]), None))
        rest = entries[at + len(self.tokens) - waiting :]
        if self.work.chat:
            parts.append(_delta(index, {}, None, self.reason))
        else:
            parts.append(_text(index, "", self.legacy(rest), self.reason))
        return parts


def _shown(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text, with its calls and the reasoning before them."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", IMAGE) for part in content)
    made = message.get("tool_calls")
    if made:
        thought = message.get("reasoning_content") or message.get("reasoning") or ""
        content += thought + json.dumps([one[one.get("type", "function")] for one in made])
    return str(content)


def _delta(index: int, delta: Any, logprobs: Any, reason: str | None) -> Any:
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
    return {"choices": [choice]}


def _text(index: int, text: str, logprobs: Any, reason: str | None) -> Any:
    choice = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
    return {"choices": [choice]}


def _best(logprobs: list[float], count: int) -> list[int]:
    return sorted(range(model.SIZE), key=lambda token: (-logprobs[token], token))[:count]


def _legacy(token: int) -> str:
    data = model.piece(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _chat(token: int, logprobs: list[float]) -> Any:
    data = model.piece(token)
    text = data.decode() if token < 128 or token >= 256 else f"\\x{token:02x}"
    shown = list(data) if token < 256 else None
    return {"token": text, "logprob": logprobs[token], "bytes": shown}
