"""Faults of a server, to switch on one at a time, and the checks that each of them must fail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from suite.faults import (
    agents,
    audio,
    completions,
    embeddings,
    formats,
    messages,
    responses,
    stored,
    tools,
    transport,
    websocket,
)
from suite.server import Fault

_MODULES = (
    agents, audio, completions, embeddings, formats, messages, responses, stored, tools, transport,
    websocket,
)  # fmt: skip
FAULTS: Mapping[str, Fault] = {
    name: fault for module in _MODULES for name, fault in module.FAULTS.items()
}
assert len(FAULTS) == sum(len(module.FAULTS) for module in _MODULES)
EXPECTED_FILE = Path(__file__).parent.with_name("expected.json")
# Any other failure is an error of the suite. Each list was reviewed.
EXPECTED: Mapping[str, frozenset[str]] = {
    fault: frozenset(checks) for fault, checks in json.loads(EXPECTED_FILE.read_text()).items()
}
