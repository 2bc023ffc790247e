"""The JUnit XML report, for CI systems."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape, quoteattr

from .run import Run

# Characters that XML 1.0 does not allow.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(run: Run) -> str:
    """Return the run as JUnit XML.

    A broken `must` check is a failure. Any other check that did not pass is skipped, with its
    reason.
    """
    failed = len(run.broken_musts)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f"<testsuite name={quoteattr(run.name)} tests={quoteattr(str(len(run.verdicts)))} "
        f"failures={quoteattr(str(failed))} timestamp={quoteattr(run.date)}>",
    ]
    for verdict in run.verdicts:
        check = verdict.check
        detail = escape(_FORBIDDEN.sub("\ufffd", verdict.detail))
        head = (
            f"  <testcase classname={quoteattr(check.group)} name={quoteattr(check.id)} "
            f'time="{verdict.seconds:.3f}"'
        )
        if verdict.outcome == "pass":
            lines.append(head + "/>")
        elif verdict.broken and check.level == "must":
            lines.append(f"{head}><failure>{detail}</failure></testcase>")
        else:
            lines.append(f"{head}><skipped>{verdict.outcome}: {detail}</skipped></testcase>")
    return "\n".join([*lines, "</testsuite>"]) + "\n"
