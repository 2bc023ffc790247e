"""Scrapes of `/metrics`, and checks of their text."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of a text in Prometheus' format, which is parsed whole."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {one.name: one for one in text_string_to_metric_families(text)}
        self.samples = [sample for one in self.families.values() for sample in one.samples]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with a name and these labels; there is at least one."""
        found = [
            one.value
            for one in self.samples
            if one.name == name and labels.items() <= one.labels.items()
        ]
        assert found, (name, labels)
        return sum(found)

    def values(self, label: str) -> set[str]:
        """Return the values of a label in all samples."""
        return {one.labels[label] for one in self.samples if label in one.labels}


async def scrape(client: Any, path: str = "/metrics", **headers: str) -> Scrape:
    """Return the metrics of a server."""
    reply = await client.get(path, headers=headers)
    assert reply.status_code == 200, reply.text
    return Scrape(reply.text)


def promtool(text: str) -> str | None:
    """Return what Prometheus' own linter has to say; None if it is not installed."""
    if shutil.which("promtool") is None:
        return None
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return done.stdout + done.stderr
