"""DAPO: GRPO that clips higher than it clips low, and trains on no prompt that all or none of its samples solve.

    python -m funrl.experiments.dapo --mesh=dp4,tp2
    python -m funrl.experiments.dapo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

Prompts whose rewards are all equal give a group baseline no signal; more are sampled until the batch is full, at most
`--max_refills` times, and the metrics `filter_groups/...` say what was thrown away. A completion that comes close to
the limit of its length loses up to `--overlong_coef`.

Left out on purpose: sampling more prompts than a batch and keeping the rest for the next step.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("dapo"))
