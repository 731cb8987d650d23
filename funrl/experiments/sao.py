"""SAO: one completion a prompt; a critic that learns twice as often as the policy takes the place of the group.

    python -m funrl.experiments.sao --place="train:dp1 generate:dp1" --staleness=2
    python -m funrl.experiments.sao --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The critic learns first, in `--critic_warmup_steps`. For completions of hundreds of tokens, which it was made for, give
`--alpha=0.05 --freeze=critic:attention`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    # The task's sums have 4 tokens: with an alpha of 0.05 lambda would be 0, and it would hardly learn.
    sys.exit(main("sao", samples_per_prompt=1, batch_prompts=512, critic_warmup_steps=5, critic_updates=2, alpha=1.0))
