"""Calls as Mistral's models write them behind `[TOOL_CALLS]`.

A list of objects (tokenizers v3 to v7), or `name[ARGS]{…}`, with `[CALL_ID]id` in between for some
(v11 and later): https://docs.mistral.ai/capabilities/function_calling and mistral-common's
`tokens/tokenizers/instruct.py`.
"""

from __future__ import annotations

from ..json_call import Broken, CallReader, Steps

MARKER = "[TOOL_CALLS]"
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
_LONGEST = 64 + len(CALL_ID) + 64 + len(ARGS)


class MistralReader(CallReader):
    """Reads either of them."""

    def _run(self) -> Steps:
        byte = yield from self._next()
        if byte in b"[{":
            self._peeked = byte
            yield from super()._run()
            return
        header = bytearray()
        while not header.endswith(ARGS.encode()):
            header.append(byte)
            if len(header) > _LONGEST or byte in b'{}"':
                raise Broken
            byte = yield
        self._begin(_name(header))
        byte = byte if byte not in b" \n" else (yield from self._next())
        if byte != ord("{"):
            raise Broken
        yield from self._value(byte, self._fragment)
        self._check_whole()


def _name(header: bytearray) -> str:
    text = header.decode(errors="replace").removesuffix(ARGS)
    return text.split(CALL_ID)[0].strip()
