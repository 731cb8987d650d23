"""RLOO: REINFORCE; the baseline of a completion is the mean reward of the others of its prompt.

    python -m funrl.experiments.rloo --mesh=dp4,tp2
    python -m funrl.experiments.rloo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

No critic and no scaling by the group's deviation: the gradient is that of the expected reward, without bias.

Left out on purpose: one ratio for the whole sequence, as TRL takes it; with one update a batch all ratios are 1.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("rloo"))
