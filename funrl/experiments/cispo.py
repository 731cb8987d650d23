"""CISPO: GRPO that clips a token's importance weight and never its gradient.

    python -m funrl.experiments.cispo --mesh=dp4,tp2
    python -m funrl.experiments.cispo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

A rare token that begins a correction has a large ratio; PPO's clip takes it out of the update, this one only bounds its
weight.

Left out on purpose: MiniMax's filter of repeated text.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("cispo"))
