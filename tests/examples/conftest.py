"""Examples import one another as scripts do: their folder is on the import path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
