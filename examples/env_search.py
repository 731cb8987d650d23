"""Questions whose answers stand in documents: a tool searches a local index of them, by BM25 of the library bm25s.

`search_documents` is for any model and documents. `facts_of_persons` is a task for a small decoder:

    user       town of ann birch
    assistant  <tool_call>{"name": "search", "arguments": {"query": "town of ann birch"}}</tool_call>
    tool       town of ann birch: york
    assistant  york

    python examples/env_search.py SEARCH   # writes its files; docs/example_environments.md has what follows

The index has a document for each fact of each person, and shows one. The demonstrator mostly guesses, and where it
searches it often leaves out words that the search needs. Reinforcement learning finds out that the whole question pays.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from task_files import CONVERSATIONS, Task, write_files

from funrl.data.prompts import Prompt
from funrl.data.records import read_records
from funrl.environments.builtin.load import rewarded_tools
from funrl.environments.environment import Environment
from funrl.loading import LoadError
from funrl.rewards.call import Reward
from funrl.tasks.arithmetic import Split
from funrl.tasks.calculator import END_OF_CALL

NOTHING = "no document has a word of the query"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words("ann bob cid dan eva fay gus hal ivy jan kay lee mia ned ola pam rex ron sue tom uma vic wes zoe")
LAST_NAMES = _words(
    "birch cedar dogwood elm fir ginkgo hazel juniper kapok larch maple nutmeg olive pine quince rowan spruce teak "
    "umbrella viburnum willow yew zelkova alder"
)
FACTS = {
    "town": _words("accra bonn cairo delhi essen fargo genoa hanoi izmir jakarta kyoto lagos milan nice osaka york"),
    "pet": _words("bear cat duck eel frog goat hare iguana koala llama mouse newt owl pig rat seal"),
    "job": _words(
        "actor baker clerk driver editor farmer guard hunter judge king lawyer mayor nurse pilot smith tailor"
    ),
}
QUESTION_WORDS = (*FIRST_NAMES, *LAST_NAMES, *FACTS, *(value for values in FACTS.values() for value in values), "of")
SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "'  # one token, as is the end of a call
SEARCH_ALPHABET = " :?"
SEARCHES = 0.25  # share of the conversations that search
QUESTIONS = 4096  # to train on
PERSONS_HELD_OUT = 8  # one in so many


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


@functools.cache
def facts() -> dict[str, str]:
    """The value of each question, such as "town of ann birch"."""
    rng = np.random.default_rng(8)
    questions = [f"{fact} of {first} {last}" for first in FIRST_NAMES for last in LAST_NAMES for fact in FACTS]
    choices = rng.integers(16, size=len(questions)).tolist()
    values = {q: FACTS[q.partition(" ")[0]][choice] for q, choice in zip(questions, choices, strict=True)}
    return {questions[n]: values[questions[n]] for n in rng.permutation(len(questions))}


@functools.cache
def find_fact() -> Callable[[str], str]:
    """The search tool of the task. Raises: LoadError, bm25s is not installed."""
    return search_tool([f"{question}: {value}" for question, value in facts().items()], results=1)


def search_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator that searches in a share `SEARCHES` of them and guesses otherwise."""
    rng = np.random.default_rng((seed, 9))
    records = []
    for question in _questions(seed, count, "train"):
        messages = [{"role": "user", "content": question}]
        if rng.random() < SEARCHES:
            fact, _, first, last = question.split()
            query = (question, f"{first} {last}", f"{fact} of {first}")[rng.integers(3)]
            document = find_fact()(query)
            messages.append({"role": "assistant", "content": f"{SEARCH}{query}{END_OF_CALL}"})
            messages.append({"role": "tool", "content": document})
            answer = document.rpartition(" ")[2]
        else:
            answer = FACTS[question.partition(" ")[0]][rng.integers(16)]
        messages.append({"role": "assistant", "content": answer})
        records.append({"messages": messages})
    return records


def facts_of_persons() -> Environment:
    """Questions for facts of persons, with a search."""
    return rewarded_tools([find_fact()], "exact")


def _questions(seed: int, count: int, split: Split) -> list[str]:
    """Random questions; the two splits share no person."""
    rng = np.random.default_rng((seed, 10))
    persons = rng.integers(len(FIRST_NAMES), size=(4 * PERSONS_HELD_OUT * count, 2))
    held = (persons.sum(1) % PERSONS_HELD_OUT == 0) == (split == "heldout")
    chosen = persons[held][:count].tolist()
    asked = rng.integers(len(FACTS), size=count).tolist()
    names = list(FACTS)
    return [
        f"{names[fact]} of {FIRST_NAMES[first]} {LAST_NAMES[last]}"
        for (first, last), fact in zip(chosen, asked, strict=True)
    ]


def _prompts(questions: list[str]) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": question}], {"answer": facts()[question]}) for question in questions]


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of facts of persons."""
    return Task(
        SEARCH_ALPHABET,
        (SEARCH, END_OF_CALL, *QUESTION_WORDS),
        vocab=128,  # 110 are used
        positions=64,
        prompts=_prompts(_questions(0, QUESTIONS, "train")),
        heldout=_prompts(list(dict.fromkeys(_questions(0, 1024, "heldout")))),
        demonstrations=search_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
