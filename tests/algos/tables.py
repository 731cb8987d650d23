"""The rows of all tables: a new rows_*.py goes in here."""

import rows_advantages
import rows_choices
import rows_corrections
import rows_newer
import rows_preference
import rows_shaping
import rows_steps
import rows_terms
from pieces import Row

TABLES = (
    rows_advantages,
    rows_shaping,
    rows_steps,
    rows_corrections,
    rows_terms,
    rows_choices,
    rows_preference,
    rows_newer,
)
ROWS: list[Row] = [row for table in TABLES for row in table.ROWS]
