"""The chat of characters and its engines are those of the tests of environments."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("environments", "serve")]
sys.path.append(str(Path(__file__).parents[2] / "examples"))
