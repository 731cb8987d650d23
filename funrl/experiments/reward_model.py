"""A reward model: a value head on the last token learns to give the better of two completions the higher number.

    python -m funrl.experiments.reward_model --mesh=dp4,tp2
    python -m funrl.experiments.reward_model --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "chosen": ..., "rejected": ...}, with "margin" for `--margin`. What is saved opens
as `AutoModelForSequenceClassification` with one label.

Left out on purpose: rewards of single steps, which are `step_reward` of `funrl.algos`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("reward_model", steps=100))
