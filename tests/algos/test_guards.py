"""Mistakes in a user's own pieces: each is reported by name before the first update, with the way out."""

import dataclasses
import re

import pytest
import torch
from pieces import example
from selection import unlike_recipes

from funrl import algos
from funrl.algos import Algorithm, Loss, Reduction, chain, check, reduce, stateless, token_mean
from funrl.fields import FIELDS

SOURCE = {"length", "group", "score", "truncated", "rollout_logp"}
STEP = {"old_logp", "entropy"}
AVAILABLE = SOURCE | STEP

to_tokens = algos.to_tokens()
group = chain(algos.group_center(), to_tokens)


def trained(term=None, advantage=group, reduction=None, **others):
    """An algorithm with one piece of a user's own."""
    return Algorithm(
        advantage, {"policy": reduce(term or algos.policy_gradient(), reduction or token_mean())}, **others
    )


def scalar_loss(logp, batch):
    return (-logp * batch.advantage).mean(), {}


def loss_per_row(logp, batch):
    return (-logp * batch.advantage).sum(1), {}


def no_metrics(logp, batch):
    return -logp * batch.advantage


def forgot_to_return(logp, batch):
    -logp * batch.advantage


def metric_per_row(logp, batch):
    return -logp * batch.advantage, {"mine": logp.sum(1)}


def float_metric(logp, batch):
    return -logp * batch.advantage, {"mine": 0.5}


def reads_returns(logp, batch):
    return -logp * batch.returns, {}


def reads_unknown(logp, batch):
    return -logp * batch.advantages, {}


def makes_terms(low=0.1, high=0.2):
    return lambda logp, batch: (logp * batch.advantage, {})


def makes_filters(threshold):
    return lambda batch: batch.score > threshold


def without_gradient(logp, batch):
    return -logp.detach() * batch.advantage, {}


def no_shift(x, batch):
    x - x.mean()


def no_signal(signal, state, batch):
    return signal


def long_chain(x, batch):
    return x * batch.kl_baseline.mean()


def breaks(logp, batch):
    return logp * batch.advantage[:, :20].reshape(3, 20), {}


def reads_entropy_below(batch):
    return (batch.entropy.sum(),)


def mean_of_own_tokens(x, batch):
    return x - x[batch.mask].mean()


def less_its_length(x, batch):
    return x - batch.mask.sum(1)


def long_ones(batch):
    return batch.mask.sum(1) > 3


def subtracts_in_place(logp, batch):
    logp.sub_(batch.old_logp)
    return -logp * batch.advantage, {}


def writes_to_a_view(logp, batch):
    logp.data.numpy()[:, 2] = 0.0
    return -logp * batch.advantage, {}


def zeroes_scores(x, batch):
    batch.score.zero_()
    return x


def clears_a_mask(signal, state, batch):
    signal.mask[0] = False
    return signal, state


def counts_in_place(signal, state, batch):
    state += 1
    return signal, state


def drops_scores(batch):
    batch.score[0] += 1
    return batch.score > 0


def too_wide(x, batch):
    return x + batch.mask.new_zeros(5)


plain = trained().losses["policy"]
AT = r"at .*test_guards.py:\d+"
BROKEN = {
    "a term that changes what another reads": (
        lambda: check(trained(algos.add(algos.policy_gradient(), subtracts_in_place)), AVAILABLE),
        rf"^term subtracts_in_place changes its input x in place {AT}: logp.sub_\(batch.old_logp\): later pieces",
    ),
    "a term that changes it where no version tells": (
        lambda: check(trained(writes_to_a_view), AVAILABLE),
        rf"term writes_to_a_view changes its input x in place {AT}: logp.data.numpy\(\)\[:, 2\] = 0.0: later pieces",
    ),
    "a piece that zeroes the scores": (
        lambda: check(trained(advantage=chain(stateless(zeroes_scores), to_tokens)), AVAILABLE),
        rf"piece zeroes_scores changes its input \S+ in place {AT}: batch.score.zero_\(\)",
    ),
    "a piece that changes the mask": (
        lambda: check(trained(advantage=chain(algos.Advantage(lambda: (), clears_a_mask), to_tokens)), AVAILABLE),
        rf"piece clears_a_mask changes its input signal.mask in place {AT}: signal.mask\[0\] = False",
    ),
    "a piece that counts in its state": (
        lambda: check(
            trained(advantage=chain(algos.Advantage(lambda: torch.zeros(()), counts_in_place), to_tokens)), AVAILABLE
        ),
        rf"piece counts_in_place changes its input state in place {AT}: state \+= 1",
    ),
    "a filter that changes the scores": (
        lambda: check(trained(filter=drops_scores), AVAILABLE),
        rf"the filter drops_scores changes its input batch.score in place {AT}: batch.score\[0\] \+= 1",
    ),
    "a piece of wrong shapes": (
        lambda: check(trained(advantage=chain(stateless(too_wide), to_tokens)), AVAILABLE),
        rf"cannot be run on the example batch .* in too_wide {AT}: return x \+ batch.mask.new_zeros\(5\): RuntimeError",
    ),
    "a misspelt field, with its line": (
        lambda: check(trained(reads_unknown), AVAILABLE),
        rf"in reads_unknown {AT}: return -logp \* batch.advantages, \{{\}}: AttributeError: a batch has no field",
    ),
    "a scalar loss, with the place of its term": (
        lambda: check(trained(scalar_loss), AVAILABLE),
        r"term scalar_loss gave .*; the reduction sums it \(.*test_guards.py:\d+\)$",
    ),
    "a mean over the tokens of a rank": (
        lambda: check(trained(advantage=chain(to_tokens, stateless(mean_of_own_tokens))), AVAILABLE),
        r"chain gives a rank that has the tokens of 2 of 4 rows a different .*\(other numbers\).*batch.across.sums",
    ),
    "a number of a rank's own rows for all": (
        lambda: check(trained(advantage=chain(stateless(less_its_length), to_tokens)), AVAILABLE),
        r"the advantage chain gives .*\(RuntimeError: The size of tensor a \(4\) must match .*batch.across.own\(x_B\)",
    ),
    "a filter by the tokens of a rank": (
        lambda: check(trained(filter=long_ones), AVAILABLE),
        r"the filter long_ones gives a rank that has the tokens of 2 of 4 rows a different result",
    ),
    "a term that gives a scalar": (
        lambda: check(trained(scalar_loss), AVAILABLE),
        r"term scalar_loss gave a tensor \[\] as its loss, for a batch of \[4, 8\]: a loss per token \[B, T\] is",
    ),
    "a term that gives a loss per row": (
        lambda: check(trained(loss_per_row), AVAILABLE),
        r"term loss_per_row gave a tensor \[4\] as its loss, .*: a loss per token",
    ),
    "no metrics dict": (
        lambda: check(trained(no_metrics), AVAILABLE),
        r"term no_metrics gave a loss and no metrics: return \(loss, \{\}\)",
    ),
    "no return": (
        lambda: check(trained(forgot_to_return), AVAILABLE),
        r"term forgot_to_return gave None: return \(loss per token, dict of metrics\)",
    ),
    "a term inside of others": (
        lambda: check(trained(algos.with_regularizers(forgot_to_return, 0.1)), AVAILABLE | {"ref_logp"}),
        "term forgot_to_return gave None",
    ),
    "a metric per row": (
        lambda: check(trained(metric_per_row), AVAILABLE),
        r"metric 'mine' of term metric_per_row is a tensor \[4\]: give a tensor \[B, T\]",
    ),
    "a metric that is a number": (
        lambda: check(trained(float_metric), AVAILABLE),
        "metric 'mine' of term float_metric is a float: give a tensor",
    ),
    "a term factory that was not called": (
        lambda: trained(algos.clipped_surrogate),
        r"the function clipped_surrogate is not a term: call it, clipped_surrogate\(...\)",
    ),
    "such a factory inside of others": (
        lambda: algos.add(algos.policy_gradient(), algos.scale(0.1, algos.kl_to_reference)),
        r"the function kl_to_reference is not a term: call it, kl_to_reference\(...\)",
    ),
    "a user's factory that was not called": (
        lambda: check(trained(makes_terms), AVAILABLE),
        r"makes_terms\(x, batch\) gave the function makes_terms: .*; call it, makes_terms\(...\)",
    ),
    "a ratio factory that was not called": (
        lambda: algos.clipped_surrogate(ratio=algos.sequence_ratio),
        r"the function sequence_ratio is not a ratio: call it, sequence_ratio\(...\)",
    ),
    "an advantage factory that was not called": (
        lambda: chain(algos.group_center, to_tokens),
        r"piece 1 of the chain is the function group_center .*: call it, group_center\(\)",
    ),
    "an algorithm of such a factory": (
        lambda: trained(advantage=algos.to_tokens),
        r"Algorithm.advantage is the function to_tokens .*: call it, to_tokens\(\)",
    ),
    "a reduction factory that was not called": (
        lambda: reduce(algos.policy_gradient(), token_mean),
        r"reduce was given the function token_mean as a reduction: call it, token_mean\(\)",
    ),
    "a filter factory that was not called": (
        lambda: trained(filter=algos.unequal_scores),
        r"the function unequal_scores is not a filter: call it, unequal_scores\(...\)",
    ),
    "a user's filter factory that was not called": (
        lambda: check(trained(filter=makes_filters), AVAILABLE),
        r"the filter makes_filters\(batch\) gave the function makes_filters: .*; call it, makes_filters\(...\)",
    ),
    "a loss that is not reduced": (
        lambda: Algorithm(group, {"policy": algos.policy_gradient()}),
        r"the loss of 'policy' is the function policy_gradient and not a loss: reduce\(term, token_mean\(\)\) turns",
    ),
    "a loss without a role": (
        lambda: Algorithm(group, reduce(algos.policy_gradient(), token_mean())),
        "Algorithm.losses is .*: it maps roles to losses",
    ),
    "terms where losses are summed": (
        lambda: algos.sum_losses(algos.policy_gradient()),
        "sum_losses was given the function policy_gradient; `add` is the sum of terms",
    ),
    "a chain that never comes to tokens": (
        lambda: check(trained(advantage=chain(algos.group_center())), AVAILABLE),
        r"the advantage chain ends with \[4\]: put to_tokens\(\) at its end",
    ),
    "a piece on tokens too early": (
        lambda: check(trained(advantage=chain(algos.whiten(), to_tokens)), AVAILABLE),
        r"a piece on token rewards \[B, T\] was given outcomes \[4\]",
    ),
    "a shaping function that returns nothing": (
        lambda: check(trained(advantage=chain(stateless(no_shift), to_tokens)), AVAILABLE),
        r"no_shift\(x, batch\) gave None: return the new x",
    ),
    "a piece that drops its state": (
        lambda: check(trained(advantage=chain(algos.Advantage(lambda: (), no_signal), to_tokens)), AVAILABLE),
        r"piece no_signal gave a Signal: return \(signal, state\)",
    ),
    "weights normalised before they are made": (
        lambda: check(
            trained(advantage=chain(algos.normalise_weights(), algos.importance_weights(), group)), AVAILABLE
        ),
        r"normalise_weights\(\) reads signal.weight, which importance_weights\(\) sets after it: put that piece first",
    ),
    "a baseline that goes by weights before they are made": (
        lambda: check(
            trained(
                advantage=chain(
                    algos.to_last_token(),
                    chain(algos.reward_to_go(), algos.optimal_token_baseline()),
                    algos.importance_weights(),
                )
            ),
            AVAILABLE | {"sum_pi_squared"},
        ),
        r"optimal_token_baseline\(\) reads signal.weight, which importance_weights\(\) sets after it",
    ),
    "weights that nothing makes": (
        lambda: check(trained(advantage=chain(algos.normalise_weights(), group)), AVAILABLE),
        r"batch.weight is missing; .* made by importance_weights\(\) .* \(read by normalise_weights\)",
    ),
    "a field that no piece of the chain writes, with the user's line": (
        lambda: check(trained(reads_returns), AVAILABLE),
        r"the loss of 'policy' cannot be computed: batch.returns is missing; it is written by a piece of the advantage "
        r"chain: the critic's target, made by gae\(\) \(read at .*test_guards.py:\d+: return -logp \* batch.returns",
    ),
    "a field that the run does not provide, in a lambda": (
        lambda: check(trained(lambda logp, batch: (logp - batch.ref_logp, {})), AVAILABLE),
        r"batch.ref_logp is missing; it is written by a frozen reference: nats \(read at .*test_guards.py:\d+: lambda",
    ),
    "a field that the run does not provide, in the chain": (
        lambda: check(trained(advantage=chain(stateless(long_chain), to_tokens)), AVAILABLE),
        r"the advantage chain cannot run: batch.kl_baseline is missing; .* \(read at .*: return x \* batch.kl_baseline",
    ),
    "a field that there is not": (
        lambda: check(trained(reads_unknown), AVAILABLE),
        "a batch has no field 'advantages'; did you mean 'advantage'",
    ),
    "a filter that reads what comes later": (
        lambda: check(trained(filter=lambda batch: batch.old_logp.sum(1) > 0), AVAILABLE),
        r"the filter .* cannot run on what the source gives: batch.old_logp is missing; it is written by the trainer",
    ),
    "a filter that gives scores": (
        lambda: check(trained(filter=lambda batch: batch.score), AVAILABLE),
        r"the filter .* gave a tensor \[4\]: one bool per row \[B\] is needed",
    ),
    "a loss that no gradient goes through": (
        lambda: check(trained(without_gradient), AVAILABLE),
        "the loss of 'policy' does not depend on any trained parameter: it has no gradient",
    ),
    "a denominator that the step would have to write": (
        lambda: check(
            Algorithm(group, {"policy": Loss(reads_entropy_below, trained().losses["policy"].numerators)}), AVAILABLE
        ),
        "the loss of 'policy' has no denominators: a denominator reads what only the step writes; batch.entropy",
    ),
    "more denominators than numerators": (
        lambda: check(
            trained(reduction=Reduction((token_mean() + token_mean()).denominators, token_mean().numerators)), AVAILABLE
        ),
        r"the loss of 'policy' gave numerators \[\[\]\] and denominators \[\[\], \[\]\]: equally many scalars are",
    ),
    "a piece that cannot take the example": (
        lambda: check(trained(breaks), AVAILABLE),
        r"the loss of 'policy' cannot be run on the example batch .*4 rows of 8 tokens.*: RuntimeError: ",
    ),
    "a divergence that is not said": (
        lambda: check(dataclasses.replace(algos.gkd(), divergence=None), AVAILABLE | {"divergence"}),
        r"a loss reads batch.divergence, but Algorithm.divergence is not set: give Divergence\(beta\)",
    ),
    "a divergence that nothing reads": (
        lambda: check(trained(divergence=algos.Divergence()), AVAILABLE),
        "Algorithm.divergence is set, but no loss reads batch.divergence",
    ),
    "corrections of what has no chain": (
        lambda: algos.corrected(algos.sft(), algos.mask_truncated()),
        "this algorithm has no advantage chain to put pieces before",
    ),
    "scores of PRIME outside of 0 to 1": (
        lambda: algos.apply_advantage(
            algos.prime().advantage, algos.prime().advantage.init(), example()._replace(score=torch.full((7,), 5.0))
        ),
        r"scores are from 5 to 5: label_outcomes\(\) needs scores from 0 to 1",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_piece_is_refused_before_the_first_update(name):
    broken, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as error:
        broken()
    assert re.search(r"\n", str(error.value)) is None, "a message is one line"


@pytest.mark.parametrize("name", algos.NAMES)
def test_every_recipe_passes_and_each_field_that_it_reads_is_named_where_it_is_missing(name):
    """Of recipes that read the same fields, one stands for all where they are missing."""
    algorithm = algos.recipe(name)()
    written = set(FIELDS) - set(FIELDS.by("advantage", "trainer"))
    check(algorithm, written)
    if name not in unlike_recipes():
        return
    for field in algos.reads(algorithm).required - {"tokens", "mask", "score"}:
        with pytest.raises(ValueError, match=rf"batch.{field} is missing; it is written by"):
            check(algorithm, written - {field})


def test_a_users_own_lambda_hides_nothing():
    term = lambda logp, batch: (batch.ref_logp - logp if batch.get("old_logp") is None else logp * batch.value, {})  # noqa: E731
    reads = algos.reads(trained(term).losses["policy"])
    assert reads.required == {"mask", "value"} and reads.optional == {"old_logp", "segments"}
    check(trained(term), {"ref_logp", "score", "group"})  # the other branch is taken where old_logp is not there
    with pytest.raises(ValueError, match=r"batch\.value is missing"):
        check(trained(term), {"old_logp", "ref_logp", "score", "group"})


def test_what_a_chain_makes_is_found_by_running_it():
    makes = {
        "advantage sampled": algos.grpo(),
        "advantage sampled returns": algos.ppo(),
        "advantage sampled label": algos.prime(),
        "advantage sampled returns imitated": algos.vapo(),
        "advantage sampled weight": algos.corrected(algos.grpo(), algos.importance_weights()),
    }
    for names, algorithm in makes.items():
        assert algos.run_advantage(algorithm.advantage).makes == set(names.split())
    assert "score" in algos.reads(algos.grpo()).required
    assert "score" not in algos.reads(algos.distillation()).required, "the teacher's opinion is all that counts"
    wrong = Algorithm(algos.grpo().advantage, algos.ppo().losses)
    assert algos.reads(wrong).required >= {"returns", "value"} and "returns" not in algos.reads(algos.ppo()).required
