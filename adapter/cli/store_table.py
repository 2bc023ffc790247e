"""The figures of a store as a table."""

from __future__ import annotations

from collections.abc import Iterable

from ..store.place import Place
from ..store.statistics import Statistics

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table(place: Place, found: Statistics) -> str:
    """Return the figures of a store as lines of two columns, and then its models."""
    per_object = found["bytes_per_object"]
    rows = [
        ("store", place.describe()),
        ("schema", f"version {found['schema_version']}"),
        ("objects", f"{found['objects']:,}, {size(found['object_bytes'])}"),
        ("media", f"{found['media']:,}, {size(found['media_bytes'])}"),
        ("owners", f"{found['owners']:,}"),
        ("oldest", found["oldest"] or "-"),
        ("newest", found["newest"] or "-"),
        ("database", _database(found)),
        ("per object", "-" if per_object is None else size(per_object)),
    ]
    groups = [
        (f"{one['objects']:,}", size(one["bytes"]), one["kind"], one["model"])
        for one in sorted(found["groups"], key=lambda one: -one["objects"])
    ]
    shown = [*_aligned(rows)]
    if groups:
        shown += ["", *_aligned([("objects", "bytes", "kind", "model"), *groups])]
    return "\n".join(shown)


def size(number: int) -> str:
    """Return a number of bytes in words."""
    value = float(number)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _database(found: Statistics) -> str:
    free, log = found["free_bytes"], found["log_bytes"]
    parts = (
        size(found["database_bytes"]),
        f"{size(free)} of it free" if free else "",
        f"and {size(log)} in the log of changes" if log else "",
    )
    return ", ".join(filter(None, parts))


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterable[str]:
    rows = [*rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]])
