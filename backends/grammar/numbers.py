"""Ranges of numbers as GBNF."""

from __future__ import annotations

# The digits that a double keeps; a longer number could be parsed as another one.
MOST_DIGITS = 15
_DIGITS = "[0-9]"
_WHOLE = f'"-"? ([0] | [1-9] [0-9]{{0,{MOST_DIGITS - 1}}})'


def integers(least: int | None, most: int | None) -> str | None:
    """Return GBNF for the integers of a range; None if there are none."""
    if least is None and most is None:
        return _WHOLE
    limit = 10**MOST_DIGITS - 1
    low = -limit if least is None else max(least, -limit)
    high = limit if most is None else min(most, limit)
    if low > high:
        return None
    options = []
    if low < 0:
        options.append(f'"-" {_any(_magnitudes(max(1, -high), -low))}')
    if high >= 0:
        options.append(_any(_magnitudes(max(0, low), high)))
    return _any(options)


def numbers(least: int | None, most: int | None) -> str | None:
    """Return GBNF for the decimal numbers of a range with integer bounds; None if it is empty."""
    if least is None and most is None:
        return f"{_WHOLE} {_fraction()} ([eE] [-+]? [0-9]{{1,2}})?"
    limit = 10**MOST_DIGITS - 1
    low = -limit if least is None else least
    high = limit if most is None else most
    if low > high:
        return None
    options = []
    if low < 0:
        options += [f'"-" ({part})' for part in _decimals(max(0, -high), -low)]
    if high >= 0:
        options += [f"({part})" for part in _decimals(max(0, low), high)]
    return _any(options)


def _decimals(low: int, high: int) -> list[str]:
    """Return GBNF for decimal numbers: those from `low` to below `high`, and `high` itself."""
    parts = [_any(_magnitudes(high, high)) + ' ("." [0]{1,16})?']
    if low < high:
        parts.append(f"{_any(_magnitudes(low, high - 1))} {_fraction()}")
    return parts


def _fraction() -> str:
    return '("." [0-9]{1,16})?'


def _any(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _magnitudes(low: int, high: int) -> list[str]:
    """Return GBNF for unsigned integers from `low` to `high`, by their number of digits."""
    options = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = min(high, 10**size - 1)
        options += _same_size(str(first), str(last))
    return options


def _same_size(low: str, high: str) -> list[str]:
    """Return GBNF for unsigned integers between two with the same number of digits."""
    if not low:
        return [""]
    if low == "0" * len(low) and high == "9" * len(high):
        return [_run(len(low))]
    options = []
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [_joined(_digit(first, last), rest) for rest in _same_size(low[1:], high[1:])]
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    if low[1:] != zeros:
        options += [_joined(_digit(first, first), r) for r in _same_size(low[1:], nines)]
        first += 1
    upper: list[str] = []
    if high[1:] != nines:
        upper = [_joined(_digit(last, last), r) for r in _same_size(zeros, high[1:])]
        last -= 1
    if first <= last:
        options.append(_joined(_digit(first, last), _run(len(low) - 1)))
    return options + upper


def _run(count: int) -> str:
    return "" if count == 0 else _DIGITS if count == 1 else f"{_DIGITS}{{{count}}}"


def _digit(first: int, last: int) -> str:
    return f"[{first}]" if first == last else f"[{first}-{last}]"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
