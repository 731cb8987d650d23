"""KTO: the policy learns from completions that are each known to be good or bad, without pairs.

    python -m funrl.experiments.kto --mesh=dp4,tp2
    python -m funrl.experiments.kto --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "completion": ..., "label": true or false}. The first command's are sums and what
comes out where the carries are forgotten, and it begins with a policy that often forgets them.

Left out on purpose: weights that balance good and bad by themselves, which are `--desirable` and `--undesirable`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("kto"))
