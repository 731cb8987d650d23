"""Recipes: one algorithm per file, made by a function of the same name. Every argument has a default."""

import importlib
from pathlib import Path
from typing import Any

_FIRST = (  # in lists; other files follow by name
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "sapo",
    "cispo",
    "gmpo",
    "rloo",
    "remax",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "gdpo",
    "prime",
    "vapo",
    "sao",
    "scalerl",
    "flash_reinforce",
    "cfpo",
    "maxpo",
    "treepo",
    "flowrl",
    "spo",
    "pf_ppo",
    "sppo",
    "dppo",
    "otb",
    "distillation",
    "gkd",
    "sdpo",
    "iw_opd",
    "mopd",
    "ssd",
    "sft",
    "dpo",
    "online_dpo",
    "kto",
    "simpo",
    "alphapo",
    "cpo",
    "orpo",
    "reward_model",
    "process_reward_model",
    "maxrl",
    "lite_ppo",
    "prpo",
    "topr",
    "raft_plus_plus",
    "fipo",
    "real",
    "gvpo",
    "a2po",
    "m2po",
    "rollout_is",
    "eaft",
    "asft",
    "tpo",
    "chord",
    "spin",
    "gigpo",
    "mt_grpo",
    "hierarchical_grpo",
    "rae",
    "echo",
)
NAMES = (*_FIRST, *sorted({file.stem for file in Path(__file__).parent.glob("[a-z]*.py")} - {*_FIRST}))


def recipe(name: str) -> Any:
    """The function of a recipe.

    Raises:
      ValueError: no recipe has this name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no recipe {name!r}; the recipes are {', '.join(NAMES)}")
    return getattr(importlib.import_module(f"{__name__}.{name}"), name)
