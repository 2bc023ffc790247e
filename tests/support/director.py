"""A llama-server with scripted answers; a real one serves all paths except `/completion`."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

# More than any agent sends; the real server never evaluates these prompts.
CONTEXT = 131_072
Write = Callable[[str], str]


def _ask(target: str, method: str, path: str, body: bytes | None = None) -> tuple[int, str, bytes]:
    """Return status, content type and body of a response of the real server."""
    connection = http.client.HTTPConnection(target.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        return reply.status, reply.headers["content-type"], reply.read()


def _json(target: str, path: str, payload: Any) -> Any:
    return json.loads(_ask(target, "POST", path, json.dumps(payload).encode())[2])


def _events(target: str, text: str, evaluated: int) -> Iterator[dict[str, Any]]:
    """Yield the native events of an answer, one for each token."""
    asked = {"content": text, "add_special": False, "with_pieces": True}
    tokens = _json(target, "/tokenize", asked)["tokens"]
    counts = {"tokens_evaluated": evaluated}
    for number, token in enumerate(tokens, 1):
        event = {"index": 0, "content": token["piece"], "tokens": [token["id"]], "stop": False}
        yield {**event, "tokens_predicted": number, **counts}
    last = {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": "eos"}
    timings = {"cache_n": 0, "prompt_n": evaluated, "predicted_n": len(tokens) + 1}
    yield {
        **last, "stopping_word": "", "tokens_predicted": len(tokens) + 1, **counts,
        "timings": timings, "model": json.loads(_ask(target, "GET", "/props")[2])["model_path"],
    }  # fmt: skip


@contextlib.contextmanager
def directed(target: str, write: Write) -> Iterator[str]:
    """Serve a llama-server's interface with scripted answers; yield its address.

    Args:
        target: the address of a real llama-server, for templates and tokens.
        write: returns the answer to a prompt's text.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = _ask(target, "GET", self.path)
            if self.path == "/props":
                props = json.loads(body)
                props["default_generation_settings"]["n_ctx"] = CONTEXT
                body = json.dumps(props).encode()
            self._send(status, kind, body)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            asked = json.loads(data)
            if self.path != "/completion" or not asked.get("stream"):
                self._send(*_ask(target, "POST", self.path, data))
                return
            prompt = asked["prompt"]
            if not isinstance(prompt, str):
                prompt = _json(target, "/detokenize", {"tokens": prompt})["content"]
            events = _events(target, write(prompt), len(prompt) // 4)
            lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
            self._send(200, "text/event-stream", b"".join(lines))

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
