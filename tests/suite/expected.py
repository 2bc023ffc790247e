"""The checks that each fault must fail; any other failure is an error of the suite.

They are listed in `expected.json`, and each list was reviewed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

EXPECTED: Mapping[str, frozenset[str]] = {
    fault: frozenset(checks)
    for fault, checks in json.loads(Path(__file__).with_name("expected.json").read_text()).items()
}
