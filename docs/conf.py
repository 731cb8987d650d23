"""The site's configuration: `sphinx-build -W --keep-going docs build/docs`.

A page is plain Markdown that reads the same on a code host. Three things are added here: the tree of pages, from the
lists of README.md; CONTRIBUTING.md and other files of the repository as pages; and docstrings as reStructuredText.
"""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

project = "funrl"
author = "the funrl authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
html_theme = "furo"
html_title = "funrl"
html_show_sphinx = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = False
default_role = "code"
napoleon_custom_sections = ["Needs", "Makes", "Reads", "Metrics", "Warning"]
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_use_ivar = True
highlight_language = "none"
smartquotes = False
suppress_warnings = ["misc.highlighting_failure"]  # blocks named sbatch, jinja with other text, and so on

# The text of these pages is a file outside this folder.
OUTSIDE = {"contributing": "CONTRIBUTING.md", "benchmarks": "benchmarks/README.md", "changes": "CHANGELOG.md"}
SECTION = re.compile(r"(Needs|Makes|Reads|Returns|Yields|Raises|Metrics|References|Example|Warning): (\S.*)")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def relative_link(target: str, folder: Path) -> str:
    """A link of a file in `folder` as one of a page in docs/."""
    path = Path(os.path.normpath(folder / target))
    page = next((page for page, file in OUTSIDE.items() if path == ROOT / file), None)
    if page or path.is_dir() or path == ROOT / "README.md":
        return f"{page or root_doc}.md"
    return Path(os.path.relpath(path, DOCS)).as_posix()


def tree_of_pages(text: str) -> str:
    """The index with a hidden toctree after each section's list of pages."""
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, section in enumerate(sections):
        title = section.splitlines()[0][3:]
        pages = re.findall(r"^- \[[^]]*\]\((\w+)\.md\)", section, re.MULTILINE)
        tree = ["```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""]
        sections[number] = section.rstrip() + "\n\n" + "\n".join(tree) + "\n"
    return first + "".join(sections)


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make a page of the site from a file of the repository."""
    file = ROOT / OUTSIDE[docname] if docname in OUTSIDE else DOCS / f"{docname}.md"
    app.env.note_dependency(str(file))  # a change of it alone is read again
    text = file.read_text()
    text = LINK.sub(lambda match: relative_link(match[1], file.parent), text)
    source[0] = tree_of_pages(text) if docname == root_doc else text


def escaped(line: str) -> str:
    """A line of prose, whose mathematics is no markup of reStructuredText."""
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"([*|\\]|(?<=\w)_(?=\W|$))", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"(`[^`]+`)(?=\w)", r"\1\\ ", "".join(parts))


def read_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Turn a docstring into reStructuredText: tables and examples as they are, `Returns: text` as a paragraph."""
    read: list[str] = []
    kind = "prose"
    for line in lines:
        section = SECTION.match(line)
        if section:
            read += ["", f"**{section[1]}:** {escaped(section[2])}"]
            kind = "section"
        elif line.startswith("|"):
            read += ([] if kind == "table" else ["", "::", ""]) + [f"   {line}"]
            kind = "table"
        elif line.lstrip().startswith(">>>") or (kind == "example" and line.strip()):
            read += [line]
            kind = "example"
        elif kind == "section" and line.startswith("  "):
            read += [escaped(line.strip())]
        else:
            read += [""] * (kind in ("section", "table")) + [escaped(line)]
            kind = "prose"
    lines[:] = read


def setup(app: Sphinx) -> None:
    """Connect the readers of pages and docstrings."""
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
