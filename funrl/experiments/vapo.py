"""VAPO: PPO for long reasoning; the critic learns first, and lambda grows with the completion.

    python -m funrl.experiments.vapo --mesh=dp4,tp2
    python -m funrl.experiments.vapo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

In the first `--critic_warmup_steps` the policy is held still while the critic learns from whole returns. Then the
policy takes lambda = 1 - 1 / (alpha length), and the likelihood of right completions is raised beside the clipped
surrogate. For completions of hundreds of tokens, which it was made for, give the paper's `--alpha=0.05`.

Left out on purpose: sampling fewer prompts more often, which is `--batch_prompts` and `--samples_per_prompt`.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    # The task's sums have 4 tokens: with the paper's alpha of 0.05 lambda would be 0, and it would hardly learn.
    sys.exit(main("vapo", critic_warmup_steps=5, alpha=1.0))
