"""Which checks each fault must fail; anything else that fails is an error of the suite.

Written down in `expected.json` after each list was looked through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

EXPECTED: Mapping[str, frozenset[str]] = {
    fault: frozenset(checks)
    for fault, checks in json.loads(Path(__file__).with_name("expected.json").read_text()).items()
}
