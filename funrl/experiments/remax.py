"""ReMax: REINFORCE; the baseline of a completion is the reward of the greedy one of its prompt.

    python -m funrl.experiments.remax --mesh=dp4,tp2
    python -m funrl.experiments.remax --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

Every prompt is completed once more, greedily, so that one sample a prompt is enough. The policy learns to beat its own
most likely completion.

Left out on purpose: the paper's reward models; the task's reward is verified.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("remax", batch_prompts=1024, samples_per_prompt=1))
