"""Supervised fine-tuning: the model imitates demonstrations.

    python -m funrl.experiments.sft --mesh=dp4,tp2
    python -m funrl.experiments.sft --model=DIR --data=FILE.jsonl

A line of the file is {"prompt": ..., "completion": ...}, or {"messages": [...]} of which the assistant's turns are
learnt.
The first command teaches a small decoder from scratch to add, by demonstrations without errors.

Left out on purpose: several texts packed into one row; rows of similar lengths go together instead.
"""

import sys

from funrl.algos.core import Loss, reduce
from funrl.algos.reductions import sequence_mean, token_mean
from funrl.algos.supervised import dynamic_likelihood, negative_log_likelihood
from funrl.experiments.run import main


def algorithm(dynamic: bool = False, per_sequence: bool = False) -> Loss:
    """The negative log-likelihood of what is learnt.

    Args:
      dynamic: DFT, Wu et al., 2025, https://arxiv.org/abs/2508.05629: improbable tokens are learnt less eagerly
      per_sequence: every demonstration weighs the same, whatever its length
    """
    term = dynamic_likelihood() if dynamic else negative_log_likelihood()
    return reduce(term, sequence_mean() if per_sequence else token_mean())


if __name__ == "__main__":
    sys.exit(main("sft", algorithm="funrl.experiments.sft:algorithm", warmstart_steps=0, steps=300, eval_every=50))
