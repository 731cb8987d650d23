"""Checks of pieces, rewards, environments and algorithms of one's own, by the properties that the project's have.

from funrl.testing import check_term
check_term(my_term())              # silent, or an AssertionError with the property, the number and the line
"""

import importlib
from typing import Any

_PLACES = {
    "check_advantage": "check_pieces",
    "check_algorithm": "check_pieces",
    "check_environment": "environment_properties",
    "check_filter": "check_pieces",
    "check_loss": "check_pieces",
    "check_reduction": "check_pieces",
    "check_reward": "reward_properties",
    "check_term": "check_pieces",
    "awkward_batch": "awkward_rows",
    "nearby_logp": "awkward_rows",
}
__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"funrl.testing.{_PLACES[name]}"), name)
    raise AttributeError(f"funrl.testing has no {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
