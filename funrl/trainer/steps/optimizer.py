"""The weights that do not learn, or do not decay, beside others of the same model that do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from funrl import trees
from funrl.models import Model
from funrl.models.lora import plain_name
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings
from funrl.trainer.steps.router_losses import BIAS

FREEZE_NONE = "none"
ATTENTION = "attention"  # in --freeze: all attention weights, whatever a model calls their part of a layer
ATTENTION_PARTS = frozenset({"attn", "attention", "self_attn", "self_attention"})
WITHOUT_GRADIENT = (BIAS, "layer_scale")  # last parts of names


def with_gradient(params: trees.Tree) -> trees.Tree:
    """A tree like the weights, false for weights that no gradient moves, which would only decay."""
    return trees.map_named(lambda name, _: name.rsplit("/", 1)[-1] not in WITHOUT_GRADIENT, params)


def is_constant(name: str, model: Model, beginnings: tuple[str, ...]) -> bool:
    """True of the name of a weight that never has a gradient: it is frozen, or the model reads it detached.

    Args:
      model: whose weight it is; a module of transformers may train one of any name.
      beginnings: of the names of its frozen weights.
    """
    if is_frozen(name, beginnings):
        return True
    return name.rsplit("/", 1)[-1] in WITHOUT_GRADIENT and not model.abilities.code


def frozen_beginnings(settings: Settings, model: Model, role: str) -> tuple[str, ...]:
    """Prefixes of the names of a role's weights that --freeze holds, by default the model's own.

    Adapters stand on weights that are all frozen, so there is nothing to add; a module's buffers never learn.
    """
    parts = {} if model.owned is None else model.owned.frozen
    constant = model.abilities.constant
    if model.adapters is not None:
        return ()
    words = _words(settings, role)
    if words is None:
        return (*constant, *(beginning for beginnings in parts.values() for beginning in beginnings))
    if words == [FREEZE_NONE]:
        return constant
    return (*constant, *(x for word in words for x in parts.get(word, (word,))))


def _words(settings: Settings, role: str) -> list[str] | None:
    """Parts that --freeze names for a role: those without a role, and its own; None: no word is about it."""
    pairs = [word.strip().rpartition(":") for word in (settings.optimization.freeze or "").split(",")]
    words = [part for owner, _, part in pairs if owner in ("", role)]
    return None if settings.optimization.freeze is None or not words else words


def check_freeze(settings: Settings, models: Mapping[str, Model]) -> None:
    """Check --freeze against the models that learn; one of them may lack a part, as a critic has no `unembed`.

    Args:
      models: by role.

    Raises:
      SettingsError: no weight has this name, a role would learn nothing, or adapters learn alone.
    """
    given = settings.optimization.freeze
    if given is None or given == FREEZE_NONE:
        return
    names = {role: [plain_name(name) for name, _ in trees.named(model.shapes)] for role, model in models.items()}
    for word in given.split(","):
        owner, colon, part = word.strip().rpartition(":")
        if colon and owner not in models:
            raise SettingsError(f"--freeze={given}: no {owner or 'role'} learns; there are {', '.join(sorted(models))}")
        if part == FREEZE_NONE:
            raise SettingsError(f"--freeze={given}: none stands alone; name parts, or leave it out")
        roles = {owner: models[owner]} if colon else models
        parts = {role: {} if model.owned is None else model.owned.frozen for role, model in roles.items()}
        if not part or not any(
            is_frozen(name, parts[role].get(part, (part,))) for role in roles for name in names[role]
        ):
            tops = {name.split("/")[0] for role in roles for name in names[role]}
            known = ", ".join(sorted({ATTENTION, *tops}.union(*parts.values())))
            raise SettingsError(f"--freeze={given}: no weight's name begins with {part!r}; there are {known}")
    for role, model in models.items():
        if all(is_frozen(name, frozen_beginnings(settings, model, role)) for name in names[role]):
            raise SettingsError(f"--freeze={given}: nothing would learn in the {role}")


def is_frozen(name: str, beginnings: tuple[str, ...]) -> bool:
    """True of the name of a weight that is one of some, or is inside one of these parts."""
    name = plain_name(name)
    if ATTENTION in beginnings and not ATTENTION_PARTS.isdisjoint(re.split("[/.]", name)):
        return True
    return any(name == beginning or name.startswith(f"{beginning}/") for beginning in beginnings)


def with_frozen(params: trees.Tree, beginnings: tuple[str, ...]) -> trees.Tree:
    """The weights, without gradients for names with these prefixes."""
    if not beginnings:
        return params
    return trees.map_named(lambda name, x: x.detach() if is_frozen(name, beginnings) else x, params)


def learns(params: trees.Tree, beginnings: tuple[str, ...]) -> trees.Tree:
    """A tree like the weights, true where they learn."""
    return trees.map_named(lambda name, _: not is_frozen(name, beginnings), params)
