"""The `service_tier` of a request: its place in the queue, and its name in the response."""

from __future__ import annotations

from collections.abc import Mapping

from ...backends.queue import Party, Tier

# The names in responses (contract 3.9); the others stay as they are.
_NAMES = {"auto": "default", "fast": "priority", "ultrafast": "priority"}
# The other tiers have the default place.
_PLACES: Mapping[str | None, Tier] = {
    "priority": Tier.PRIORITY,
    "fast": Tier.PRIORITY,
    "ultrafast": Tier.PRIORITY,
    "flex": Tier.FLEX,
}


def party_of(tier: str | None) -> Party | None:
    """Return the request as engines know it; None if it has the default place."""
    place = _PLACES.get(tier)
    return None if place is None else Party(place)


def name_of(tier: str) -> str:
    """Return the tier that the response names."""
    return _NAMES.get(tier, tier)
