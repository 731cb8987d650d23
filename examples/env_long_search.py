"""A search that is longer than the context: the policy summarises, and goes on from its summary.

    user       :                    which letters are on the pages?
    assistant  +                    the next page
    user       .......C......       most pages have none
    assistant  +
    ...
    user       #                    the history is too long: what matters of it?
    assistant  C
    user       :#C                  the history from here on
    assistant  +
    ...
    user       !                    there are no more pages
    assistant  =CF

    python examples/env_long_search.py SEARCH   # writes its files; docs/example_environments.md has what follows

Two pages have a letter each. The demonstrator forgets letters where it summarises, and guesses those it has forgotten.
Reinforcement learning finds out that summaries pay where their tokens are trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from task_files import CONVERSATIONS, Task, user_prompt, write_files

from funrl.data.prompts import Example, Prompt
from funrl.environments.adapters import example_messages, message_environment
from funrl.environments.compaction import compacting
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Message
from funrl.rollout.policy import Tools
from funrl.tasks.arithmetic import Split

LETTERS = "ABCDEF"
ASK, NEXT, LAST, ANSWER, SUMMARY, NOTHING = ":+!=#."
SEARCH_SIGNS = f"{LETTERS}{ASK}{NEXT}{LAST}{ANSWER}{SUMMARY}{NOTHING}?"
WANTED = 2  # letters of a search
PAGES = 8
PLACES = 28  # tokens of a page
SHORT_PLACES = (1, 1, 2, 4, PLACES)  # of the pages that a demonstrator sees: from short ones it is learned sooner
CONTEXT = 256  # positions of the decoder; all pages and replies together have more
SEGMENT = 4  # pages that have been seen when a history of full pages reaches
COMPACT_AT = 128  # tokens
KEPT = 0.6  # share of the known letters that a demonstrator's summary keeps
SEARCHES = 4096  # to train on


class Pages:
    """The other side of an episode: a page for each reply that asks for one; any other reply is the answer."""

    async def reset(self, example: Example, seed: int) -> tuple[Sequence[Message], Tools]:
        """Ask for the letters."""
        self._pages = example.fields["pages"]
        self._left = iter(self._pages)
        return example_messages(example), ()

    async def step(self, message: Message) -> tuple[Sequence[Message], float | None, bool]:
        """Show the next page, or score the answer: 1 if it has the letters in any order. A search without one has 0."""
        if message["content"] != NEXT:
            letters = "".join(self._pages).replace(NOTHING, "")
            return [], float(sorted(message["content"]) == sorted(ANSWER + letters)), True
        return [{"role": "user", "content": next(self._left, LAST)}], 0.0, False

    async def close(self) -> None:
        """Nothing is held."""


def long_search() -> Environment:
    """The search, in which a summary takes the place of a history of `COMPACT_AT` tokens."""
    return compacting(message_environment(Pages), at=COMPACT_AT, request=SUMMARY, framing=SUMMARY)


def searches(seed: int, count: int, split: Split = "train") -> list[Prompt]:
    """Random searches; the two splits have different seeds."""
    rng = np.random.default_rng((seed, 11 if split == "train" else 12))
    return [user_prompt(ASK, pages=random_pages(rng)) for _ in range(count)]


def random_pages(rng: np.random.Generator, places: int = PLACES) -> list[str]:
    """The pages of a search, each of so many tokens."""
    pages = np.full((PAGES, places), NOTHING)
    for page, letter in zip(rng.permutation(PAGES), rng.permutation([*LETTERS])[:WANTED], strict=False):
        pages[page, rng.integers(places)] = letter
    return ["".join(page) for page in pages]


def search_conversations(seed: int, count: int) -> list[dict[str, Any]]:
    """Conversations of a demonstrator, each up to a summary or to the answer, in random order."""
    rng = np.random.default_rng((seed, 13))
    random = [random_pages(rng, rng.choice(SHORT_PLACES)) for _ in range(1 + count // 3)]
    records = [record for pages in random for record in _segments(pages, rng)]
    return [{"messages": records[n]} for n in rng.permutation(len(records))[:count]]


def _segments(pages: Sequence[str], rng: np.random.Generator) -> list[list[dict[str, str]]]:
    """The conversations of one search, one for each summary and one for the answer."""
    segments: list[list[dict[str, str]]] = []
    known = ""
    messages = [{"role": "user", "content": ASK}]
    for page in [*pages, LAST]:
        messages += [{"role": "assistant", "content": NEXT}, {"role": "user", "content": page}]
        known += page.strip(NOTHING + LAST)
        if len(messages) == 1 + 2 * SEGMENT:
            known = "".join(letter for letter in known if rng.random() < KEPT)
            segments.append([*messages, {"role": "user", "content": SUMMARY}, {"role": "assistant", "content": known}])
            messages = [{"role": "user", "content": ASK + SUMMARY + known}]
    guesses = "".join(rng.permutation([*LETTERS])[: WANTED - len(known)])
    return [*segments, [*messages, {"role": "assistant", "content": ANSWER + known + guesses}]]


def task(conversations: int = CONVERSATIONS) -> Task:
    """The task of long searches."""
    return Task(
        SEARCH_SIGNS,
        (),
        vocab=32,  # 18 are used
        positions=CONTEXT,
        prompts=searches(0, SEARCHES),
        heldout=searches(0, 256, "heldout"),
        demonstrations=search_conversations(0, conversations),
    )


if __name__ == "__main__":
    write_files(task(), sys.argv[1])
