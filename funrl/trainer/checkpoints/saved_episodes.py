"""Episodes of a step on disk, beside its rows: every replica writes its own, and any mesh reads them by their seeds.

    rollouts/step-7/episodes-3.jsonl    episodes of the third replica, one a line: number, seed and record

A record has each node once: tokens, parent, who wrote it, log-probabilities, versions, routes and request of a sampled
one, messages of what others said, and the rewards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from funrl.environments.chat import without_pictures
from funrl.environments.logged import LoggedEpisode
from funrl.mesh.mesh import Mesh
from funrl.rollout.episode_records import record_from_json, to_json
from funrl.rollout.episodes import EpisodeRecord, from_record, to_record
from funrl.trainer.storage.shard_server import CheckpointError, DamagedError


def write_episodes(folder: Path, episodes: Sequence[LoggedEpisode], mesh: Mesh) -> int:
    """Write this rank's episodes of a step, if it is the first of its replica.

    Args:
      folder: of the step.
      mesh: on which they were run.

    Returns: bytes of the file.

    Raises:
      OSError: it cannot be written.
    """
    if int(mesh.index("tensor")) or not episodes:
        return 0
    lines = [_line(logged) for logged in episodes]
    file = folder / f"episodes-{int(mesh.index(mesh.row_axes))}.jsonl"
    return file.write_text("".join(f"{line}\n" for line in lines))


def _line(logged: LoggedEpisode) -> str:
    record = to_record(logged.episode)
    nodes = [{**fields, "messages": [*map(without_pictures, fields["messages"])]} for fields in record.nodes]
    record = record._replace(nodes=nodes)  # a node owns what the model saw of pictures
    try:
        return to_json((logged.number, logged.seed, record))
    except TypeError:  # a message with an object of the environment's: its tokens say what the model saw
        return to_json((logged.number, logged.seed, _without_messages(record)))


def _without_messages(record: EpisodeRecord) -> EpisodeRecord:
    nodes = [{**fields, "messages": ()} for fields in record.nodes]
    return record._replace(nodes=nodes, ends=[(agent, leaf, ()) for agent, leaf, _ in record.ends])


def read_episodes(folder: str | Path, step: int) -> list[LoggedEpisode]:
    """All episodes of a step.

    Args:
      folder: of all steps.

    Raises:
      CheckpointError: there are none.
      DamagedError: a file cannot be read.
    """
    path = Path(folder) / f"step-{step}"
    files = sorted(path.glob("episodes-*.jsonl"))
    if not files:
        raise CheckpointError(f"{path} has no episodes, which a run with an environment and --save_rollouts keeps")
    episodes = []
    for file in files:
        try:
            for line in file.read_text().splitlines():
                number, seed, record = json.loads(line)
                episodes.append(LoggedEpisode(number, seed, from_record(record_from_json(record))))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise DamagedError(f"{file}: it cannot be read: {error}") from error
    return episodes
