"""Online DPO: of the policy's own samples the best and the worst are a pair, which DPO learns from.

    python -m funrl.experiments.online_dpo --mesh=dp4,tp2
    python -m funrl.experiments.online_dpo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function
    python -m funrl.experiments.online_dpo --model=DIR --prompts=FILE.jsonl --judge=DIR

Prompts whose samples have one score only are replaced, as in `dapo.py`. A reward is a function, a reward model or a
judge, as everywhere.

Left out on purpose: a judge that is shown two completions at once.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("online_dpo", minibatches=1))
