"""Every number and name that a run takes from outside: one field is one command-line flag."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


class SettingsError(ValueError):
    """A flag whose value cannot work; the message names it and what would."""


def _flag(default: Any, group: str, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class Settings:
    """The flags common to all experiments. None means: the run chooses, as the help text says."""

    mesh: str = _flag("dp1", "devices", "devices by axis, dp (data), tp (tensor), such as dp4,tp2")
    generate_mesh: str | None = _flag(None, "devices", "the same devices while generating; default: all of them dp")
    device: str | None = _flag(None, "devices", "cpu or cuda; default: cuda where there is one")
    dtype: str = _flag("float32", "devices", "float32, float64 or bfloat16 (bfloat16 keeps float32 master weights)")
    fsdp: bool = _flag(False, "devices", "shard weights, gradients and optimizer states over data too")
    fsdp_axes: str | None = _flag(
        None,
        "devices",
        "what --fsdp shards over: dp, ep or dp,ep; on dp2,ep4 ep makes shards of 4, twice; default: all",
    )
    fsdp_models: str | None = _flag(
        None,
        "devices",
        "which models --fsdp shards: some of policy,critic,reference,reward_model,teacher; default: all",
    )
    remat: str = _flag("none", "devices", "none, full (backward computes a layer again) or selective (all but matmuls)")
    offload: str | None = _flag(
        None, "devices", "what leaves a GPU while it is not needed: some of optimizer,reference,params"
    )
    hardware: str | None = _flag(
        None, "devices", "whose memory and speed --dry_run takes: a100, h100, h200, mi300x or cpu; default: h100"
    )
    timeout: int = _flag(60, "devices", "minutes that a rank waits for another, which may wait for a slow reward")
    compile: str = _flag("auto", "devices", "on, off or auto: compile one decoder layer where it pays (on CUDA)")

    model: str | None = _flag(None, "job", "Hugging Face directory; default: a small decoder from scratch")
    task: str = _flag("arithmetic", "job", "the embedded task; --prompts and --reward replace it")
    prompts: str | None = _flag(None, "job", 'JSON lines, each {"prompt": text or chat messages, ...fields}')
    reward: str | None = _flag(
        None, "job", "FILE.py:function, function(prompt, completion, **fields) -> float; several with commas between"
    )
    reward_weights: str | None = _flag(None, "job", "one number a reward function, such as 1,0.5; default: 1 each")
    teacher: str | None = _flag(
        None, "job", "Hugging Face directory of a model to distil from, with the policy's tokenizer"
    )
    teacher_top_k: int = _flag(
        64, "job", "how many of the teacher's likeliest tokens in each place an algorithm is given that compares these"
    )
    steps: int = _flag(30, "job", "RL steps, each one batch of rollouts")
    warmstart_steps: int | None = _flag(
        None, "job", "supervised steps before RL; default: what the task needs, 0 with --model"
    )
    seed: int = _flag(0, "job", "seed of everything random")
    dry_run: bool = _flag(False, "job", "only say what memory, traffic and time a step takes, by a config.json alone")
    prompt_tokens: int | None = _flag(
        None, "job", "tokens of a prompt that --dry_run takes; default: the embedded task's longest, else 512"
    )
    run_dir: str | None = _flag(None, "job", "where results go; default: runs/<experiment>-<time>")

    batch_prompts: int = _flag(128, "rollout", "prompts a step")
    samples_per_prompt: int = _flag(8, "rollout", "completions of each prompt")
    max_new_tokens: int | None = _flag(None, "rollout", "tokens a completion may have; default: the task's, else 64")
    temperature: float = _flag(1.0, "rollout", "of sampling; the trainer's log-probabilities use it too")
    top_k: int = _flag(0, "rollout", "sample among the k likeliest tokens; 0: all")
    top_p: float = _flag(1.0, "rollout", "sample among the likeliest tokens of this total probability")
    max_refills: int = _flag(
        8, "rollout", "batches sampled at most to replace prompts that the algorithm's filter drops whole"
    )

    lr: float | None = _flag(
        None, "update", "policy's peak learning rate; default: 1e-3 from scratch, 1e-5 with --model"
    )
    critic_lr: float | None = _flag(None, "update", "critic's peak learning rate; default: twice the policy's")
    reward_lr: float | None = _flag(
        None, "update", "implicit process reward model's peak learning rate; default: the policy's"
    )
    critic_warmup_steps: int = _flag(0, "update", "first steps in which only the critic learns")
    lr_schedule: str = _flag("constant", "update", "constant, linear or cosine, after the warm-up")
    lr_warmup_steps: int = _flag(0, "update", "optimizer steps of linear warm-up")
    weight_decay: float = _flag(0.0, "update", "decoupled, of matrices only")
    max_grad_norm: float = _flag(1.0, "update", "gradients are scaled down to this global norm")
    epochs: int = _flag(1, "update", "passes over each batch of rollouts")
    minibatches: int = _flag(2, "update", "optimizer steps a pass")
    token_budget: int = _flag(16384, "update", "padded tokens in one forward pass of one device (micro-batch)")

    eval_every: int = _flag(10, "output", "steps between evaluations; the first and the last step always evaluate")
    eval_prompts: int = _flag(256, "output", "held-out prompts an evaluation uses")
    eval_temperature: float = _flag(0.0, "output", "of evaluation; 0 is greedy")
    sample_every: int = _flag(10, "output", "steps between printed sample completions")
