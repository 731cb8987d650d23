"""Flags of training: the optimizer, adapters, routers, and how a batch is divided into updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from funrl.trainer.settings.declaration import RL, FlagOptions, above, at_least, flag, one_of


@dataclass(frozen=True)
class OptimizerSettings:
    """Learning rates and optimizer."""

    lr: float | None = flag(
        None,
        "peak learning rate of the policy, or of the trained model",
        above(0),
        chosen=(
            "1e-3 from scratch; with --model 0.2 / sqrt(its parameters), 1 / sqrt for sft and reward models, 5e-7 to "
            "1e-3; --lora_rank: 3e-3, 10 times"
        ),
    )
    critic_lr: float | None = flag(
        None, "peak learning rate of the critic", above(0), chosen="twice the policy's", kinds=RL, needs="critic"
    )
    implicit_reward_lr: float | None = flag(
        None,
        "peak learning rate of the implicit reward model",
        above(0),
        chosen="the policy's",
        kinds=RL,
        needs="implicit_reward",
    )
    critic_warmup_steps: int = flag(
        0, "first steps in which only the critic learns", at_least(0), kinds=RL, needs="critic"
    )
    optimizer: str = flag("adamw", "muon applies to matrices; other weights use adamw", one_of("adamw", "muon"))
    lr_schedule: str = flag("constant", "schedule after the warm-up", one_of("constant", "linear", "cosine"))
    lr_warmup_steps: int = flag(0, "optimizer steps of linear warm-up", at_least(0))
    weight_decay: float = flag(0.0, "decoupled weight decay, of matrices only", at_least(0))
    decay_all: bool = flag(False, "apply weight decay to norms and biases too, as verl does", requires="weight_decay")
    max_grad_norm: float = flag(1.0, "gradients are scaled down to this global norm", above(0))
    freeze: str | None = flag(
        None,
        "what does not learn: vision (a tower less its projector), none, or parts by name",
        chosen="vision",
        example="embed",
    )


@dataclass(frozen=True)
class AdapterSettings:
    """Adapters (LoRA)."""

    SHARED: ClassVar[FlagOptions] = {"requires": "lora_rank"}

    lora_rank: int | None = flag(
        None,
        "rank of the adapters (LoRA) that are trained; the frozen weights are the reference too",
        at_least(1),
        chosen="all weights are trained",
    )
    lora_alpha: float | None = flag(None, "adapters are scaled by alpha / rank", above(0), chosen="the rank")
    lora_targets: str = flag(
        "all-linear",
        "projections with adapters, by PEFT's names: q_proj,v_proj; a vision tower has them where it is named: "
        "all-linear,vision or vision.qkv",
        example="q_proj",
    )
    adapter: str | None = flag(None, "directory of adapters on --model that the run begins with", requires="model")


@dataclass(frozen=True)
class RouterSettings:
    """Routers of experts."""

    router_aux_coef: float = flag(
        0.0,
        "weight of the load-balancing loss of experts; with several micro-batches per update it takes one more "
        "forward pass",
        at_least(0),
    )
    router_z_coef: float = flag(0.0, "weight of the loss on large router logits", at_least(0))
    router_bias_rate: float = flag(
        0.0,
        "step size of the experts' selection biases, which move against their load after each update, as in "
        "DeepSeek-V3 (0.001)",
        at_least(0),
    )
    router_replay: bool = flag(False, "train the policy with the experts that its tokens used in the engine", kinds=RL)


@dataclass(frozen=True)
class UpdateSettings:
    """Updates and micro-batches."""

    epochs: int = flag(1, "passes over each batch of rollouts", at_least(1), kinds=RL, without=1)
    minibatches: int = flag(2, "optimizer steps per pass", at_least(1), kinds=RL, without=1)
    max_skipped: int = flag(
        3,
        "maximum consecutive updates skipped because the loss or gradient is not finite; then the run stops",
        at_least(1),
        effect="event",
    )
    token_budget: int = flag(16384, "tokens of a micro-batch on one device", at_least(1), effect="work")
    score_token_budget: int | None = flag(
        None,
        "tokens of a micro-batch without learning: scoring, and the loss on held-out texts",
        at_least(1),
        chosen="4 times --token_budget",
        effect="work",
    )
