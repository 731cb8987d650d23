"""A reward model: a value head on the last token learns to give the better of two completions the higher number.

    python -m funrl.experiments.reward_model --mesh=dp4,tp2
    python -m funrl.experiments.reward_model --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}, with "margin" for `--margin`. What is saved opens
as `AutoModelForSequenceClassification` with one label.

Left out on purpose: rewards of single steps, which are `step_reward` in `funrl/algos/reward_losses.py`.
"""

import sys

from funrl.algos.core import Loss, reduce
from funrl.algos.reductions import sequence_mean
from funrl.algos.reward_losses import pairwise_reward
from funrl.experiments.run import main


def algorithm(center: float = 0.0, margin: bool = False) -> Loss:
    """Bradley and Terry's likelihood of the preferences, Ouyang et al., 2022, https://arxiv.org/abs/2203.02155.

    Args:
      center: pulls the mean reward of a pair to 0, in 1 / reward^2
      margin: the chosen completion should win by the number that the data give
    """
    return reduce(pairwise_reward(center, margin), sequence_mean())


if __name__ == "__main__":
    sys.exit(main("reward_model", algorithm="funrl.experiments.reward_model:algorithm", steps=100))
