"""The model of a fake engine, with a token for each byte, and the texts that prompts ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 256, 258
SIZE = 256 + len(CONTROL)
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)
_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL)) + ")")


@dataclass
class Model:
    """A model of a fake engine.

    Args:
        shift: an offset from a byte's value to its id, so that vocabularies differ.
    """

    name: str = "fake.gguf"
    context: int = 8192
    template: str = TEMPLATE
    shift: int = 0

    def ids(self, text: str, parse: bool = True) -> list[int]:
        """Return the token ids of a text."""
        found = []
        for part in _CONTROL.split(text) if parse else [text]:
            if parse and part in CONTROL:
                found.append(256 + CONTROL.index(part))
            else:
                found += [(byte + self.shift) % 256 for byte in part.encode()]
        return found

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; a control token has none."""
        return bytes([(token - self.shift) % 256]) if token < 256 else b""

    def text(self, ids: list[int], errors: str = "replace") -> str:
        """Return the text of token ids, with control tokens spelled out.

        Args:
            errors: what becomes of bytes that are no whole character, as of `bytes.decode`.
        """
        return b"".join(
            CONTROL[token - 256].encode() if 256 <= token < SIZE else self.piece(token)
            for token in ids
        ).decode(errors=errors)


@dataclass
class Task:
    """The completion that a prompt asks for.

    `echo:WORD` gives the word, `count:N` that many tokens, `endless` an endless completion, and
    `slow:MS` a pause before each token.
    """

    text: str
    endless: bool = False
    interval: float = 0.0

    @classmethod
    def of(cls, prompt: str) -> Task:
        """Read a prompt; the last word of each kind applies."""
        words = re.findall(r"echo:([^\s<]+)", prompt)
        counts = re.findall(r"count:(\d+)", prompt)
        slow = re.findall(r"slow:(\d+)", prompt)
        text = "x" * int(counts[-1]) if counts else words[-1] if words else "ok"
        endless = re.search(r"(?<![/\w])endless\b", prompt) is not None
        return cls(text, endless, int(slow[-1]) / 1000 if slow else 0.0)

    def characters(self) -> Iterator[str]:
        """Yield the characters of the completion."""
        yield from self.text
        while self.endless:
            yield "x"
