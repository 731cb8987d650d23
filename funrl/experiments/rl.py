"""Any recipe: the one that --algorithm names, with the recipe's own defaults.

    python -m funrl.experiments.rl --algorithm=dr_grpo --mesh=dp4,tp2
    python -m funrl.experiments.rl --algorithm=FILE.py:function

`funrl --help` lists the recipes; `funrl dr_grpo` is short for the first command.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("rl"))
