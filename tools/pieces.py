"""The pieces reference: docs/pieces.md, written from the docstrings of `funrl.algos`.

    python tools/pieces.py

`tests/docs/test_written_pages.py` fails where the page is not what the code says.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pieces.md"
sys.path.insert(0, str(ROOT))

from funrl import algos  # noqa: E402

INTERNAL = {"kl_to", "or_token_ratio", "run_term"}
KINDS = {  # what a piece returns: the heading, and one line
    "Advantage": (
        "Advantages and corrections",
        "Links of a `chain`: `init() -> state`, `update(signal, state, batch) -> (signal, state)`.",
    ),
    "Controller": ("Controllers of a KL in the reward", "For `token_rewards` and `kl_in_reward`."),
    "Lambda": ("Lambdas of `gae`", "A lambda for each row."),
    "Term": ("Terms", "`(logp, batch) -> (loss per token, metrics)`; joined by `add`, `scale` and `weighted`."),
    "Ratio": ("Ratios", "The `ratio` of a term."),
    "Selection": ("Selections of tokens", "For `on_tokens`."),
    "PairLoss": ("Losses of pairs", "For `preference`."),
    "PairReward": ("Rewards of pairs", "For `preference`."),
    "PairWeight": ("Weights of pairs", "For `preference`."),
    "Loss": ("Losses", "What a role minimises: made by `reduce`, joined by `sum_losses`."),
    "Reduction": ("Reductions", "From a loss per token to one number, for `reduce`."),
    "Filter": ("Filters", "Which rows are trained on; joined by `every`."),
}
FORMULA = re.compile(
    r" = |\w\[\w|(?:mean|sum(?!_losses)|prod)_|(?:exp|min|max|clip|sg)\(|-?log (?:pi|s\(|u\b)|x(?:_i|\[t\]) [-+]"
    r"|s\(beta|\)\^2"
)
PARTS = re.compile(
    r"(?:^|(?<=\. ))(Args|Needs|Makes|Returns|Raises|References|Metrics|Warning|Example|Reads)\b[^\n]*?:|^\|",
    re.MULTILINE,
)


def page() -> str:
    """docs/pieces.md."""
    found = pieces()
    lines = [
        "# Pieces",
        "",
        "Pieces of algorithms by kind, written by `python tools/pieces.py`; import them from `funrl.algos`. The",
        "[API](api_algos.md) has their arguments, shapes and needs, [algorithms](algorithms.md) joins them.",
    ]
    for kind, (heading, text) in KINDS.items():
        lines += ["", f"## {heading}", "", text, "", "| piece | what it does |", "|---|---|"]
        lines += [row(name) for name in found[kind]]
    return "\n".join(lines) + "\n"


def pieces() -> dict[str, list[str]]:
    """Names of the public pieces by kind, those of a file beside each other."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in algos.WHERE:
        value = getattr(algos, name)
        if not inspect.isfunction(value) or name in INTERNAL or name in algos.NAMES:
            continue
        kind = inspect.signature(value).return_annotation
        if kind in found:
            found[kind].append(name)
    return {kind: sorted(names, key=lambda name: (algos.WHERE[name], name)) for kind, names in found.items()}


def row(name: str) -> str:
    """The line of one piece in its table."""
    piece = getattr(algos, name)
    text = inspect.getdoc(piece) or ""
    file = Path(inspect.getfile(piece)).relative_to(ROOT).as_posix()
    what = " ".join(filter(None, (description(text), linked(papers(piece)))))
    return f"| [`{name}`](../{file}) | {what} |"


def description(text: str) -> str:
    """First sentence of a docstring, and the next one with a formula if the first has none."""
    first = PARTS.search(text)
    sentences = re.split(r"(?<=\.)\s+", (text[: first.start()] if first else text).strip())
    shown = sentences[:1]
    if not FORMULA.search(shown[0]):
        shown += [sentence for sentence in sentences[1:] if FORMULA.search(sentence)][:1]
    return cell(re.sub(r",? on \[B(?:, T)?\](?=[.;])", "", " ".join(shown)))


def papers(piece: object) -> list[str]:
    """Addresses that a piece refers to, or else its file where that names one paper."""
    own, of_file = inspect.getdoc(piece) or "", inspect.getdoc(inspect.getmodule(piece)) or ""
    return addresses(own) or (addresses(of_file) if len(addresses(of_file)) == 1 else [])


def linked(links: list[str]) -> str:
    """Addresses as links that show what comes last in them; "" for none."""
    return ", ".join(f"[{link.split('/abs/')[-1].split('//')[-1]}]({link})" for link in links)


def addresses(text: str) -> list[str]:
    """Addresses of the references in a docstring."""
    return list(dict.fromkeys(re.findall(r"https://[^\s,;)]+[^\s,;).]", text)))


def cell(text: str) -> str:
    """Text that a cell of a table holds."""
    text = re.sub(r"\s+", " ", text.strip())
    return text.replace("|", "\\|").replace("*", "\\*").replace("](", "] (").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")
