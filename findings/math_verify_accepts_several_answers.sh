#!/usr/bin/env bash
# math-verify 0.9.0 accepts answers that exclude each other, and its verdict depends on which of two is the right one.
#
# - A per cent: the right answer `50\%` accepts both `50` and `0.5`; `50.5\%` accepts 0.505 and refuses 50.5.
# - Decimals below 1e-6: 0.0000001 and 0.0000002 are equal, as decimals are rounded to six places, whatever their size;
#   10^{-7} and 2 \times 10^{-7} are not.
# - Units are dropped: `5 m` is `5 cm`.
# - A set is a pair: `\{1, 3\}` is right for `(1,3)`, and the pair `(1,3)` for the set.
# - Intervals: `(1,3)` is right where `1<x<3` is wanted, and `1<x<3` is wrong where `(1,3)` is wanted.
#
# Output seen:
#   50\%: 50 True, 0.5 True
#   50.5\%: 50.5 False, 0.505 True
#   0.0000002: 0.0000001 True
#   5 cm: 5 m True
#   (1,3): \{1,3\} True, 1<x<3 False
#   1<x<3: (1,3) True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 \
  antlr4-python3-runtime==4.13.2 mpmath==1.3.0
"$folder/venv/bin/python" - <<'PYTHON'
from math_verify import parse, verify

SEEN = {
    r"50\%": {"50": True, "0.5": True},
    r"50.5\%": {"50.5": False, "0.505": True},
    "0.0000002": {"0.0000001": True},
    "5 cm": {"5 m": True},
    "(1,3)": {r"\{1,3\}": True, "1<x<3": False},
    "1<x<3": {"(1,3)": True},
}
for wanted, answers in SEEN.items():
    gold = parse(rf"\boxed{{{wanted}}}")
    found = {given: verify(gold, parse(rf"\boxed{{{given}}}")) for given in answers}
    print(f"{wanted}: " + ", ".join(f"{given} {verdict}" for given, verdict in found.items()))
    assert found == answers, f"{wanted} is judged otherwise now"
PYTHON
