"""PRIME: rewards for every token from a process model that is trained along, on outcomes alone.

    python -m funrl.experiments.prime --mesh=dp4,tp2
    python -m funrl.experiments.prime --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The process model begins as a copy of the policy. beta times its log-ratio to the reference is a token's reward, and the
sum over a completion learns beside the policy to tell right answers from wrong ones. Prompts that are too easy
or too hard are replaced, as in `dapo.py`.

Left out on purpose: updating the process model before its rewards are used in the same step.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("prime"))
