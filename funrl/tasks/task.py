"""The record of an embedded task: everything that general code knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from funrl.data.prompts import Prompt

if TYPE_CHECKING:
    from funrl.environments.environment import Environment
    from funrl.models.decoder.config import Config

RIGHT_ANSWER = "answer"


class EmbeddedTask(NamedTuple):
    """Data, a reward, and the decoder that learns them from scratch.

    Attributes:
      name: of the data, in reports.
      training_prompts: (seed) -> prompts to train on, whose field `RIGHT_ANSWER` has a right completion.
      heldout_prompts: (count) -> at most that many prompts to evaluate on; the same for every seed.
      reward: (prompt, completion, **fields) -> score; None: the environment rewards its episodes.
      demonstrations: (seed, count) -> records of an imperfect demonstrator as `funrl sft` reads them, for the warm
        start.
      texts: kind of texts -> (seed, count, split) -> records, or their values in the order of the kind's fields.
      tokenizer: makes the tokenizer.
      tokens: all tokens of that tokenizer, by which a model's directory is known.
      model_config: (smallest size of a head that the engine takes) -> the decoder.
      max_new_tokens: of a completion.
      warmstart_steps: steps of `funrl sft` on demonstrations that make the model that a run begins with.
      warmstart_demonstrations: how many demonstrations these take at most.
      warmstart_flags: further flags of that command.
      readable: completion -> as it is shown to people; None: as it is.
      environment: makes the environment whose episodes are learned from; None: prompts are completed once.
      turns: replies of an episode, and tokens before each but the first, that a dry run assumes.
    """

    name: str
    training_prompts: Callable[[int], list[Prompt]]
    heldout_prompts: Callable[[int], list[Prompt]]
    reward: Callable[..., float] | None
    demonstrations: Callable[[int, int], list[dict[str, Any]]]
    texts: Mapping[str, Callable[..., Sequence[Any]]]
    tokenizer: Callable[[], Any]
    tokens: frozenset[str]
    model_config: Callable[[int], Config]
    max_new_tokens: int
    warmstart_steps: int
    warmstart_demonstrations: int
    warmstart_flags: Mapping[str, Any]
    readable: Callable[[str], str] | None
    environment: Callable[[], Environment] | None = None
    turns: tuple[int, int] = (1, 0)
