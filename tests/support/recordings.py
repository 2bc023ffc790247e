"""Recorded exchanges with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDINGS = Path(__file__).parent.parent / "recordings"
DEMO_CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def exchange(engine: str, name: str) -> dict[str, Any]:
    """Return an exchange, with `request` and `response`."""
    loaded: dict[str, Any] = json.loads((RECORDINGS / engine / f"{name}.json").read_text())
    return loaded


def body(engine: str, name: str) -> bytes:
    """Return the body of an exchange's response, as it was sent."""
    return str(exchange(engine, name)["response"]["body"]).encode()


def prompts() -> list[dict[str, Any]]:
    """Return prompts with the demo model's greedy answers."""
    loaded: list[dict[str, Any]] = json.loads((RECORDINGS / "prompts.json").read_text())
    return loaded
