"""Rules of `--follow`: which frozen models move towards the policy, how often and how far."""

from __future__ import annotations

import re
from typing import NamedTuple

_RULE = re.compile(r"(\w+):(\d+)(?::(\d*\.?\d+(?:[eE][+-]?\d+)?))?")


class FollowRule(NamedTuple):
    """Rule by which the weights of a frozen model follow those of the policy.

    Attributes:
      every: steps between two moves, at least 1.
      share: of the way to the policy that a move covers, above 0 and at most 1; 1 copies the policy.
    """

    every: int
    share: float = 1.0


def follow_rules(text: str | None) -> dict[str, FollowRule]:
    """Rules by role, of a text such as "reference:100" or "teacher:1:0.05". Raises: ValueError, it means none.

    Example:
      >>> follow_rules("reference:100,teacher:1:0.05")
      {'reference': FollowRule(every=100, share=1.0), 'teacher': FollowRule(every=1, share=0.05)}
    """
    rules = {}
    for word in () if text is None else text.split(","):
        match = _RULE.fullmatch(word.strip())
        if match is None or not int(match[2]) or not 0 < float(match[3] or 1) <= 1:
            raise ValueError(f"{word!r} is not ROLE:STEPS or ROLE:STEPS:SHARE with STEPS from 1 and SHARE in (0, 1]")
        if match[1] in rules:
            raise ValueError(f"{word!r}: {match[1]} has a rule already")
        rules[match[1]] = FollowRule(int(match[2]), float(match[3] or 1))
    return rules


def are_follow_rules(text: str) -> bool:
    """True if a text means rules."""
    try:
        follow_rules(text)
    except ValueError:
        return False
    return True
