"""The chat of characters and its engines are of the tests of environments, the model that sees of the trainer."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("environments", "trainer")]
