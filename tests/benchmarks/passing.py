"""A proxy made with aiohttp that passes bytes on and translates nothing.

python tests/benchmarks/passing.py PORT ENGINE_PORT
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

from aiohttp import ClientSession, DummyCookieJar, TCPConnector, web

SESSION = web.AppKey("session", ClientSession)


def main(port: int, engine: int) -> None:
    """Serve until a signal ends the process."""
    import uvloop

    address = f"http://127.0.0.1:{engine}"

    async def session(app: web.Application) -> AsyncIterator[None]:
        connector = TCPConnector(limit=0)
        async with ClientSession(connector=connector, cookie_jar=DummyCookieJar()) as found:
            app[SESSION] = found
            yield

    async def passed(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        async with request.app[SESSION].post(address + request.path, data=body) as reply:
            response = web.StreamResponse(
                status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for data in reply.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_post("/{path:.*}", passed)
    app.cleanup_ctx.append(session)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
