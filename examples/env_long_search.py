"""A search that is longer than the context: the policy summarises, and goes on from its summary.

    user       CF                   the digits of two keys are wanted
    assistant  +                    the next page
    user       ....C7......H0..     a page: keys with their digits, and nothing else of interest
    assistant  +
    ...
    user       #                    the history is too long: what matters of it?
    assistant  C7
    user       CF#C7                the history from here on
    assistant  +
    ...
    user       !                    there are no more pages
    assistant  =C7F2

    python examples/env_long_search.py SEARCH   # writes its files; docs/example_environments.md has what follows

Each key is on one page. The demonstrator forgets keys where it summarises, and guesses what it has forgotten.
Reinforcement learning finds out that summaries pay where their tokens are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from task_files import CONVERSATIONS, Task, user_prompt, write_files

from funrl.data.prompts import Example, Prompt
from funrl.environments.adapters import example_messages, message_environment
from funrl.environments.compaction import compacting
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Message
from funrl.rollout.policy import Tools
from funrl.tasks.arithmetic import Split

KEYS = "ABCDEFGH"
DIGITS = "01234"
NEXT, LAST, ANSWER, SUMMARY = "+", "!", "=", "#"
SEARCH_SIGNS = f"{KEYS}.{NEXT}{LAST}{ANSWER}{SUMMARY}?"
PAIRS = tuple(key + digit for key in KEYS for digit in DIGITS)  # one token each
WANTED = 2  # keys of a question
PAGES = 8
PLACES = 28  # tokens of a page
SHORT_PLACES = (1, 2, 4, PLACES)  # of the pages that a demonstrator sees: from short ones it is learned sooner
CONTEXT = 256  # positions of the decoder; all pages and replies together have more
SEGMENT = 4  # pages that have been seen when a history of full pages reaches
COMPACT_AT = 128  # tokens
KEPT = 0.6  # share of the known keys that a demonstrator's summary keeps
SEARCHES = 4096  # to train on


class Search(NamedTuple):
    """A question and its pages.

    Attributes:
      wanted: keys.
      pages: each with some keys and their digits.
      answer: the wanted keys with their digits.
    """

    wanted: str
    pages: Sequence[str]
    answer: str

    def prompt(self) -> Prompt:
        """The prompt of its record."""
        return user_prompt(self.wanted, pages=self.pages, answer=self.answer)


class Pages:
    """The other side of an episode: a page for each reply that asks for one; any other reply is the answer."""

    async def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """Ask for the digits of the wanted keys."""
        self._answer = ANSWER + example.fields["answer"]
        self._left = iter(example.fields["pages"])
        return example_messages(example), ()

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Show the next page, or score the answer: 1 if all of its digits are right. A search without one has 0."""
        if message["content"] != NEXT:
            return [], float(message["content"] == self._answer), True
        return [{"role": "user", "content": next(self._left, LAST)}], 0.0, False

    async def close(self) -> None:
        """Nothing is held."""


def long_search() -> Environment:
    """The search, in which a summary takes the place of a history of `COMPACT_AT` tokens."""
    return compacting(message_environment(Pages), at=COMPACT_AT, request=SUMMARY, framing=SUMMARY)


def searches(seed: int, count: int, split: Split = "train") -> list[Search]:
    """Random searches; the two splits have different seeds."""
    rng = np.random.default_rng((seed, 11 if split == "train" else 12))
    return [random_search(rng) for _ in range(count)]


def random_search(rng: np.random.Generator, places: int = PLACES) -> Search:
    """A search of pages of so many tokens."""
    pairs = [key + rng.choice([*DIGITS]) for key in rng.permutation(list(KEYS))]
    pages = np.full((PAGES, places), ".", dtype=object)
    for page, own in zip(pages, np.array_split(pairs, PAGES), strict=True):
        page[rng.choice(places, len(own), replace=False)] = own
    wanted = rng.choice(pairs, WANTED, replace=False)
    return Search("".join(pair[0] for pair in wanted), ["".join(page) for page in pages], "".join(wanted))


def search_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator, each up to a summary or to the answer, in random order."""
    rng = np.random.default_rng((seed, 13))
    random = [random_search(rng, rng.choice(SHORT_PLACES)) for _ in range(1 + count // 3)]
    records = [record for search in random for record in _segments(search, rng)]
    return [{"messages": records[n]} for n in rng.permutation(len(records))[:count]]


def _segments(search: Search, rng: np.random.Generator) -> list[list[dict[str, str]]]:
    """The conversations of one search, one for each summary and one for the answer."""
    wanted = search.wanted
    segments: list[list[dict[str, str]]] = []
    known: dict[str, str] = {}  # pair of each key
    messages = [{"role": "user", "content": wanted}]
    for page in [*search.pages, LAST]:
        messages += [{"role": "assistant", "content": NEXT}, {"role": "user", "content": page}]
        known |= {key: page[page.index(key) :][:2] for key in wanted if key in page}
        if len(messages) == 1 + 2 * SEGMENT:
            known = {key: known[key] for key in wanted if key in known and rng.random() < KEPT}
            summary = "".join(known.values())
            asked = {"role": "user", "content": SUMMARY}
            segments.append([*messages, asked, {"role": "assistant", "content": summary}])
            messages = [{"role": "user", "content": wanted + SUMMARY + summary}]
    answer = "".join(known.get(key, key + rng.choice([*DIGITS])) for key in wanted)
    return [*segments, [*messages, {"role": "assistant", "content": ANSWER + answer}]]


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of long searches."""
    return Task(
        SEARCH_SIGNS,
        PAIRS,
        vocab=64,  # 59 are used
        positions=CONTEXT,
        prompts=[search.prompt() for search in searches(0, SEARCHES)],
        heldout=[search.prompt() for search in searches(0, 256, "heldout")],
        demonstrations=search_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
