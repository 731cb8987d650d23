"""Trained tokens that TRL and verl gave, in peers_trained_tokens.json, which tools/peers_trained_tokens.py writes."""

import json
from pathlib import Path

RECORDS = json.loads((Path(__file__).parent / "peers_trained_tokens.json").read_text())["records"]
DATE = ('strftime_now("%Y-%m-%d")', '"2026-01-31"')  # gpt-oss's template had the second for the first


def tokens_of(text, tokenizer):
    """(tokens, trained) of a text of the file."""
    ids = text.get("tokens") or [tokenizer.encode(words, add_special_tokens=False) for _, words in text["spans"]]
    flags = [flag == 1 for (flag, _), span in zip(text["spans"], ids, strict=True) for _ in span]
    return [token for span in ids for token in span], flags


def peer_results(name):
    """(library, way, result) of each result for a record; a result has "texts", or an "error", or is "every token"."""
    entry = RECORDS[name]
    return [
        (library, way, result)
        for library in ("trl", "verl")
        for ways, result in entry.get(library, {}).items()
        for way in ways.split(", ")
    ]
