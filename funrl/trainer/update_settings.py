"""Flags of training: rates, adapters, the optimizer, routers, and how a batch is divided into updates."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.trainer.declaration import RL, above, at_least, flag, one_of


@dataclass(frozen=True)
class UpdateSettings:
    """The flags of the group "update"."""

    lr: float | None = flag(
        None, "update", "peak learning rate of the policy, or of the model that learns", above(0),
        chosen="1e-3 from scratch; with --model 0.2 / sqrt(its parameters), sft and reward models 1 / sqrt, 5e-7 to "
        "1e-3; --lora_rank: 3e-3, 10 times",
    )  # fmt: skip
    critic_lr: float | None = flag(
        None, "update", "peak learning rate of the critic", above(0), chosen="twice the policy's", kinds=RL
    )
    implicit_reward_lr: float | None = flag(
        None, "update", "peak learning rate of the implicit reward model", above(0), chosen="the policy's", kinds=RL
    )
    critic_warmup_steps: int = flag(0, "update", "first steps in which only the critic learns", at_least(0), kinds=RL)
    lora_rank: int | None = flag(
        None, "update", "rank of adapters (LoRA) that learn instead of the weights, which are the reference too",
        at_least(1), chosen="all weights learn",
    )  # fmt: skip
    lora_alpha: float | None = flag(
        None, "update", "adapters count by alpha / rank", above(0), chosen="the rank", requires="lora_rank"
    )
    lora_targets: str = flag(
        "all-linear", "update", "projections that have adapters, by PEFT's names: q_proj,v_proj",
        requires="lora_rank",
    )  # fmt: skip
    optimizer: str = flag("adamw", "update", "muon is for matrices; the rest takes adamw", one_of("adamw", "muon"))
    lr_schedule: str = flag("constant", "update", "after the warm-up", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = flag(0, "update", "optimizer steps of linear warm-up", at_least(0))
    weight_decay: float = flag(0.0, "update", "decoupled, of matrices only", at_least(0))
    max_grad_norm: float = flag(1.0, "update", "gradients are scaled down to this global norm", above(0))
    router_aux_coef: float = flag(
        0.0, "update", "how much the uneven load of experts counts in the loss; with several micro-batches an update "
        "it takes a forward pass more", at_least(0),
    )  # fmt: skip
    router_z_coef: float = flag(0.0, "update", "how much large logits of routers count in the loss", at_least(0))
    router_bias_rate: float = flag(
        0.0, "update", "how far an update moves the bias by which an expert is chosen, against its load, as in "
        "DeepSeek-V3 (0.001)", at_least(0),
    )  # fmt: skip
    router_replay: bool = flag(
        False, "update", "train the policy with the experts that its tokens went to in the engine", kinds=RL
    )
    epochs: int = flag(1, "update", "passes over each batch of rollouts", at_least(1), kinds=RL, without=1)
    minibatches: int = flag(2, "update", "optimizer steps a pass", at_least(1), kinds=RL, without=1)
    max_skipped: int = flag(
        3, "update", "updates in a row that may be left out because their loss or gradient is not finite; then the run "
        "stops",
        at_least(1),
    )  # fmt: skip
    token_budget: int = flag(16384, "update", "tokens of a micro-batch on one device", at_least(1))
    score_token_budget: int | None = flag(
        None, "update", "the same where nothing is learned: scoring, and the loss on held-out texts", at_least(1),
        chosen="4 times --token_budget",
    )  # fmt: skip
