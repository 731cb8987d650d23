"""DPO: the policy learns which of two completions is better, by how far it moves from where it began.

    python -m funrl.experiments.dpo --mesh=dp4,tp2
    python -m funrl.experiments.dpo --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}. The first command prefers sums to what comes out
where the carries are forgotten, and begins with a policy that often forgets them. Some of its family, as flags:

    IPO    --loss=ipo --per_token
    RPO    --likelihood_coef=1
    MPO    --loss=0.8*sigmoid+0.2*bco --likelihood_coef=1

Without a reference: `--algorithm=simpo`, `cpo`, `orpo` and others, which `funrl --help` lists.

Left out on purpose: sampling the pairs from the policy, which is `online_pairs` of `funrl.algos`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("dpo"))
