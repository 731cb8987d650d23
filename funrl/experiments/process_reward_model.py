"""A process reward model: a value head at the end of every step learns whether the solution is right so far.

    python -m funrl.experiments.process_reward_model --mesh=dp4,tp2
    python -m funrl.experiments.process_reward_model --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "completions": [step, ...], "labels": [true or false, ...]}; `--step_separator`
follows every step. In the first command's data every digit of a sum is a step. What is saved opens as
`AutoModelForTokenClassification` with two labels, and `--process_reward_model` takes it.

Left out on purpose: rewards of steps without labels of steps, which are `prime.py`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("process_reward_model", steps=100))
