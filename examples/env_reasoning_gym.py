"""Tasks of the library reasoning-gym: --env=examples/env_reasoning_gym.py:reasoning_task --env_args=name:chain_sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from env_retry import VERDICT, Retry, ScoredAnswer

from funrl.data.prompts import Example
from funrl.environments.adapters import message_environment
from funrl.environments.environment import Environment
from funrl.loading import LoadError
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import Policy


def reasoning_task(name: str, size: int = 1000, attempts: int = 1, **config: Any) -> Environment:
    """A data set of reasoning-gym, whose questions are the prompts of a run without --prompts.

    An answer is what stands in <answer> tags, else the whole reply; its reward, from 0 to 1, is that of the data set.
    One that the data set's scorer cannot read is wrong: its reward is 0.

    Args:
      name: of the data set, such as "chain_sum".
      size: number of questions, which the seed of the run chooses.
      attempts: answers to each; after a wrong one the policy hears so.
      config: further arguments of the data set, such as `min_terms`.

    Raises:
      LoadError: reasoning-gym is not installed.
      ValueError: there is no such data set, or it does not take the arguments.
    """
    try:
        import reasoning_gym  # type: ignore[import-not-found]
    except ImportError as error:
        raise LoadError(
            f"reasoning_gym:{name} needs reasoning-gym ({error}): pip install 'funrl[environments]'"
        ) from error

    try:
        data = reasoning_gym.create_dataset(name, size=size, seed=0, **config)
    except Exception as error:  # of any data set
        raise ValueError(f"reasoning_gym:{name}: {error}") from error
    return _ReasoningTask(data, {"name": name, "size": size, **config}, attempts)


class _ReasoningTask:
    def __init__(self, data: Any, config: Mapping[str, Any], attempts: int):
        self._data = data
        self._config = config
        self._conversations = message_environment(lambda: Retry(self._scored, attempts))

    def prompts(self, seed: int) -> Sequence[Mapping[str, Any]]:
        """The questions of a seed, with their entries in the data set."""
        import reasoning_gym  # type: ignore[import-not-found]

        entries = reasoning_gym.create_dataset(**self._config, seed=seed)
        return [
            {"prompt": [{"role": "user", "content": entry["question"]}], "entry": entry, "answer": entry["answer"]}
            for entry in entries
        ]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Ask a question."""
        return await self._conversations.run(policy, example, seed)

    def _scored(self, example: Example, reply: str) -> ScoredAnswer:
        from reasoning_gym.utils import extract_answer  # type: ignore[import-not-found]

        answer = extract_answer(reply) or reply.strip()
        try:
            reward = float(self._data.score_answer(answer, example.fields["entry"]))
        except Exception:  # of any scorer, on a text that it cannot read
            reward = 0.0
        return ScoredAnswer(reward, VERDICT)
