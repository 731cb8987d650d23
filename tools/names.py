"""The tables of TRL's and verl's names in docs/migration.md, written by asking for the meaning of each name.

    python tools/names.py

`tests/docs/test_written_pages.py` fails where the page is not what the code says.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migration.md"
sys.path.insert(0, str(ROOT))

from funrl.algos import recipe  # noqa: E402
from funrl.flags.foreign.meaning import Effect, NameContext, NameRule, meaning_of  # noqa: E402
from funrl.flags.foreign.trl import TRL  # noqa: E402
from funrl.flags.foreign.verl import VERL  # noqa: E402
from funrl.trainer.settings.settings import Settings, flag_values  # noqa: E402

RECIPES = (
    "grpo",
    "ppo",
    "dpo",
    "reward_model",
    "sft",
    "gspo",
    "rloo",
    "kto",
    "cpo",
    "simpo",
    "alphapo",
    "gkd",
)  # the first that has the name's meaning is asked
NUMBERS = ("1", "2", "0.1", "0", "false", "none")
VALUES = {  # an example of each name whose value is no number
    **dict.fromkeys(
        (
            "model_name_or_path",
            "reward_model_name_or_path",
            "reward_model_path",
            "output_dir",
            "actor_rollout_ref.model.path",
            "trainer.default_local_dir",
            "teacher_model_name_or_path",
            "reward.reward_model.model_path",
            "reward_model.model.path",
        ),
        "DIR",
    ),
    "use_peft": "true",
    "lora_r": "8",
    "lora_target_modules": "q_proj",
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "dataset_name": "docs",
    "reward_funcs": "mine.score",
    "learning_rate": "1e-6",
    "save_strategy": "no",
    "lr_scheduler_type": "cosine",
    "optim": "adamw_torch",
    "torch_dtype": "bfloat16",
    "vllm_mode": "colocate",
    "vllm_server_base_url": "URL",
    "loss_type": "dapo",
    "scale_rewards": "group",
    "f_divergence_type": "js_divergence",
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "4",
    "steps_per_generation": "4",
    "generation_batch_size": "64",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "10",
    "use_bias_correction_kl": "true",
    "f_alpha_divergence_coef": "0.25",
    "desirable_weight": "1.5",
    "loss_weights": "0.5",
    "use_weighting": "true",
    "simpo_gamma": "0.5",
    "normalize_advantages": "true",
    "algorithm.kl_penalty": "kl",
    "warmup_steps": "10",
    "actor_rollout_ref.model.lora_rank": "32",
    "actor_rollout_ref.model.target_modules": "all-linear",
    "custom_reward_function.name": "score",
    "reward.custom_reward_function.name": "score",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "true",
    "warmup_ratio": "0.1",
    "max_steps": "100",
    "use_vllm": "true",
    "bf16": "true",
    "gradient_checkpointing": "true",
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "FILE",
    "data.val_files": "FILE",
    "data.prompt_key": "problem",
    "data.filter_overlong_prompts": "true",
    "data.truncation": "left",
    "custom_reward_function.path": "FILE.py",
    "reward.custom_reward_function.path": "FILE.py",
    "data.train_batch_size": "1024",
    "trainer.logger": "['console','wandb']",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "2",
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.optim.lr": "1e-6",
    "actor_rollout_ref.actor.optim.warmup_style": "cosine",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "actor_rollout_ref.actor.clip_ratio": "0.2",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "0.1",
    "actor_rollout_ref.actor.use_kl_loss": "true",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.kl_loss_coef": "0.001",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "2",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "true",
    "algorithm.use_kl_in_reward": "true",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "true",
    "algorithm.kl_ctrl.type": "adaptive",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "true",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "true",
    "algorithm.kl_ctrl.target_kl": "0.1",
    "algorithm.norm_adv_by_std_in_grpo": "false",
    "epsilon": "0.2",
    "epsilon_high": "0.28",
    "beta": "0.04",
    "kl_coef": "0.05",
    "cliprange": "0.2",
    "cliprange_value": "0.2",
    "lam": "0.95",
    "delta": "4.0",
    "num_generations": "8",
    "max_completion_length": "512",
    "response_length": "512",
    "max_prompt_length": "512",
    "label_smoothing": "0.1",
    "num_mini_batches": "4",
    "actor_rollout_ref.rollout.n": "5",
    "data.max_response_length": "512",
    "data.max_prompt_length": "512",
    "actor_rollout_ref.actor.clip_ratio_low": "0.2",
    "eval_steps": "50",
    "actor_rollout_ref.actor.clip_ratio_high": "0.28",
    "actor_rollout_ref.actor.clip_ratio_c": "3.0",
    "actor_rollout_ref.actor.entropy_coeff": "0.001",
    "algorithm.lam": "0.95",
    "critic.cliprange_value": "0.5",
    "save_steps": "50",
    "max_length": "1024",
    "max_seq_length": "1024",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "16384",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": "65536",
    "vllm_server_timeout": "240",
    "actor_rollout_ref.rollout.max_num_seqs": "256",
    "actor_rollout_ref.actor.optim.weight_decay": "0.01",
    "trainer.total_training_steps": "100",
    "trainer.save_freq": "20",
    "trainer.test_freq": "5",
    "critic.optim.lr": "1e-5",
    "actor_rollout_ref.rollout.temperature": "0.7",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "2",
}
ASKED = {"algorithm.norm_adv_by_std_in_grpo": ("dr_grpo",)}  # the recipe that `funrl import` finds by it
KL_LOSS = {"actor_rollout_ref.actor.use_kl_loss": "true"}
KL_REWARD = {"algorithm.use_kl_in_reward": "true"}
BESIDE = {  # what a name has a meaning with
    "algorithm.norm_adv_by_std_in_grpo": {"algorithm.adv_estimator": "grpo"},
    "epsilon_high": {"epsilon": "0.2"},
    "use_bias_correction_kl": {"beta": "0.04"},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "loss_weights": {"loss_type": "hinge"},
    "label_smoothing": {"loss_type": "exo_pair"},
    "actor_rollout_ref.model.lora_alpha": {"actor_rollout_ref.model.lora_rank": "32"},
    "actor_rollout_ref.model.target_modules": {"actor_rollout_ref.model.lora_rank": "32"},
    "custom_reward_function.name": {"custom_reward_function.path": "FILE.py"},
    "reward.custom_reward_function.name": {"reward.custom_reward_function.path": "FILE.py"},
    "reward.reward_model.model_path": {"reward.reward_model.enable": "true"},
    "actor_rollout_ref.actor.optim.lr_warmup_steps": {"data.train_batch_size": "256"},
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": {"data.train_batch_size": "256"},
    "actor_rollout_ref.actor.optim.lr_scheduler_type": {"data.train_batch_size": "256"},
    "actor_rollout_ref.actor.optim.warmup_style": {"data.train_batch_size": "256"},
    "actor_rollout_ref.rollout.val_kwargs.temperature": {"actor_rollout_ref.rollout.val_kwargs.do_sample": "true"},
    "actor_rollout_ref.rollout.val_kwargs.top_p": {"actor_rollout_ref.rollout.val_kwargs.do_sample": "true"},
    "actor_rollout_ref.rollout.val_kwargs.top_k": {"actor_rollout_ref.rollout.val_kwargs.do_sample": "true"},
    "warmup_ratio": {"max_steps": "100"},
    "dataset_train_split": {"dataset_name": "docs"},
    "dataset_test_split": {"dataset_name": "docs"},
    "reward_model.model.path": {"reward_model.enable": "true"},
    "actor_rollout_ref.actor.kl_loss_coef": KL_LOSS,
    "actor_rollout_ref.actor.kl_loss_type": KL_LOSS,
    "algorithm.kl_penalty": KL_REWARD,
    "algorithm.kl_ctrl.kl_coef": KL_REWARD,
    "algorithm.kl_ctrl.type": KL_REWARD,
    "algorithm.kl_ctrl.target_kl": KL_REWARD | {"algorithm.kl_ctrl.type": "adaptive"},
    "algorithm.kl_ctrl.horizon": KL_REWARD | {"algorithm.kl_ctrl.type": "adaptive"},
}


def table(names: Mapping[str, NameRule]) -> str:
    """A line for each name that becomes other flags; neighbours with the same flags share one."""
    lines = ["| there | here | what differs |", "|---|---|---|"]
    rows = [row for name, rule in names.items() if (row := cells(name, rule))]
    last_note = ""
    for (flags, note), same in itertools.groupby(rows, key=lambda row: row[1:]):
        shown = "as above" if len(note.split()) > 4 and note == last_note else note
        lines.append(f"| {', '.join(theirs for theirs, *_ in same)} | {flags} | {shown} |")
        last_note = note
    return "\n".join(lines)


def cells(name: str, rule: NameRule) -> tuple[str, str, str] | None:
    """The cells of one name, by the first recipe and value with flags; None if there are none, or the same name."""
    values = (VALUES[name],) if name in VALUES else NUMBERS
    for asked in ASKED.get(name, RECIPES):
        for value in values:
            meaning = meaning_of(rule, value, context(name, value, asked))
            if meaning.effect is not Effect.SAME:
                continue
            if set(meaning.flags) - {name}:
                recipe_note = f"of `{asked}`" if asked != "grpo" and name not in ASKED else ""
                flags = " ".join(f"`--{ours}={text}`" for ours, text in meaning.flags.items())
                return f"`{name}={value}`", flags, "; ".join(filter(None, (recipe_note, cell(meaning.difference))))
            break
    return None


def context(name: str, value: str, asked: str) -> NameContext:
    """A command line with one name and those that it needs beside it, for a recipe with its defaults."""
    ours = flag_values(Settings())
    arguments = frozenset(inspect.signature(recipe(asked)).parameters)
    return NameContext(BESIDE.get(name, {}) | {name: value}, ours, arguments, asked)


def cell(text: str) -> str:
    """Template that a cell of a table holds."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("](", "] (").replace("<", "&lt;")


def page(text: str) -> str:
    """The page with its tables written anew."""
    for name, names in {"TRL": TRL, "verl": VERL}.items():
        begin, end = f"<!-- {name}: written by tools/names.py -->\n", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = before + begin + "\n" + table(names) + "\n\n" + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE.relative_to(ROOT)}")
