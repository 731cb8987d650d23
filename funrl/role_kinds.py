"""Kinds of roles: what a model does in a run, declared once.

    grader = RoleKind("a frozen grader", writes={"novelty": "logp"}, model="/models/small")
    forecaster = RoleKind("a forecaster", writes={"forecast": "values"}, value_head=True, learns=True)

Every algorithm knows the kinds here; one brings its own beside them, `Algorithm(..., roles={...})`.
Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

LOGP_OUTPUTS = ("logp", "entropy", "sum_pi_squared", "topk", "topk_logp")  # of a model with an unembedding
VALUE_OUTPUTS = ("values",)  # of a model with a value head
TOPK_OUTPUTS = ("topk", "topk_logp")  # several numbers a token
READS = ("tokens", "completion", "steps")
BASE = "base"  # name of the role that is the frozen weights under adapters, which a run has and no algorithm names


class RateRule(NamedTuple):
    """Peak learning rate of a role that learns.

    Attributes:
      flag: name of the flag that gives it; "": none does.
      factor: of --lr, where that flag is not given.
    """

    flag: str = ""
    factor: float = 1.0


class RoleMessages(NamedTuple):
    """Texts about a role in messages.

    Attributes:
      missing: noun phrase for flags that do nothing without it; "": no flag needs it.
      odd: advice where a number that it wrote is not finite; "": `RoleKind.advice` makes one.
    """

    missing: str = ""
    odd: str = ""


@dataclass(frozen=True)
class RoleKind:
    """Declaration of a kind of role: what it reads, writes and learns, what it starts from, and where its metrics go.

    Attributes:
      text: noun phrase for messages, such as "a frozen reference".
      writes: field of the batch -> the output of its model that the field holds, one of `LOGP_OUTPUTS`, or "values"
        of a value head. Written once for each batch before the advantages, where the algorithm reads it.
      reads: what it reads: "tokens" of the batch; or "completion" or "steps", a text that the source shows it before
        there are scores, in tokens of its own tokenizer.
      value_head: whether its model gives numbers (True) or probabilities of tokens (False).
      learns: whether it needs a loss to be of use. One that does not is frozen, unless the algorithm gives it a loss.
      generates: whether it samples the rows. It also scores and trains by its own samples, and waits while critics
        warm up.
      model: directory of the model that it starts from; None: the model that the run starts from, or that of `flag`.
      flag: name of the flag that gives the directory of its model; "": none does.
      like: name of the role whose fields it writes; "": it writes its own. All roles that are like another have sources
        of their own, or train on rows of their own agents.
      sources: sources of prompts whose rows it scores; (): all.
      own_tokens: whether its model may have another tokenizer than the policy's: it scores the text, and what it writes
        is of spans (`teacher_span`).
      context_flag: name of the flag that gives it prompts of its own; with it the role may also start from the
        model that the run starts from. "": it has the policy's prompts.
      metric: name of its loss among the metrics; what is before "/" begins its other metrics too. "": ROLE/loss.
      mask: field of the batch that selects the tokens that it learns from.
      rate: its peak learning rate.
      messages: texts about it.

    Raises:
      ValueError: the attributes contradict each other; the message names the value and what would be right.
    """

    text: str
    writes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reads: str = "tokens"
    value_head: bool = False
    learns: bool = False
    generates: bool = False
    model: str | None = None
    flag: str = ""
    like: str = ""
    sources: tuple[str, ...] = ()
    own_tokens: bool = False
    context_flag: str = ""
    metric: str = ""
    mask: str = "mask"
    rate: RateRule = RateRule()  # noqa: RUF009  (immutable)
    messages: RoleMessages = RoleMessages()  # noqa: RUF009

    def __post_init__(self):
        if self.reads not in READS:
            raise ValueError(f"RoleKind(reads={self.reads!r}): it reads one of {', '.join(READS)}")
        outputs = VALUE_OUTPUTS if self.value_head else LOGP_OUTPUTS
        for field, output in self.writes.items():
            if output not in outputs:
                head = "with a value head" if self.value_head else "without a value head"
                raise ValueError(
                    f"RoleKind(writes={{{field!r}: {output!r}}}): a model {head} gives {', '.join(outputs)}; "
                    f"name one of them, or set value_head={not self.value_head}"
                )
        if self.metric and self.metric.count("/") != 1:
            raise ValueError(f"RoleKind(metric={self.metric!r}): it is PREFIX/NAME, such as 'grader/loss'")

    @property
    def scores_completions(self) -> bool:
        """True if the source shows it completions, before there are scores."""
        return self.reads != "tokens"

    def loss_metric(self, name: str) -> str:
        """Name of the loss of a role of this kind among the metrics."""
        return self.metric or f"{name}/loss"

    def origin(self, directory: str, name: str) -> str:
        """The flag or the declaration by which the role `name` has the model of a directory."""
        return f"--{self.flag}={directory}" if self.flag else f"RoleKind(model={directory!r}) of the role {name!r}"

    def advice(self, name: str) -> str:
        """Advice where a number that the role `name` wrote is not finite."""
        if self.messages.odd:
            return self.messages.odd
        cause = "a lower --lr may prevent it" if self.learns else "its weights may be damaged"
        return f"the {name} gave it; {cause}"


class RoleTable(dict[str, RoleKind]):
    """Kinds of roles by name, in the order in which roles score. It is never changed; `extended` gives a new one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def extended(self, roles: Mapping[str, RoleKind]) -> RoleTable:
        """The table with further kinds.

        Raises:
          ValueError: a name is declared already, or a kind is not one that an algorithm can bring.
        """
        for name, kind in roles.items():
            if not isinstance(kind, RoleKind):
                raise ValueError(f"role {name!r} is declared as {kind!r}: give RoleKind(text, writes={{...}})")
            if not name.isidentifier() or name.startswith("_"):
                raise ValueError(f"{name!r} cannot name a role: give a Python identifier without a leading underscore")
            if name == BASE:
                raise ValueError(f"role {name!r}: a run names the frozen weights under adapters so; give another name")
            if name in self:
                raise ValueError(f"role {name!r} is declared already: {self[name].text}; give yours another name")
            if kind.like and kind.like not in self:
                raise ValueError(f"role {name!r} is like {kind.like!r}, which is not one of {', '.join(self)}")
            if kind.generates:
                raise ValueError(
                    f"role {name!r} generates, and so does {self.generating(self)!r}: leave generates=True out"
                )
            if kind.scores_completions:
                raise ValueError(
                    f"role {name!r} reads {kind.reads!r}: a role of one's own reads the batch's tokens "
                    "(reads='tokens'); a reward function, --reward_model or --process_reward_model reads completions"
                )
        return RoleTable({**self, **roles})

    def generating(self, names: Collection[str]) -> str | None:
        """The one of these roles that generates; None: none does."""
        return next((name for name in names if name in self and self[name].generates), None)

    def by_flag(self) -> dict[str, RoleKind]:
        """The kinds whose model a flag gives, by the flag's name."""
        return {kind.flag: kind for kind in self.values() if kind.flag}


ROLES = RoleTable(
    policy=RoleKind(
        "the trainer, from the policy before the first update on the batch",
        writes={"old_logp": "logp", "old_entropy": "entropy", "sum_pi_squared": "sum_pi_squared"},
        learns=True,
        generates=True,
        metric="actor/pg_loss",
        messages=RoleMessages(
            "a policy",
            "the policy itself gave it; a lower --lr may prevent it",
        ),
    ),
    critic=RoleKind(
        "a critic",
        writes={"value": "values"},
        value_head=True,
        learns=True,
        metric="critic/vf_loss",
        rate=RateRule("critic_lr", 2.0),
        messages=RoleMessages(
            "a critic, which ppo, vapo and sao train", "the critic gave it; a lower --critic_lr may prevent it"
        ),
    ),
    implicit_reward=RoleKind(
        "an implicit reward model, as PRIME trains one",
        writes={"implicit_logp": "logp"},
        learns=True,
        mask="sampled",
        rate=RateRule("implicit_reward_lr"),
        messages=RoleMessages(
            "an implicit reward model, which prime trains",
            "the implicit reward model gave it; a lower --implicit_reward_lr may prevent it",
        ),
    ),
    reference=RoleKind(
        "a frozen reference",
        writes={"ref_logp": "logp"},
        messages=RoleMessages(odd="the reference gave it; its weights, those of --model, may be damaged"),
    ),
    teacher=RoleKind(
        "a teacher",
        writes={"teacher_logp": "logp", "teacher_topk": "topk", "teacher_topk_logp": "topk_logp"},
        flag="teacher",
        own_tokens=True,
        context_flag="teacher_context",
        messages=RoleMessages(
            "an algorithm that reads a teacher, as distillation and gkd do",
            "the teacher gave it; its weights, those of --teacher, may be damaged",
        ),
    ),
    reward_model=RoleKind("a reward model", reads="completion", value_head=True, flag="reward_model"),
    process_reward_model=RoleKind(
        "a process reward model", reads="steps", value_head=True, flag="process_reward_model"
    ),
)
SCORING_ROLES = tuple(name for name, kind in ROLES.items() if kind.scores_completions)
