"""Which algorithms may learn from rows of older policies: by what their policy loss depends on, not by their names."""

from dataclasses import replace

import pytest

from funrl.algos import (
    NAMES,
    clipped_importance,
    clipped_surrogate,
    corrected,
    importance_weights,
    reads,
    recipe,
    reduce,
    reject_ratio,
    token_mean,
    token_ratio,
)
from funrl.asynchrony.behaviour import StaleLossError, check_behaviour, reads_behaviour

# Recipes whose ratio is to the engine that sampled.
CORRECTED = {"dppo", "m2po", "rollout_is", "sao", "scalerl", "flash_reinforce", "mopd"}


def accepted(algorithm):
    try:
        check_behaviour(algorithm, staleness=2)
    except StaleLossError:
        return False
    return True


def generating(name):
    algorithm = recipe(name)()
    return algorithm.role_kinds.generating(algorithm.losses)


@pytest.mark.parametrize("name", [name for name in NAMES if generating(name)])
def test_every_recipe(name):
    algorithm = recipe(name)()
    assert accepted(algorithm) == (name in CORRECTED)
    check_behaviour(algorithm, staleness=0)


def decoupled_ppo():
    """AReaL's: clips around the recomputed policy, times importance weights to the one that sampled."""
    return corrected(recipe("ppo")(), importance_weights("token", high=5.0))


def icepop():
    return corrected(recipe("grpo")(), reject_ratio("token", 0.5, 5.0), importance_weights("token", 0, 5.0))


COMPOSED = {
    "decoupled PPO": decoupled_ppo,
    "truncated importance sampling": lambda: corrected(recipe("grpo")(), importance_weights("token", high=2.0)),
    "of sequences": lambda: corrected(recipe("gspo")(), importance_weights("sequence", high=2.0)),
    "masked importance sampling": lambda: corrected(recipe("grpo")(), reject_ratio("token", in_denominator=True)),
    "of whole rows": lambda: corrected(recipe("grpo")(), reject_ratio("geometric", 0.99, 1.01)),
    "IcePop": icepop,
    "CISPO around the behaviour policy": lambda: replace(
        recipe("cispo")(),
        losses={"policy": reduce(clipped_importance(ratio=token_ratio("rollout_logp")), token_mean())},
    ),
    "CISPO, weighted": lambda: corrected(recipe("cispo")(), importance_weights("token", high=2.0)),
    "clips around the behaviour policy": lambda: replace(
        recipe("grpo")(), losses={"policy": reduce(clipped_surrogate(ratio=token_ratio("rollout_logp")), token_mean())}
    ),
    "a function of one's own": lambda: replace(
        recipe("grpo")(),
        losses={"policy": reduce(lambda x, b: (-b.advantage * (x - b.rollout_logp).exp(), {}), token_mean())},
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_correction_is_accepted(name):
    assert accepted(COMPOSED[name]())


def unweighted():
    """The chain makes weights, and the loss reads none of them."""
    policy = reduce(clipped_surrogate(), token_mean())
    return replace(corrected(recipe("grpo")(), importance_weights()), losses={"policy": policy})


def only_measured():
    """The loss reads the behaviour policy for a metric alone."""
    gap = lambda x, b: (-b.advantage * (x - b.old_logp).exp(), {"gap": b.old_logp - b.rollout_logp})  # noqa: E731
    return replace(recipe("grpo")(), losses={"policy": reduce(gap, token_mean())})


@pytest.mark.parametrize("compose", [unweighted, only_measured])
def test_what_does_not_reach_the_loss_is_no_correction(compose):
    algorithm = compose()
    assert "rollout_logp" in reads(algorithm).required
    assert not accepted(algorithm)


def test_the_message_names_a_correction():
    with pytest.raises(StaleLossError) as error:
        check_behaviour(recipe("grpo")(), staleness=2)
    assert "--staleness=2: rows may be 2 versions old, and the loss of 'policy' does not depend on rollout_logp" in str(
        error.value
    )
    assert 'corrected(algorithm, importance_weights("token", high=2.0))' in str(error.value)
    with pytest.raises(StaleLossError, match="it has no advantage chain to put a correction into"):
        check_behaviour(recipe("online_dpo")(), staleness=1)


def test_a_critic_may_read_what_it_likes():
    algorithm = decoupled_ppo()
    assert not reads_behaviour(recipe("ppo")(), algorithm.losses["critic"])
    check_behaviour(algorithm, staleness=1)
