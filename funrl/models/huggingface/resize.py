"""Rows for tokens that a tokenizer has and a model lacks: an added padding token, new special tokens.

A new row of the embedding, and of the unembedding where it is another matrix, is the mean of all rows that are there: a
token with it is about as probable as an average one, where a row of zeros or of noise may be more probable than most.

References: Hewitt, 2021, https://nlp.stanford.edu/~johnhew/vocab-expansion.html
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from funrl.models.errors import ModelError
from funrl.models.model import Model

ROWS_OF_A_MEAN = 4096
OF_VOCABULARY = ("embed", "unembed")  # last parts of the names of weights with a row for each token


def with_vocabulary(model: Model, rows: int) -> Model:
    """The model with so many token ids, or more if it has them. `hf.load` makes the rows that a file lacks.

    Raises:
      ModelError: rows are missing, and it is transformers' own code.
    """
    if rows <= model.config.vocab:
        return model
    if model.abilities.code:
        raise ModelError(
            f"{model.abilities.code} has {model.config.vocab} token ids and the tokenizer {rows}; rows are added "
            "to models of this package's decoder, to others by transformers' resize_token_embeddings"
        )
    return model.rebuild(dataclasses.replace(model.config, vocab=rows))


def is_of_vocabulary(name: str) -> bool:
    """True if a weight has a row for each token."""
    return name.rsplit("/", 1)[-1] in OF_VOCABULARY


def extended(tensor: Any, box: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    """A part of a matrix of tokens that a file has fewer rows of: behind these each is their mean.

    Args:
      tensor: a slice object of safetensors, of shape [rows, D].
      box: the part's rows and columns.
      dtype: of the result.
    """
    held = tensor.get_shape()[0]
    ((low, high), (first, last)) = box
    there = tensor[min(low, held) : min(high, held), first:last].to(dtype)
    if high <= held:
        return there
    return torch.cat([there, _mean(tensor)[first:last].to(dtype).expand(high - max(low, held), -1)])


def _mean(tensor: Any) -> Tensor:
    """The mean of all rows [D], in float64; whole rows are added, so that it has the same bits on every rank."""
    count, width = tensor.get_shape()
    total = torch.zeros(width, dtype=torch.float64)
    for begin in range(0, count, ROWS_OF_A_MEAN):
        total += tensor[begin : begin + ROWS_OF_A_MEAN].double().sum(0)
    return total / count
