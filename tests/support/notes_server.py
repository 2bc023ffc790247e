"""An MCP server over standard input and output, with one tool that counts notes."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "count",
    "description": "Counts the notes with a tag.",
    "inputSchema": {
        "type": "object",
        "properties": {"tag": {"type": "string"}},
        "required": ["tag"],
    },
}


def answer(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        server = {"name": "notes", "version": "1"}
        version = given["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = f"{len(given['arguments']['tag'])} notes"
        return {"content": [{"type": "text", "text": text}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        # Notifications have no id, and get no answer.
        if "id" in message:
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
