"""Templates of the pages: jinja2 escapes every value, and invisible characters are written out."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from funrl.track.report.charts import number

# Control characters, surrogates, and the marks that turn the direction of the text around them.
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def render_page(template: str, **values: object) -> str:
    """Fill a file of templates/ with values."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Any:
    """jinja2's environment, which keeps the compiled templates."""
    import jinja2  # here, as it takes 50 ms and most commands write no page

    folder = Path(__file__).with_name("templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=written_out,
    )
    environment.filters |= {"number": number, "shown": shown_value}
    return environment


def shown_value(value: object) -> str:
    """A value of config.json as text."""
    if value is None:
        return "not set"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def written_out(value: Any) -> Any:
    """Write out invisible characters of a text; what a template has rendered already stays as it is."""
    if type(value) is not str:
        return value
    return INVISIBLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), value)
