"""GSPO: GRPO whose ratio is that of the whole completion, normalised by its length.

    python -m funrl.experiments.gspo --mesh=dp4,tp2
    python -m funrl.experiments.gspo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The clip then takes whole completions in or out, and its bounds are some hundred times tighter than those of a token.

Left out on purpose: replaying the experts' routes of a mixture, which this ratio makes needless.
"""

import sys

from funrl.cli.run import main

if __name__ == "__main__":
    sys.exit(main("gspo"))
