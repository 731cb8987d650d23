"""Cases of kernels under Triton's interpreter, as a program: TRITON_INTERPRET is read at imports.

It prints as JSON, for each case, null or the traceback of its failure.
"""

import json
import sys
import traceback

from funrl.compiled_kernels import linear_logprob, paged_attention  # noqa: F401
from funrl.optim import fused  # noqa: F401

assert "triton" not in sys.modules, "triton is imported where a kernel runs, and not before"
import interpreted_decode  # noqa: E402
import interpreted_experts  # noqa: E402
import interpreted_pages  # noqa: E402
import interpreted_rows  # noqa: E402


def main():
    results = {}
    for module in (interpreted_pages, interpreted_decode, interpreted_experts, interpreted_rows):
        module.set_up()
        for case in module.CASES:
            results[case.__name__] = None
            try:
                case()
            except Exception:
                results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
