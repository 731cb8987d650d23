"""REINFORCE++: PPO without a critic; rewards to go are whitened over the whole batch.

    python -m funrl.experiments.reinforce_plus_plus --mesh=dp4,tp2
    python -m funrl.experiments.reinforce_plus_plus --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The baseline is the batch's mean, not that of a prompt, so one sample a prompt would do. With
`--algorithm=reinforce_plus_plus_baseline` the group's mean is taken off first, and the KL is in the loss.

Left out on purpose: OpenRLHF's asynchronous sampling.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("reinforce_plus_plus"))
