"""Functions for --teacher_context and --reward, which ranks load from this file."""

import torch


def easier(prompt, completions, scores, index, answer, **fields):
    """The sum as a problem without carries, for every other completion of a group."""
    return f"0+{answer[::-1]}=" if index % 2 == 0 else None


def numbered(prompt, completions, scores, index, **fields):
    return 7


def failing(prompt, completions, scores, index, **fields):
    raise KeyError("demonstration")


def digits(prompt, completion, **fields):
    return sum(map(completion.count, "12345")) / 4 - 0.25 * completion.count("+")


def always(prompt, completion, **fields):
    return 1.0


def failing_on_one_rank(prompt, completions, scores, index, **fields):
    if torch.distributed.get_rank() == 1:
        raise KeyError("demonstration")
