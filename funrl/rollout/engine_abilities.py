"""Abilities of engines by the value of `--engine`, readable before an engine is made. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple


class EngineAbilities(NamedTuple):
    """Abilities of an engine, which flags, models and meshes are checked against.

    The defaults are those of an engine that completes prompts with whole weights and can do nothing else.

    Attributes:
      own_steps: its iterations are this package's own functions. The dry run counts them, their bits are the trainer's,
        `--speculate` and JAX apply to them, and generators of other jobs use them.
      whole_only: it completes whole requests. None is continued, and weights are replaced only between them.
      unpaged: it generates with models that have no pages of keys.
      tensor: it splits a model over tensor ranks.
      shares_experts: ranks of `expert` are one replica, which share its experts; else each is one with all experts.
      penalties: it takes a repetition penalty for prompts of several lengths.
      adapters: it adds adapters to a base; others get merged weights.
      keeps_adapters: a running completion ends with the adapter that it began with, while the age of its group is
        within the bound; else it goes on with the newest. Versions per token say which.
      routes: it generates with experts, and records the routes of tokens.
      kept_tokens: it records the tokens that truncated sampling could take (`--mask_replay`).
      several_models: further models of agents are served beside the policy.
      pictures: it reads prompts with pictures.
      repeats: a request's samples have the same bits whatever requests run beside it.
      float8: it multiplies in 8 bits (`--rollout_dtype=float8`).
      servers: it runs in servers at `--engine_url`.
      patches: it shows the weights that it has, so that patches of them can be sent.
      least_head: smallest size of an attention head.
    """

    own_steps: bool = False
    whole_only: bool = False
    unpaged: bool = False
    tensor: bool = False
    shares_experts: bool = False
    penalties: bool = False
    adapters: bool = False
    keeps_adapters: bool = False
    routes: bool = False
    kept_tokens: bool = False
    several_models: bool = False
    pictures: bool = False
    repeats: bool = False
    float8: bool = False
    servers: bool = False
    patches: bool = False
    least_head: int = 1


ENGINES = {  # by the value of --engine
    "native": EngineAbilities(
        own_steps=True,
        tensor=True,
        shares_experts=True,
        penalties=True,
        adapters=True,
        routes=True,
        kept_tokens=True,
        several_models=True,
        pictures=True,
        repeats=True,
        float8=True,
        patches=True,
    ),
    "vllm": EngineAbilities(
        tensor=True,
        penalties=True,
        adapters=True,
        keeps_adapters=True,
        kept_tokens=True,
        pictures=True,
        least_head=32,
    ),
    "vllm_server": EngineAbilities(
        penalties=True, adapters=True, keeps_adapters=True, kept_tokens=True, servers=True, least_head=32
    ),
    "hf": EngineAbilities(whole_only=True, unpaged=True, repeats=True),
}


def engines_that(ability: str) -> str:
    """The values of `--engine` with an ability, for people.

    >>> engines_that("pictures")
    'native or vllm'
    """
    return " or ".join(name for name, abilities in ENGINES.items() if getattr(abilities, ability))
