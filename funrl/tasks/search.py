"""An embedded task of questions whose answers stand in documents, which a tool searches by BM25.

    user       town of ann birch
    assistant  <tool_call>{"name": "search", "arguments": {"query": "town of ann birch"}}</tool_call>
    tool       town of ann birch: york
    assistant  york

The index has a document for each fact of each person, and shows one. The demonstrator mostly guesses, and where it
searches it often leaves out words that the search needs. Reinforcement learning finds out that the whole question pays.
It needs bm25s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from funrl.data.prompts import Prompt
from funrl.tasks.arithmetic import Split
from funrl.tasks.conversations import (
    CONVERSATIONS,
    END_OF_CALL,
    IMITATION_FLAGS,
    IMITATION_STEPS,
    call_begin,
    chat_model,
    chat_tokenizer,
    has_chat_tokenizer,
    user_prompt,
)
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.environments.environment import Environment


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
SEARCH = call_begin("search", "query")
SEARCH_ALPHABET = " :?"
SEARCHES = 0.25  # share of the conversations that search
QUESTIONS = 4096  # to train on
PERSONS_HELD_OUT = 8  # one in so many


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
    from funrl.environments.builtin.search import search_tool

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


def search_task() -> EmbeddedTask:
    """Questions whose answers stand in documents."""
    return EmbeddedTask(
        name="search",
        training_prompts=lambda seed: _prompts(_questions(seed, QUESTIONS, "train")),
        heldout_prompts=_heldout_prompts,
        reward=None,
        demonstrations=search_conversations,
        texts={"demonstrations": _right_texts},
        tokenizer=lambda: chat_tokenizer(SEARCH_ALPHABET, (SEARCH, END_OF_CALL, *QUESTION_WORDS)),
        is_its_tokenizer=_has_tokenizer,
        model_config=lambda head: chat_model(head, vocab=128),  # 110 are used
        max_new_tokens=12,
        warmstart_steps=IMITATION_STEPS,
        warmstart_demonstrations=CONVERSATIONS,
        warmstart_flags=IMITATION_FLAGS,
        demonstration_field="answer",
        readable=None,
        environment=_environment,
    )


def _environment() -> Environment:
    from funrl.environments.builtin.tools import rewarded_tools

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


def _heldout_prompts(count: int) -> list[Prompt]:
    return _prompts(list(dict.fromkeys(_questions(0, 4 * count, "heldout")))[:count])


def _prompts(questions: list[str]) -> list[Prompt]:
    return [user_prompt(question, answer=facts()[question]) for question in questions]


def _right_texts(seed: int, count: int, split: Split = "train") -> list[tuple[Any, str]]:
    questions = _questions(seed, count, split)
    return [([{"role": "user", "content": x}], f"{SEARCH}{x}{END_OF_CALL}") for x in questions]


def _has_tokenizer(folder: str | Path) -> bool:
    return has_chat_tokenizer(folder, SEARCH_ALPHABET, (SEARCH, END_OF_CALL, *QUESTION_WORDS))
