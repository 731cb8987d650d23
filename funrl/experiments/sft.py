"""Supervised fine-tuning: the model imitates demonstrations.

    python -m funrl.experiments.sft --mesh=dp4,tp2
    python -m funrl.experiments.sft --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "completion": ...}, or {"messages": [...]}, whose assistant's turns are trained
on. The first command trains a small decoder from scratch to add, by demonstrations without errors.

Left out on purpose: several texts packed into one row; rows of similar lengths go together instead.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("sft", warmstart_steps=0, steps=300, eval_every=50))
