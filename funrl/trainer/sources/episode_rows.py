"""From prompts to episodes, and from episodes to rows on the ranks that ran them.

A row is a path from the root to a leaf, with as many sampled spans as it has turns. A trajectory that another one goes
on from is a part of that row and no row of its own. A node that several rows share is trained in the first of them, and
is context in the others: each sampled node is trained exactly once. Rows are numbered in one order on every mesh, by
episode and then as the environment lists its trajectories.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.algos.advantages.units import by_unit, episode_fields, episode_units, units_of
from funrl.algos.terms import Filter
from funrl.batch import TOKEN_INT, Batch
from funrl.data.processors.form import PictureForm
from funrl.data.prompts import Example
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.environments.logged import LoggedEpisode
from funrl.environments.row_paths import RowPath, paths_of
from funrl.environments.run import EpisodeLimits, EpisodeRun, PolicySetup
from funrl.kinds import joined_lines
from funrl.mesh import collectives
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.rollout.episodes import Episode, Node
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve.endpoint import serve_agent
from funrl.trainer.sources.episode_totals import (
    EpisodeTable,
    NumberedEpisodes,
    numbers_by_source,
    part_totals,
    table_totals,
    totals_of_rank,
)
from funrl.trainer.sources.generation import (
    RewardedEngine,
    Rollout,
    RowForm,
    Span,
    first_problem,
    share_table,
    token_fields,
    with_kept,
    with_source_numbers,
)
from funrl.trainer.sources.pending_rewards import add_totals
from funrl.trainer.steps.step_rows import Rows, on_cpu, rows_of, take, with_owned

POLICY, TOOL, OTHERS, SUMMARY = 1, 2, 3, 4  # values of `author`


class EpisodeSetup(NamedTuple):
    """Setup of the episodes of a run and of their rows.

    Attributes:
      environment: makes the episodes.
      chat: renders messages and reads replies; None: the environment talks in token ids.
      limits: of an episode.
      form: of its rows; its dtype is that of the engine's log-probabilities.
      models: agent -> the model that answers for it, as `Request.model`; None: all agents are the policy.
      log: receives this replica's episodes; None: they are not kept.
      source_of: name of the source of a prompt, whose episodes have metrics of their own; None: there is one source.
    """

    environment: Environment
    chat: TemplateChat | None = None
    limits: EpisodeLimits = EpisodeLimits()
    form: RowForm = RowForm()
    models: Mapping[str, str] | None = None
    log: list[LoggedEpisode] | None = None
    source_of: Callable[[Example], str] | None = None


class Transcript(NamedTuple):
    """Everything after the prompt of an episode's first trajectory, as a completion of its number.

    Where others forked from it, it is the continued one, which repeats everything since the last summary of its
    history; what ended with summaries is before it.

    Attributes:
      number: of the episode.
      tokens: [T] int64.
      written: token ids without the one that ended the last turn.
      episode, pictures: the episode itself, and as in `RowForm`.
    """

    number: int
    tokens: Tensor
    written: list[int]
    episode: Episode
    pictures: PictureForm | None = None


def rollout_of_episodes(
    setup: EpisodeSetup, engine: RewardedEngine, run: EpisodeRun, examples: Sequence[Example], sampling: Sampling
) -> tuple[Rollout, Rows]:
    """The episodes of some prompts as a rollout, and their rows. Collective.

    Args:
      setup: how episodes were made.
      engine: the engine on its mesh.
      run: of this rank; the numbers of the episodes of prompt p begin at `p * sampling.samples`.
      examples: prompts of all ranks.
      sampling: of the policy's replies.

    Returns: a rollout, whose completions are transcripts and whose score is that of the first agent that is trained;
      and the rows that can be trained on, without those of unscored agents and of groups in which an episode failed.
    """
    if engine.proof is not None:
        engine.proof.settle()
    episodes, costs = run
    mesh = engine.mesh
    count = len(examples) * sampling.samples
    form = setup.form._replace(dtype=engine.dtype, raw=setup.form.raw or (sampling.reshaped and not setup.form.kept))
    rows, table = rows_of_episodes(episodes, count, sampling.samples, form, mesh)
    rows = rows._replace(batch=with_source_numbers(rows.batch, examples, form))
    transcripts = [transcript_of(number, episode, form) for number, episode in episodes]
    written = {"length": [len(transcript.tokens) for transcript in transcripts]}
    _, lengths = share_table([transcript.number for transcript in transcripts], written, count, mesh)
    reward_E = table.reward[:, 0]
    sources = numbers_by_source(setup.source_of, examples, sampling.samples)
    counted = episodes if mesh.index("tensor") == 0 else []  # all ranks of a replica have its episodes
    own_parts = part_totals([episode for _, episode in counted])
    own_totals = totals_of_rank(counted, costs, setup.form.frozen, sources)
    parts, everywhere = zip(*collectives.gather_objects((own_parts, own_totals), mesh), strict=True)
    if table.failed.any():
        problem = next((episode.problem for _, episode in episodes if episode.problem), "").partition("\n")[0]
        engine.note(f"{int(table.failed.sum())} of {count} episodes failed, such as: {first_problem(problem, mesh)}")
    done = Rollout(
        transcripts,
        lengths=lengths["length"].long(),
        finished=table.finished,
        score=reward_E.nan_to_num(nan=0.0),
        scores=reward_E[:, None],
        owner=table.owner,
        mesh=mesh,
        dtype=engine.dtype,
        failed=reward_E.isnan() | table.failed,
        entries=add_totals(*parts),
        episodes={**table_totals(table, sources), **add_totals(*everywhere)},
    )
    return done, scored_rows(rows, table, sampling.samples)


def outcome_rows(done: Rollout, rows: Rows) -> Rows:
    """Scores of completions by their numbers: `rows`, where a completion is a row; else one row for each episode."""
    if rows.examples is None:
        return rows
    scores = {"score": done.score.to(done.dtype), "scores": done.scores.to(done.dtype)}
    return Rows(Batch(**scores), done.owner, done.mesh)


def rows_of_samples(rows: Rows, samples: np.ndarray) -> np.ndarray:
    """Find the rows of some samples of a rollout: their numbers, ascending."""
    episode_B = rows.examples
    return samples if episode_B is None else np.flatnonzero(np.isin(episode_B, samples))


def kept_samples(rows: Rows, filter: Filter | None, count: int) -> np.ndarray:
    """[count] bool, completions that a filter keeps, or episodes with rows that it keeps for one of their agents.

    Args:
      rows: of them.
      filter: sees one number for each completion, or agent of an episode, on the CPU; None: it keeps all.
      count: of the completions or episodes.
    """
    if filter is None and rows.examples is None:
        return np.ones(count, dtype=bool)
    batch = on_cpu(rows).batch
    units = units_of(batch)
    kept = np.zeros(count, dtype=bool)
    sample_U = np.arange(count) if units is None else batch.episode[units.first].numpy()
    if filter is not None and len(sample_U):
        sample_U = sample_U[filter(batch if units is None else by_unit(batch, units)).cpu().numpy()]
    kept[sample_U] = True
    return kept


def policy_setup(setup: EpisodeSetup, sampling: Sampling) -> PolicySetup:
    """The policy of episodes with some sampling parameters."""
    return PolicySetup(sampling, setup.chat, setup.models, serve_agent)


def transcript_of(number: int, episode: Episode, form: RowForm) -> Transcript:
    """That of the first trained trajectory. An episode that failed has none, and an empty transcript."""
    trained = [end for end in episode.ends[episode.forked :] if end.agent not in form.frozen]
    if not trained:
        return Transcript(number, torch.zeros(0, dtype=torch.int64), [], episode, form.pictures)
    opening = next(end for end in episode.ends if end.agent == trained[0].agent).leaf.path()[0].tokens
    forked = [end for end in episode.ends[: episode.forked] if end.agent == trained[0].agent and end.leaf.summary]
    tokens = [token for end in (*forked, trained[0]) for token in _after(opening, end.token_ids())]
    written = tokens[:-1] if trained[0].leaf.finish == "stop" else tokens
    return Transcript(number, torch.tensor(tokens, dtype=torch.int64), written, episode, form.pictures)


def _after(opening: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Tokens after an opening; a fork may have rendered even that differently."""
    differing = (n for n, pair in enumerate(zip(opening, tokens, strict=False)) if pair[0] != pair[1])
    return tokens[next(differing, len(opening)) :]


def rows_of_episodes(
    own: NumberedEpisodes, count: int, samples: int, form: RowForm, mesh: Mesh
) -> tuple[Rows, EpisodeTable]:
    """Rows of all episodes, right-padded to a multiple of 8 tokens, and the table of episodes. Collective.

    Rows of failed and of unscored episodes are among them, with a score of 0: see `scored_rows`.

    Args:
      own: this rank's episodes by number, ascending.
      count: E, episodes of all ranks, numbered from 0.
      samples: episodes of each example: episode e is of group e // samples.
      form: of the rows.
      mesh: of the engines.
    """
    paths = [paths_of(episode, form.frozen) for _, episode in own]
    table, row_counts_E = _episode_table(own, paths, count, form, mesh)
    begins_E = np.cumsum(row_counts_E) - row_counts_E
    owner_B = np.repeat(table.owner, row_counts_E)
    index = int(mesh.index(mesh.row_axes))
    expected = np.flatnonzero(owner_B == index)
    numbers = [begins_E[number] + i for (number, _), some in zip(own, paths, strict=True) for i in range(len(some))]
    assert np.array_equal(expected, np.array(numbers, dtype=np.int64)), "a rank's episodes are not ascending"
    flat = [(episode, path) for (_, episode), some in zip(own, paths, strict=True) for path in some]
    spans = [
        [
            Span(node.tokens, node.numbers if node in path.trained else None, node.routes, node.kept)
            for node in path.nodes
        ]
        for _, path in flat
    ]
    tokens = _fields_of(flat, spans, form, mesh.device)
    columns = {
        "length": [path.length for _, path in flat],
        "agent": [form.agents.index(path.trajectory.agent) for _, path in flat],
    }
    tensors = {name: torch.tensor(x, dtype=torch.int64, device=mesh.device) for name, x in columns.items()}
    everywhere = gather_table(tensors, owner_B, mesh, axes=mesh.row_axes)
    episode_B = torch.from_numpy(np.repeat(np.arange(count), row_counts_E)).to(mesh.device)
    reward_B = table.reward[episode_B, everywhere["agent"]]
    batch = Batch(
        **tokens,
        **everywhere,
        group=episode_B // samples,
        episode=episode_B,
        score=reward_B.nan_to_num(nan=0.0).to(form.dtype),
        truncated=~table.finished[episode_B],
    )
    owned = [joined_lines([node.owned for node in path.nodes]) for _, path in flat]
    rows = with_owned(rows_of(batch, owner_B, mesh), owned, form.owned)
    rows = with_kept(rows, spans, mesh.device) if form.kept else rows
    units = episode_units(rows.batch)
    return rows.with_fields(**episode_fields(rows.batch, units)), table


def scored_rows(rows: Rows, table: EpisodeTable, samples: int) -> Rows:
    """Rows that can be trained on.

    A group with a failed episode is left out whole, since the others would be compared without it; an agent whose
    reward is None is left out alone.
    """
    failed_P = table.failed.reshape(-1, samples).any(1)
    batch = rows.batch
    unscored_B = table.reward[batch.episode, batch.agent].isnan()
    kept_B = ~unscored_B & ~failed_P[batch.episode // samples]
    return rows if bool(kept_B.all()) else take(rows, np.flatnonzero(kept_B.cpu().numpy()))


def _episode_table(
    own: NumberedEpisodes, paths: Sequence[Sequence[RowPath]], count: int, form: RowForm, mesh: Mesh
) -> tuple[EpisodeTable, np.ndarray]:
    """The table of episodes, and the number of rows of each [E], in one collective."""
    unknown = {agent for _, episode in own for agent in episode.agents()} - {*form.agents, *form.frozen}
    if unknown:
        known = [*form.agents, *form.frozen]
        raise ValueError(f"an episode has agents {sorted(unknown)}; the run knows {known}")
    rewards = np.array([[x.rewards.get(agent) for agent in form.agents] for _, x in own], dtype=np.float64)  # None: NaN
    columns = {
        "rows": [len(some) for some in paths],
        "failed": [episode.status in ("failed", "cancelled") for _, episode in own],
        "finished": [_is_finished(episode, some) for (_, episode), some in zip(own, paths, strict=True)],
        "turns": [sum(len(path.trained) for path in some) for some in paths],
        "tokens": [sum(path.length for path in some) for some in paths],
        "reward": rewards.reshape(len(own), len(form.agents)),
    }
    owner, table = share_table([number for number, _ in own], columns, count, mesh)
    failed, finished = table["failed"] > 0, table["finished"] > 0
    shared = EpisodeTable(owner, table["reward"], failed, finished, table["turns"].long(), table["tokens"].long())
    return shared, table["rows"].cpu().numpy().astype(np.int64)


def _is_finished(episode: Episode, paths: Sequence[RowPath]) -> bool:
    """True if neither a limit of the episode nor that of its last replies ended it; others went on from forked ones."""
    forked = episode.ends[: episode.forked]
    last = [path.nodes[-1].finish for path in paths if path.trajectory not in forked]
    return episode.status == "done" and all(finish in ("stop", "string") for finish in last)


def _fields_of(
    flat: Sequence[tuple[Episode, RowPath]], spans: Sequence[Sequence[Span]], form: RowForm, device: torch.device
) -> dict[str, Any]:
    """Fields per token of this rank's rows, and the digests of their weights."""
    fields = token_fields(spans, form, device)
    shape = fields["tokens"].shape
    turn, author, state = torch.zeros(3, *shape, dtype=TOKEN_INT)
    token_reward = torch.zeros(shape, dtype=form.dtype)
    read = set[Node]()  # context after a first reply
    for row, (episode, path) in enumerate(flat):
        begin = 0
        # A turn has a token at least, so that no number exceeds the row whatever a template has left out.
        turns = min(path.nodes[0].turns_before, len(path.nodes[0].tokens))
        replied = False
        context: list[int] = []  # since the reply before
        for node in path.nodes:
            here = slice(begin, begin + len(node.tokens))
            turn[row, here] = turns
            if node.sampled:
                turns += 1
                replied = True
            if node in path.trained:
                token_reward[row, here.stop - 1] = episode.turn_rewards.get(node, 0.0)
                author[row, here] = SUMMARY if node.summary else POLICY
                state[row, here] = _digest(episode.states.get(node, context))
            elif not node.sampled and replied and node not in read:
                read.add(node)
                author[row, here] = _author(node)
            context = [] if node.sampled else [*context, *node.tokens]
            if node.owned is not None:
                context.append(node.owned.digest)
            begin = here.stop
        # A path ends with a trained token, which gets the outcome: that has what the turns of the path earned.
        token_reward[row, begin - 1] -= math.fsum(episode.turn_rewards.get(node, 0.0) for node in path.nodes)
    further = {"turn": turn, "token_reward": token_reward, "author": author, "state": state}
    return fields | {name: x.to(device) for name, x in further.items()}


def _author(node: Node) -> int:
    """The number of who wrote a node of context; raw tokens are a tool's."""
    roles = {message["role"] for message in node.messages}
    return OTHERS if roles and "tool" not in roles else TOOL


def _digest(state: str | Sequence[int]) -> int:
    """A number below 2^31 of a state's name, or of tokens."""
    text = f"name {state}" if isinstance(state, str) else f"tokens {list(state)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) >> 1
