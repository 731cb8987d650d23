"""Questions whose answers stand in documents: a tool searches a local index of them, by BM25 of the library bm25s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from funrl.data.records import read_records
from funrl.environments.builtin.tools import rewarded_tools
from funrl.environments.environment import Environment
from funrl.loading import LoadError
from funrl.rewards.call import Reward

NOTHING = "no document has a word of the query"


def search_documents(
    documents: str | Sequence[str],
    reward: str | Reward = "exact",
    results: int = 3,
    characters: int = 1000,
    system: str | None = None,
) -> Environment:
    """An environment in which the policy may search documents before it answers.

    Args:
      documents: texts; or a file of records with a field "text", and perhaps a "title", in the forms of --prompts.
      reward: of the answer: a reward function, or what --reward names: "exact", "math", "FILE.py:function".
      results: documents that a search shows at most.
      characters: of a document that it shows.
      system: a system message, before the messages of the example.

    Raises:
      ValueError: there are no documents, or a number is too small.
      LoadError: bm25s is not installed, or the reward cannot be loaded.
    """
    texts = read_documents(documents) if isinstance(documents, str) else list(documents)
    if results < 1 or characters < 1:
        raise ValueError(f"results={results}, characters={characters}: a search shows at least 1")
    return rewarded_tools([search_tool(texts, results, characters)], reward, system)


def search_tool(texts: Sequence[str], results: int, characters: int = 1000) -> Callable[[str], str]:
    """A tool that searches texts; equally good ones are in their order.

    >>> find = search_tool(["the sun is a star", "the moon is a rock", "a cat"], results=2)
    >>> find("what is a moon")
    'the moon is a rock\\nthe sun is a star'

    Raises:
      ValueError: there are no texts.
      LoadError: bm25s is not installed.
    """
    try:
        bm25s = _import_bm25s()
    except ImportError as error:
        raise LoadError(f"search needs bm25s ({error}): pip install 'funrl[environments]'") from error

    if not texts:
        raise ValueError("a search needs documents; there are none")
    index = bm25s.BM25(backend="numpy")
    index.index(bm25s.tokenize(list(texts), stopwords=[], show_progress=False), show_progress=False)

    def search(query: str) -> str:
        """Search the documents.

        Args:
            query: words of the documents.
        """
        words: Any = bm25s.tokenize([query], stopwords=[], return_ids=False, show_progress=False)[0]
        known = [word for word in words if word in index.vocab_dict]
        if not known:
            return NOTHING
        scores = index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:results]
        return "\n".join(str(texts[n])[:characters] for n in best if scores[n] > 0)

    return search


def _import_bm25s() -> Any:
    """Import bm25s without JAX, which it would start: threads that make forks unsafe, and most of a GPU's memory."""
    modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
    jax = {"jax": modules["jax"]} if "jax" in modules else {}
    modules["jax"] = None  # an import raises ImportError
    try:
        import bm25s  # type: ignore[import-not-found]
    finally:
        del modules["jax"]
        modules.update(jax)
    return bm25s


def read_documents(path: str) -> list[str]:
    """Texts of a file of documents, each after its title if it has one.

    Raises:
      ValueError: the file cannot be read, or a record has no text.
    """
    if not Path(path).exists():
        raise ValueError(f"documents={path}: no such file")
    texts = []
    for where, record in read_records(path):
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f"documents={path}: {where}: a document has a text in its field 'text'")
        title = record.get("title")
        texts.append(record["text"] if title is None else f"{title}\n{record['text']}")
    return texts
