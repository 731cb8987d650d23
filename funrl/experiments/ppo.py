"""PPO: a policy, a critic and a frozen reference learn a task whose answers can be verified.

    python -m funrl.experiments.ppo --mesh=dp4,tp2
    python -m funrl.experiments.ppo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The first command launches eight ranks by itself, trains a small decoder from scratch to add numbers by imperfect
demonstrations, and lets PPO do the rest. The loop is `funrl/trainer/loop.py`; what makes it PPO is
`funrl/algos/recipes/ppo.py`.

Left out on purpose: a learned reward model, early stopping on the KL, and shared weights of policy and critic.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("ppo"))
