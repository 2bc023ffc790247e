"""All cases, by class."""

from __future__ import annotations

from chaos.case import Case
from chaos.cases import critical, engine, load, outside, size, start, store

CASES: list[Case] = [
    *critical.CASES,
    *size.CASES,
    *load.CASES,
    *engine.CASES,
    *outside.CASES,
    *start.CASES,
    *store.CASES,
]
