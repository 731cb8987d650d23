"""Random texts and the shortened chat templates are those of the tests of environments."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "environments"))
