#!/usr/bin/env bash
# math-verify 0.9.0 reads two common ways to write a number as another number.
#
# - `10\,000`, `10\ 000` and `10 000` (thousands apart by a space, as LaTeX and SI write them) are the product 10 * 000,
#   which is 0: a right answer `10\,000` accepts `\boxed{0}` and refuses `\boxed{10000}`. `10{,}000` is 10000.
# - `1e-05`, as Python prints 0.00001, is e - 5, the number of Euler less five; as plain text it is 1.
#
# Output seen:
#   10\,000 is 10*0; accepts 0: True; accepts 10000: False
#   1e-05 is -5 + 1*E; accepts 0.00001: False
#   The answer is 1e-05 is 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 \
  antlr4-python3-runtime==4.13.2 mpmath==1.3.0
"$folder/venv/bin/python" - <<'PYTHON'
from math_verify import parse, verify

spaced = parse(r"\boxed{10\,000}")
zero, right = (verify(spaced, parse(rf"\boxed{{{text}}}")) for text in ("0", "10000"))
print(rf"10\,000 is {spaced[0]}; accepts 0: {zero}; accepts 10000: {right}")
scientific = parse(r"\boxed{1e-05}")
small = verify(scientific, parse(r"\boxed{0.00001}"))
print(f"1e-05 is {scientific[0]}; accepts 0.00001: {small}")
plain = parse("The answer is 1e-05")
print(f"The answer is 1e-05 is {plain[0]}")
assert zero and not right, "thousands apart by a space are read otherwise now"
assert not small and plain[0] == 1, "exponents are read otherwise now"
PYTHON
