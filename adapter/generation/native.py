"""Pass an engine's native response to the client unchanged."""

from __future__ import annotations

from ...backends.base import Backend, Generation
from ...backends.errors import EngineError, LatimerError
from ...backends.http import whole
from ..errors import DONE, error_event
from ..exchange import Exchange


async def pass_native(exchange: Exchange, backend: Backend, job: Generation, stream: bool) -> None:
    """Send the engine's native response: its status, its content type, its body as it arrives.

    Raises:
        EngineError: the status is not a final HTTP status.
    """
    async with backend.native(job, stream) as reply:
        if not 200 <= reply.status <= 599:
            raise EngineError(f"The engine responded with the invalid HTTP status {reply.status}.")
        content_type = reply.content_type.encode("latin-1")
        if not stream:
            # The body is read first, so that a truncated one becomes an error response.
            body = await whole(reply.status, reply.body)
            await exchange.reply(reply.status, body, content_type)
            return
        exchange.fault = _last_event
        await exchange.start(reply.status, content_type)
        try:
            async for chunk in reply.body:
                await exchange.chunk(chunk)
        except LatimerError as error:
            await exchange.chunk(_last_event(error), more=False)
            return
    await exchange.chunk(b"", more=False)


def _last_event(error: LatimerError) -> bytes:
    """Return the event that ends a stream with an error; the engines' own have no `[DONE]`."""
    return error_event(error).removesuffix(DONE)
