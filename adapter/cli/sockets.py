"""uvicorn's protocol of WebSockets, whose connections the app closes at a shutdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

# Seconds for a client to answer the end of its connection.
_CLOSING = 2.0


class SocketProtocol(WebSocketsSansIOProtocol):
    """One connection of a client that has opened a WebSocket.

    Args:
        closed: called when the connection has closed.
    """

    def __init__(self, *arguments: Any, closed: Callable[[], None], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._closed = closed
        self.close_timeout = _CLOSING

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._closed()

    @override
    async def send(self, message: Any) -> None:
        """Send a message; a refused handshake is complete, although uvicorn logs that it is not."""
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True

    @override
    def shutdown(self) -> None:
        """Leave an open connection to the app, which lets responses end; see `OpenAIAdapter`."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
