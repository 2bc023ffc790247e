"""Draw the figures of `proxy.py` as an SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# The figures to draw, with their titles.
PANELS = {
    "chat, CPU us": "CPU time of a chat request, µs",
    "token in a burst, CPU us": "CPU time of a token in a burst, µs",
    "paced token, CPU us": "CPU time of a paced token, µs",
}
LEFT, WIDTH, ROW, GAP = 110, 520, 22, 44


def bars(title: str, values: Mapping[str, float], top: int) -> tuple[list[str], int]:
    """Return the elements of a bar for each value, on a logarithmic scale, and where they end."""
    least = min(values.values()) / 2
    scale = WIDTH / math.log10(max(values.values()) / least)
    parts = [f'<text x="0" y="{top + 14}" font-weight="bold">{title}</text>']
    for row, (name, value) in enumerate(values.items()):
        y = top + 24 + row * ROW
        width = max(math.log10(value / least) * scale, 1)
        colour = "#3b7dd8" if name == "Latimer" else "#9aa5b1"
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{name}</text>'
            f'<rect x="{LEFT}" y="{y + 2}" width="{width:.0f}" height="{ROW - 5}" rx="2" '
            f'fill="{colour}"/><text x="{LEFT + width + 6:.0f}" y="{y + 14}">{shown}</text>'
        )
    return parts, top + 24 + len(values) * ROW


def picture(figures: Mapping[str, Mapping[str, float]], panels: Mapping[str, str] = PANELS) -> str:
    """Return an SVG with a panel of bars for each figure; the engine has none."""
    parts: list[str] = []
    end = -GAP // 2
    for figure, title in panels.items():
        names: Sequence[str] = [name for name in figures if name != "direct"]
        values = {n: figures[n][figure] for n in names if figures[n].get(figure, 0) > 0}
        if values:
            added, end = bars(title, values, end + GAP // 2)
            parts += added
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 70} {end + 8}" '
        'font-family="system-ui,sans-serif" font-size="13"><style>text{fill:#222}'
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>" + "".join(parts) + "</svg>\n"
    )
