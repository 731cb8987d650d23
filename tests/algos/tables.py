"""The rows of all tables: those of every rows_*.py."""

import importlib
from pathlib import Path

from pieces import Row

TABLES = [importlib.import_module(file.stem) for file in sorted(Path(__file__).parent.glob("rows_*.py"))]
ROWS: list[Row] = [row for table in TABLES for row in table.ROWS]
