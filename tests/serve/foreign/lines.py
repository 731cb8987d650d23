"""A process that runs a program for each line of JSON that it is sent. It imports nothing of funrl."""

import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor


def serve(run):
    """Answer each line {"number": N, ...} by {"number": N, "result": ...} or {"number": N, "problem": ...}."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # of what programs print

    def answer(task):
        number = task.pop("number")
        try:
            line = {"number": number, "result": run(**task)}
        except Exception:
            line = {"number": number, "problem": traceback.format_exc()}
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    with ThreadPoolExecutor(64) as threads:
        for line in sys.stdin:
            threads.submit(answer, json.loads(line))
