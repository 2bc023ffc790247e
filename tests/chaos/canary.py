"""An HTTP server and a file that requests name and that must never be opened."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path


class Canary:
    """A counter of connections to an address and of readers of a file.

    The file is a named pipe: it can be opened for writing only while a process reads it.
    """

    def __init__(self) -> None:
        self.touched: list[str] = []
        self.port = 0
        self._folder = tempfile.TemporaryDirectory(prefix="latimer-canary-")
        self.file = Path(self._folder.name) / "schema.json"
        os.mkfifo(self.file)

    async def start(self) -> None:
        """Start to watch."""
        self._server = await asyncio.start_server(self._asked, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._watch = asyncio.create_task(self._look())

    def fresh(self) -> list[str]:
        """Return the accesses since the last call."""
        found, self.touched = self.touched, []
        return [f"the canary was touched: {one}" for one in found[:3]]

    def named(self, text: str) -> str:
        """Return a text with the canary's address and file filled in."""
        return text.replace("CANARY", f"127.0.0.1:{self.port}").replace("FIFO", str(self.file))

    async def stop(self) -> None:
        """Stop to watch, and remove the file."""
        self._watch.cancel()
        self._server.close()
        self._folder.cleanup()

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.touched.append((await reader.read(200)).decode("latin-1").split("\r\n")[0])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def _look(self) -> None:
        while True:
            try:
                os.close(os.open(self.file, os.O_WRONLY | os.O_NONBLOCK))
                self.touched.append(f"read of {self.file}")
            except OSError:
                pass
            await asyncio.sleep(0.02)
