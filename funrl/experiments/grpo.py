"""GRPO: no critic; a completion is compared with the others of its prompt.

    python -m funrl.experiments.grpo --mesh=dp4,tp2
    python -m funrl.experiments.grpo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The same run as `ppo.py`: compare their recipes, `funrl/algos/recipes/`, to see how the algorithms differ.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("grpo"))
