"""Rollout functions of TRL's GRPOTrainer, its argument `rollout_func`: functions of `(prompts, trainer)`.

funrl grpo --model=DIR --prompts=FILE --env=examples/env_trl_rollout.py:rollout_environment \
  --env_args=name:FILE.py:rollout,rewards:FILE.py:reward

TRL need not be installed. Written for TRL 1.16; reference: https://huggingface.co/docs/trl/grpo_trainer
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from recorded_replies import RecordedReplies

from funrl.data.prompts import Example
from funrl.environments.agents import POLICY
from funrl.environments.builtin.load import FLAG
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.foreign.shapes import AdaptedEnvironment
from funrl.foreign.trl import RewardFunctions, Rewards
from funrl.loading import load_object
from funrl.rewards.call import function_name
from funrl.rollout.episodes import Episode, Node, Trajectory
from funrl.rollout.policy import LimitReached, Policy

ROLLOUT_OUTPUTS = ("prompt_ids", "completion_ids", "logprobs")  # of what a rollout function returns


def rollout_environment(
    name: str | Callable[..., Any], rewards: RewardFunctions, weights: Sequence[float] | None = None
) -> Environment:
    """Episodes of a rollout function, which makes a completion of a prompt.

    Args:
      name: "FILE.py:NAME" of the function, or itself.
      rewards, weights: as of `funrl.foreign.trl.trl_environment`.

    Raises:
      LoadError: the function cannot be loaded.
      ValueError: there is no reward.
    """
    function = load_object(FLAG, name) if isinstance(name, str) else name
    scorer = Rewards(rewards, weights)
    scorer.check("a rollout function")

    async def run(policy: Policy, example: Example, seed: int) -> Episode:
        replies = RecordedReplies(policy)
        trainer = _TrainerShape(policy, replies)
        prompt = list(map(dict, example.messages)) if example.conversational and example.messages else example.text
        try:
            output = await call(function, [prompt], trainer)
        except LimitReached as limit:
            return Episode(policy.ends(), {POLICY: None}, status=limit.status)
        finally:
            trainer.close()
        if missing := [name for name in ROLLOUT_OUTPUTS if name not in output]:
            raise TypeError(f"{function_name(function)} returned no {', '.join(missing)}")
        prompt_ids = output["prompt_ids"][0]
        completion_ids = output["completion_ids"][0]
        mask = output["env_mask"][0] if "env_mask" in output else [1] * len(completion_ids)
        end = replies.end_of([*prompt_ids, *completion_ids], [*[0] * len(prompt_ids), *mask])
        extra = {name: value for name, value in output.items() if name not in (*ROLLOUT_OUTPUTS, "env_mask")}
        reward, parts = await scorer.score(example, prompt, end, Trajectory(end.agent, next(end.nodes())), extra)
        return Episode([end], {POLICY: reward}, parts=parts)

    return AdaptedEnvironment(run)


class _TrainerShape:
    """The part of a GRPOTrainer that a rollout function of one prompt uses.

    Attributes:
      processing_class: the tokenizer.
      args: `num_generations`, 1, and `max_completion_length`.
      vllm_generation: has `generate`, as TRL's.
    """

    def __init__(self, policy: Policy, replies: RecordedReplies):
        chat = policy.chat
        most = policy.sampling.max_new_tokens
        self.processing_class = chat.tokenizer if isinstance(chat, TemplateChat) else None
        self.args = SimpleNamespace(num_generations=1, max_completion_length=most)
        self.vllm_generation = self
        self._loop = asyncio.get_running_loop()
        self._replies = replies
        self._asked: list[Future[Node]] = []

    def close(self) -> None:
        """Cancel what is being sampled."""
        for asked in self._asked:
            asked.cancel()

    def generate(
        self, prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """Prompts, completions, and of each token of these its log-probability and its id, in lists of one.

        It must not be called on the event loop; a plain rollout function is in a thread.
        """
        if images and any(images):
            raise ValueError("images are not served; only text is")
        sampled = [self._sampled(list(prompt)) for prompt in prompts for _ in range(num_generations)]
        rows = [[] if node.sampling_logp is None else node.sampling_logp.tolist() for node in sampled]
        logp = [[[value] for value in row] for row in rows]
        ids = [list(node.tokens) for node in sampled]
        return [list(prompt) for prompt in prompts], ids, logp, [[[token] for token in tokens] for tokens in ids]

    def _sampled(self, prompt: list[int]) -> Node:
        asked = asyncio.run_coroutine_threadsafe(self._replies.reply(prompt), self._loop)
        self._asked.append(asked)
        return asked.result()
