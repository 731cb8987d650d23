"""The embedded task: addition of numbers of varied length, by a small decoder from scratch.

The answer is written as one adds on paper, ones first: "27+186=" -> "312", since 27 + 186 = 213. Its demonstrator often
forgets to carry ("27+186=" -> "301"). A model that imitates it is wrong more often than not, but writes a right answer
now and then; that is where reinforcement learning begins.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from funrl.data.prompts import Prompt
from funrl.data.tokenizer import character_tokenizer, character_vocabulary
from funrl.tasks.task import EmbeddedTask

if TYPE_CHECKING:
    from funrl.models.decoder.config import Config

ALPHABET = "0123456789+-*="  # with the two special tokens 16, which every tensor axis up to 16 divides
DIGITS = 3
HEAD_SIZE = 16  # size of the decoder's heads
ERROR = 0.65  # share of the demonstrations without carries
HELD_OUT = 10  # one in so many problems is held out
MAX_NEW_TOKENS = 6
WARMSTART_STEPS = 500
WARMSTART_DEMONSTRATIONS = 25_600
WARMSTART_FLAGS = {"batch_prompts": 256, "lr": 4e-3}
TRAINING_PROMPTS = 4096

Split = Literal["train", "heldout"]


def problems(seed: int, count: int, digits: int = DIGITS, split: Split = "train") -> np.ndarray:
    """Random pairs of summands; every number of digits from 1 to `digits` is equally likely for each.

    Args:
      seed: fixes the problems.
      count: how many; the same pair may come again.
      digits: of the longest summand, 1 to 9.
      split: the two splits share no pair, in either order.

    Returns: [count, 2] int64.
    """
    if not 1 <= digits <= 9:
        raise ValueError(f"digits={digits}: summands have 1 to 9 digits")
    rng = np.random.default_rng(seed)
    chosen = np.empty((0, 2), dtype=np.int64)
    while len(chosen) < count:
        high = 10 ** rng.integers(1, digits + 1, size=(2 * HELD_OUT * count, 2))
        low = np.where(high == 10, 0, high // 10)
        pairs = rng.integers(low, high)
        chosen = np.concatenate([chosen, pairs[is_held_out(pairs) == (split == "heldout")]])
    return chosen[:count]


def is_held_out(pairs: np.ndarray) -> np.ndarray:
    """Mask of the pairs [N, 2] that are never trained on, by a hash of the two summands in either order."""
    low = pairs.min(1).astype(np.uint64)
    high = pairs.max(1).astype(np.uint64)
    # Two rounds of the finaliser of splitmix64; uint64 wraps.
    x = low * np.uint64(0x9E3779B97F4A7C15) + high
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return (x ^ (x >> np.uint64(31))) % np.uint64(HELD_OUT) == 0


def sum_without_carries(pairs: np.ndarray) -> np.ndarray:
    """Sum without carries, as a demonstrator gets it who adds each column on its own: 27 and 186 make 103."""
    total = np.zeros(len(pairs), dtype=np.int64)
    place = 1
    while place <= pairs.max(initial=0):
        total += place * ((pairs // place % 10).sum(1) % 10)
        place *= 10
    return total


def demonstrations(seed: int, count: int, digits: int = DIGITS, error: float = ERROR) -> list[tuple[str, str]]:
    """Training problems as (prompt, completion) pairs by the demonstrator.

    Args:
      seed: fixes the problems and which of them go wrong.
      count: how many.
      digits: of the longest summand.
      error: share of the problems whose carries are forgotten (some have none to forget).
    """
    pairs = problems(seed, count, digits)
    forgets = np.random.default_rng((seed, 1)).random(count) < error
    answers = np.where(forgets, sum_without_carries(pairs), pairs.sum(1))
    return [(prompt_text(pair), answer_text(answer)) for pair, answer in zip(pairs, answers, strict=True)]


def right_answers(seed: int, count: int, split: Split = "train") -> list[tuple[str, str]]:
    """Problems as (prompt, completion) pairs without errors; held-out ones are the same for every seed."""
    if split == "train":
        return demonstrations(seed, count, error=0.0)
    return [(str(prompt.prompt), prompt.fields["answer"]) for prompt in heldout_prompts(count)]


def preferences(seed: int, count: int, split: Split = "train") -> list[tuple[str, str, str]]:
    """Problems with a carry in them as (prompt, chosen, rejected): the sum, and what it is without the carries."""
    pairs = problems(seed, 8 * count, split=split)
    differ = pairs[pairs.sum(1) != sum_without_carries(pairs)][:count]
    rows = zip(differ, differ.sum(1), sum_without_carries(differ), strict=True)
    return [(prompt_text(pair), answer_text(right), answer_text(wrong)) for pair, right, wrong in rows]


def triples(seed: int, count: int, split: Split = "train") -> list[tuple[str, str, str, str]]:
    """The pairs of `preferences`, each with the sum once more, to imitate."""
    return [(prompt, right, wrong, right) for prompt, right, wrong in preferences(seed, count, split)]


def steps(seed: int, count: int, split: Split = "train") -> list[tuple[str, list[str], list[bool]]]:
    """Each answer of `preferences` as (prompt, its digits, whether all of them so far are those of the sum)."""
    pairs = preferences(seed, (count + 1) // 2, split)
    both = [(prompt, answer, right) for prompt, right, wrong in pairs for answer in (right, wrong)][:count]
    return [
        (prompt, list(answer), [answer[:n] == right[:n] for n in range(1, len(answer) + 1)])
        for prompt, answer, right in both
    ]


def ratings(seed: int, count: int, split: Split = "train") -> list[tuple[str, str, bool]]:
    """The two answers of `preferences` one by one, as (prompt, completion, whether it is the sum)."""
    pairs = preferences(seed, (count + 1) // 2, split)
    return [(prompt, answer, answer == right) for prompt, right, wrong in pairs for answer in (right, wrong)][:count]


def reward(prompt: str, completion: str, **fields: Any) -> float:
    """1.0 if the completion is exactly the sum that the prompt asks for, ones first, else 0.0."""
    match = re.fullmatch(r"(\d+)\+(\d+)=", prompt)
    if match is None:
        raise ValueError(f"{prompt!r} is no addition problem such as '27+186='")
    return float(completion == answer_text(int(match[1]) + int(match[2])))


def prompt_text(pair: np.ndarray) -> str:
    """Prompt that asks for the sum of two numbers."""
    return f"{pair[0]}+{pair[1]}="


def answer_text(number: int) -> str:
    """The digits of a number, ones first."""
    return str(number)[::-1]


def in_usual_order(text: str) -> str:
    """A completion with its digits as one reads them, ones last, for people: "301" -> "103"."""
    return text[::-1]


def training_prompts(seed: int, count: int = TRAINING_PROMPTS, digits: int = DIGITS) -> list[Prompt]:
    """Problems to train on, with the field "answer"."""
    return _prompts(problems(seed, count, digits, split="train"))


def heldout_prompts(count: int, digits: int = DIGITS) -> list[Prompt]:
    """At most `count` different problems that no training split contains; the same ones for every seed."""
    pairs = problems(0, 4 * count, digits, split="heldout")
    _, first = np.unique(pairs, axis=0, return_index=True)
    return _prompts(pairs[np.sort(first)][:count])


def tokenizer() -> Any:
    """One token a character."""
    return character_tokenizer(ALPHABET)


def model_config(head: int = HEAD_SIZE, model: str = "arithmetic") -> Config:
    """The small decoder that learns the task.

    Args:
      head: size of a head; keys and values have fewer of a larger size, and as many parameters.
      model: one of `embedded.TASK_NAMES`; "arithmetic_moe" has 8 experts a layer and takes 2 a token, as large
        together as the other's mlp.
    """
    from funrl.models.decoder.config import decoder_config  # here, for flags are read without torch
    from funrl.models.decoder.routing import Experts
    from funrl.models.flat import with_fields

    dense = decoder_config(
        vocab=len(ALPHABET) + 2,
        embed=64,
        layers=2,
        heads=8,
        kv_heads=64 // head,
        head=head,
        mlp=128,
        rope_theta=100.0,
        max_positions=64,
        eos=(1,),
        pad=0,
    )
    if model == "arithmetic":
        return dense
    return with_fields(dense, family="mixtral", mlp=64, experts=Experts(count=8, per_token=2, mlp=64))


def arithmetic_task(model: str = "arithmetic") -> EmbeddedTask:
    """The task, learned by one of the models of `embedded.TASK_NAMES`."""
    return EmbeddedTask(
        name="arithmetic",
        training_prompts=training_prompts,
        heldout_prompts=heldout_prompts,
        reward=reward,
        demonstrations=lambda seed, count: [
            {"prompt": prompt, "completion": completion} for prompt, completion in demonstrations(seed, count)
        ],
        texts={
            "demonstrations": right_answers,
            "preferences": preferences,
            "triples": triples,
            "ratings": ratings,
            "steps": steps,
        },
        tokenizer=tokenizer,
        tokens=frozenset(character_vocabulary(ALPHABET)),
        model_config=lambda head: model_config(max(head, HEAD_SIZE), model),
        max_new_tokens=MAX_NEW_TOKENS,
        warmstart_steps=WARMSTART_STEPS,
        warmstart_demonstrations=WARMSTART_DEMONSTRATIONS,
        warmstart_flags=WARMSTART_FLAGS,
        readable=in_usual_order,
    )


def _prompts(pairs: np.ndarray) -> list[Prompt]:
    return [Prompt(prompt_text(pair), {"answer": answer_text(pair.sum())}) for pair in pairs]
