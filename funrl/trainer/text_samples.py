"""Samples of a model that learns from given texts: how it continues held-out prompts, by the trainer's forward pass.

No engine is made for them: every rank computes the same few rows, a token a pass, with the weights where they are. What
it costs is a forward pass a token, so prompts, tokens and rows are few.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import TOKEN_INT, Batch
from funrl.data.supervised import TextExample
from funrl.mesh import collectives
from funrl.models import Placed
from funrl.trainer.generation import Example

CONTINUED = 8  # prompts that are continued
TOKENS = 64  # of a continuation
LONGEST_PROMPT = 1024  # tokens; those of longer ones are left out


def held_out_prompts(examples: Sequence[TextExample], tokenizer: Any, most: int) -> list[Example]:
    """The beginnings of the first held-out texts, up to what is trained.

    Args:
      most: tokens of a prompt.
    """
    found = []
    for one in (examples[i] for i in range(min(len(examples), CONTINUED))):
        tokens, trained = one.texts[0]
        prompt = tokens[: trained.index(True)] if True in trained else []
        if 0 < len(prompt) <= min(most, LONGEST_PROMPT):
            found.append(Example(prompt, tokenizer.decode(prompt, skip_special_tokens=True), {}, one.source))
    return found


@torch.no_grad()
def greedy_continuations(
    placed: Placed, params: trees.Tree, prompts: Sequence[Sequence[int]], count: int, stop: Collection[int], pad: int
) -> list[list[int]]:
    """The most probable token after each prompt, and so on. Every rank calls it and gets the same rows.

    Args:
      prompts: token ids, at least one each.
      count: tokens at most.
      stop: tokens that end a row; they are left out.
      pad: id of the padding token.
    """
    device, everyone = placed.mesh.device, tuple(placed.mesh.sizes)
    placed = dataclasses.replace(placed, layer=placed.model.layer)  # rows of this form are not worth a compilation
    length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    multiple = math.lcm(8, placed.multiple)
    width = -(-(int(length_B.max()) + count) // multiple) * multiple
    tokens_BT = torch.full((len(prompts), width), pad, dtype=TOKEN_INT, device=device)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = torch.tensor(prompt, dtype=TOKEN_INT)
    rows_B, at_B = torch.arange(len(prompts), device=device), length_B.clone()
    ended_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stops = torch.tensor(sorted(stop), dtype=TOKEN_INT, device=device)
    for _ in range(count):
        mask_BT = torch.zeros_like(tokens_BT, dtype=torch.bool)
        mask_BT[rows_B, at_B] = True
        best_1N, _ = placed.topk(params, _end_to_end(tokens_BT, mask_BT), 1)
        next_B = best_1N.view(tokens_BT.shape)[rows_B, at_B].to(TOKEN_INT)
        tokens_BT[rows_B, at_B] = next_B
        ended_B |= torch.isin(next_B, stops)
        at_B = at_B + 1
        if not collectives.pmax((~ended_B).any().double(), placed.mesh, everyone).item():
            break
    found = []
    for row, (begin, end) in enumerate(zip(length_B.tolist(), at_B.tolist(), strict=True)):
        written = tokens_BT[row, begin:end].tolist()
        first = next((i for i, token in enumerate(written) if token in stop), len(written))
        found.append(written[:first])
    return found


def _end_to_end(tokens_BT: Tensor, mask_BT: Tensor) -> Batch:
    """Rows as sequences of one packed row [1, B T], each with its padding behind it, which it does not see."""
    (B, T), device = tokens_BT.shape, tokens_BT.device
    positions_BT = torch.arange(T, device=device).expand(B, T)
    segments_BT = torch.arange(1, B + 1, device=device)[:, None].expand(B, T)
    fields = {"tokens": tokens_BT, "mask": mask_BT, "positions": positions_BT, "segments": segments_BT}
    offsets = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=device)
    return Batch(**{name: x.reshape(1, B * T) for name, x in fields.items()}, offsets=offsets)
