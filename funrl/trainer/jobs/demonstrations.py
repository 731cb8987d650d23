"""Given texts as rows of a step, and demonstrations beside the policy's own rows.

A demonstration of each prompt that is drawn is a row of the text that its record brings.

With `Algorithm.example` "demonstrated" a demonstration is in the group of its prompt, and scored above all samples: the
pair of the two is what is learned from. Otherwise each has a group of its own, so that no comparison within groups sees
it, and losses tell it by the field `demonstration`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from funrl.algos.advantages.units import episode_fields, episode_units, units_of
from funrl.algos.core import Algorithm
from funrl.algos.objectives import OBJECTIVE
from funrl.algos.reading import reads
from funrl.batch import Batch, as_dict, kind_of, schema_of, select
from funrl.data.conversations import ChatTemplate, Text, completed_text, continued_texts
from funrl.data.prompt_format import PromptFormat, tools_of
from funrl.data.prompts import Example
from funrl.data.supervised import TextExample, rows_of_conversation, text_batch
from funrl.data.text_lengths import check_lengths, examples_ahead, mismatched
from funrl.data.tokenizer import TextTokenizer
from funrl.fields import DATA_SOURCE
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.trainer.jobs.job import TextJob
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.steps.step_rows import Rows, join_rows, owned_lines_of, rows_of, with_owned


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
    tokenizer: TextTokenizer
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
        group_P, count_P = rows.batch.group.unique_consecutive(return_counts=True)
        score_B = rows.batch.get("score")
        assert len(group_P) == count
        columns = {"group": group_P if self.paired else -1 - group_P}
        first_P = count_P.cumsum(0) - count_P
        columns |= {name: x[first_P] for name, x in as_dict(rows.batch).items() if name in (OBJECTIVE, DATA_SOURCE)}
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
        raise SettingsError("--new_tokens_per_step: demonstrations need whole completions; leave it out")
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


def text_rows(job: TextJob, mesh: Mesh, examples: Sequence[Any]) -> Rows:
    """Given texts as rows; each rank reads its own part, and no other.

    An example is a row. A conversation of several texts has a row for each, which are an episode: what is counted by
    sequence is counted by conversation.

    Where the algorithm reads `mismatched`, as many rows follow, each with the prompt of an example and the completion
    of the next one.

    Raises:
      DataError: a text has more tokens than it may, or cannot be read.
    """
    most = job.task.most or job.model.config.max_positions
    count = len(examples)
    further = count if "mismatched" in reads(job.algorithm).required else 0
    owner = generating_ranks(count + further, 1, mesh.size(mesh.row_axes))
    places = np.flatnonzero(owner == int(mesh.index(mesh.row_axes))).tolist()
    own = [*examples_ahead(examples, [i for i in places if i < count])]
    check_lengths(own, most, job.tokenizer)
    own += [mismatched(examples[i - count], examples[(i + 1) % count], most) for i in places if i >= count]
    counts = np.ones(count + further, dtype=np.int64)
    some = own or [examples[0]]  # a rank without texts has the same fields of no rows
    if job.task.kind == "demonstrations":
        counts = _row_counts(own, places, count, mesh)
        own = [row for example in own for row in rows_of_conversation(example)]
        some = own or rows_of_conversation(examples[0])
    owner = owner.repeat(counts)
    at_end = job.kind_of_role(job.main_role).scores_completions
    some = text_batch(some, job.pad, at_end, mesh.device, job.task.kind == "steps")
    mine = select(some, slice(len(own)))
    margin = mine.get("margin")
    mine = mine if margin is None else mine._replace(margin=margin.to(job.master))
    if further:
        mine = mine._replace(mismatched=torch.arange(count + further, device=mesh.device) >= count)
    table = gather_table({"length": mine.length}, owner, mesh, mesh.row_axes)
    rows = rows_of(mine._replace(length=table["length"]), owner, mesh)
    if (counts > 1).any():
        rows = _as_episodes(rows, counts)
    owned = job.model.owned
    if owned is None:
        return rows
    lines = [example.owned[0] if example.owned else None for example in own]
    for example, value in zip(own, lines, strict=True):
        owned.check([token for text in example.texts for token in text.tokens], value)
    return with_owned(rows, lines, owned.none)


def _row_counts(own: Sequence[TextExample], places: Sequence[int], count: int, mesh: Mesh) -> np.ndarray:
    """[count] rows of each example, the same on every rank, in one collective.

    Args:
      own: examples of this rank.
      places: their numbers.
      count: examples of all ranks.
    """
    counts = torch.zeros(count, dtype=torch.float64)
    counts[places] = torch.tensor([len(example.texts) for example in own], dtype=torch.float64)
    return collectives.psum(counts.to(mesh.device), mesh, mesh.row_axes).cpu().numpy().astype(np.int64)


def _as_episodes(rows: Rows, counts: np.ndarray) -> Rows:
    """Rows whose conversations are episodes of one agent."""
    device = rows.batch.length.device
    episode_B = torch.from_numpy(np.arange(len(counts)).repeat(counts)).to(device)
    rows = rows.with_fields(episode=episode_B, agent=torch.zeros_like(episode_B))
    units = episode_units(rows.batch)
    return rows.with_fields(**episode_fields(rows.batch, units))
