"""Seeds made of a run's seed and of what they are for."""

from __future__ import annotations

LIMIT = 2**63  # what every generator takes is below it
_FACTORS = (1_000_003, 1_003)  # above the usual number of steps, and of epochs


def derived_seed(seed: int, *parts: int) -> int:
    """A seed below `LIMIT` of a seed and of one or two whole numbers, such as the step and the epoch.

    ((seed * 1000003 + first) * 1003 + second) mod 2^63, without the second: (seed * 1000003 + first) mod 2^63.

    >>> derived_seed(1, 2), derived_seed(1, 2, 3)
    (1000005, 1003005018)
    """
    for factor, part in zip(_FACTORS[: len(parts)], parts, strict=True):
        seed = seed * factor + part
    return seed % LIMIT
