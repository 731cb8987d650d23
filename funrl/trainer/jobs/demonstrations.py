"""Demonstrations beside the policy's own rows: of each prompt that is drawn, a row of the text that its record brings.

With `Algorithm.example` "demonstrated" a demonstration is in the group of its prompt, and scored above all samples: the
pair of the two is what is learned from. Otherwise each has a group of its own, so that no comparison within groups sees
it, and losses tell it by the field `demonstration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from funrl.algos.advantages.units import episode_fields, units_of
from funrl.algos.core import Algorithm
from funrl.algos.reading import reads
from funrl.batch import Batch, as_dict, kind_of, schema_of, select
from funrl.data.conversations import ChatTemplate, Text, completed_text, continued_texts
from funrl.data.prompt_format import PromptFormat, tools_of
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample, text_batch
from funrl.data.text_lengths import check_lengths
from funrl.mesh.rows import gather_table
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.step_rows import Rows, join_rows, owned_lines_of, rows_of


class DemonstrationReader(NamedTuple):
    """A reader of demonstrations.

    Attributes:
      field: of the prompts' records, that has the text.
      tokenizer: of the policy.
      form: of the prompts.
      most: tokens of a prompt and its demonstration.
      pad: id of the padding token.
      paired: whether each is in the group of its prompt.
    """

    field: str
    tokenizer: Any
    form: PromptFormat
    most: int
    pad: int
    paired: bool

    def beside(self, rows: Rows, examples: Sequence[Example]) -> Rows:
        """The rows, and behind them those of the demonstrations.

        Args:
          rows: of the prompts, in their order.
          examples: the prompts.

        Raises:
          DataError: a prompt and its demonstration have more tokens than the model has positions.
        """
        mesh = rows.mesh
        device = rows.mesh.device
        owner = generating_ranks(len(examples), 1, mesh.size(mesh.row_axes))
        places = np.flatnonzero(owner == int(mesh.index(mesh.row_axes))).tolist()
        own = [self.text(examples[place]) for place in places]
        check_lengths(own, self.most, self.tokenizer)
        # A rank without texts has the same fields of no rows.
        some = text_batch(own or [self.text(examples[0])], self.pad, device=device)
        mine = select(some, slice(len(own)))
        table = gather_table({"length": mine.length}, owner, mesh, mesh.row_axes)
        given = {**as_dict(mine), "length": table["length"], "demonstration": mine.mask}
        rows = scored(rows) if self.paired else rows
        rows = rows.with_fields(demonstration=torch.zeros_like(rows.batch.mask))
        given |= self.table(rows, len(examples))
        if examples[0].owned is not None:
            given |= owned_lines_of([examples[place].owned for place in places], examples[0].owned.values, device)
        for name, x in as_dict(rows.batch).items():
            if name not in given:
                kind = kind_of(rows.batch, name)
                nothing = np.zeros(len(examples) if kind.everywhere else len(own), dtype=np.int64)
                given[name] = kind.blank(kind.lines(x), nothing, mine.tokens.shape[1])
        joined = join_rows([rows, rows_of(Batch(schema_of(rows.batch), **given), owner, mesh)])
        units = units_of(joined.batch)
        return joined if units is None else joined.with_fields(**episode_fields(joined.batch, units))

    def table(self, rows: Rows, count: int) -> dict[str, torch.Tensor]:
        """Groups, scores and episodes of `count` demonstrations."""
        group_P = rows.batch.group.unique_consecutive()
        score_B = rows.batch.get("score")
        assert len(group_P) == count
        columns = {"group": group_P if self.paired else -1 - group_P}
        if score_B is not None and self.paired:
            columns["score"] = (score_B.max() + 1).expand(count)
        episode_B = rows.batch.get("episode")
        if episode_B is not None:  # each demonstration is one of its own
            columns["episode"] = episode_B.max() + 1 + torch.arange(count, device=episode_B.device)
        return columns

    def text(self, example: Example) -> TextExample:
        """A prompt and its demonstration, which alone is trained."""
        given = example.fields[self.field]
        if example.messages is None:
            text = completed_text(example.tokens, self.field, given, self.tokenizer, before=example.text)
            return TextExample((text,), source=example.source)
        template = ChatTemplate(self.tokenizer, tools_of(example.fields.get("tools"), self.form), self.form.arguments)
        (text,) = continued_texts(example.messages, [{"role": "assistant", "content": given}], template)
        prompt = text.trained.index(True)
        tokens = [*example.tokens, *text.tokens[prompt:]]  # the prompt may have been shortened, or have pictures
        trained = [*[False] * len(example.tokens), *text.trained[prompt:]]
        return TextExample((Text(tokens, trained),), source=example.source)


def scored(rows: Rows) -> Rows:
    """The rows with scores of 0 where they have none."""
    if rows.batch.get("score") is not None:
        return rows
    return rows.with_fields(score=torch.zeros(len(rows.owner), device=rows.batch.length.device))


def learns_from_demonstrations(algorithm: Algorithm) -> bool:
    """True if an algorithm learns from demonstrations beside the policy's own rows."""
    return algorithm.example == "demonstrated" or "demonstration" in reads(algorithm).required


def check_demonstrations(prompts: Sequence[Example], field: str, new_tokens_per_step: int | None) -> None:
    """Raise SettingsError where a prompt has no demonstration, or rows are written a part at a time."""
    if new_tokens_per_step is not None:
        raise SettingsError(
            f"--new_tokens_per_step={new_tokens_per_step}: demonstrations stand beside whole completions only; leave "
            "it out"
        )
    for example in prompts:
        text = example.fields.get(field)
        if isinstance(text, str) and text:
            continue
        where = f"{example.source}: " if example.source else ""
        problem = f"it is {text!r}" if field in example.fields else f"the fields are {sorted(example.fields)}"
        raise SettingsError(
            f"{where}the algorithm learns from a demonstration of each prompt, a text in its field {field!r}, but "
            f"{problem}; --fields={field}:COLUMN names the column that has it"
        )
