"""Cases of kernels under Triton's interpreter, which programs beside this file run."""

import json
import traceback


def print_outcomes(cases):
    """Print as JSON, for each case, null or the traceback of its failure."""
    results = {}
    for case in cases:
        try:
            case()
            results[case.__name__] = None
        except Exception:
            results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))
