"""`funrl import` gives TRL's and verl's losses: their documented formulas against the recipe of the imported file."""

import math

import pytest
import torch
from imported_batch import (
    by_group,
    composed,
    grouped,
    loss_of,
    paired,
    read,
    sequence_mean,
    sequence_sum,
    token_mean,
    with_gradient,
)
from torch.nn.functional import logsigmoid, relu

ONE = {"max_steps": 10}  # the length of a run, which every configuration of TRL says here
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 3, "trainer.total_training_steps": 5}
ONCE = {"data.train_batch_size": 64, f"{ACTOR}.ppo_mini_batch_size": 64}  # one update a batch


def same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


def either(condition, yes, no):
    return torch.where(condition, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64))


# ---- TRL: completions


def trl_grpo(batch, logp, **config):
    """GRPOTrainer's loss, by its documentation."""
    mask, loss_type = batch.mask, config.get("loss_type", "dapo")
    scaled = config.get("scale_rewards", "group") == "group"
    a = by_group(batch.score, 1e-4 if scaled else None)[:, None]
    moved = logp - batch.old_logp
    if config.get("importance_sampling_level") == "sequence":
        moved = ((moved * mask).sum(1) / mask.sum(1))[:, None].expand_as(logp)
    r = moved.exp()
    low = config.get("epsilon", 0.2)
    high = config.get("epsilon_high", low)
    if loss_type == "cispo":
        loss = -r.clamp(max=high).detach() * a * logp
    elif loss_type == "sapo":
        tau = either(a > 0, config.get("sapo_temperature_pos", 1.0), config.get("sapo_temperature_neg", 1.05))
        loss = -torch.sigmoid(tau * (r - 1)) * 4 / tau * a
    else:
        loss = -torch.minimum(r.clamp(max=config.get("delta", math.inf)) * a, r.clamp(1 - low, 1 + high) * a)
    if beta := config.get("beta", 0.0):
        gap = batch.ref_logp - logp
        kl = gap.exp() - gap - 1
        loss = loss + beta * (kl * r if config.get("use_bias_correction_kl", True) else kl)
    reduced = {"grpo": sequence_mean, "sapo": sequence_mean, "dr_grpo": lambda x, m: (x * m).sum() / (len(x) * 64)}.get(
        loss_type, token_mean
    )(loss, mask)
    return reduced - config.get("entropy_coef", 0.0) * token_mean(batch.entropy, mask)


GRPO = [
    {},
    {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.3},
    {"loss_type": "bnpo"},
    {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 64},
    {"delta": 1.4},
    {"beta": 0.04},
    {"beta": 0.04, "use_bias_correction_kl": False, "loss_type": "grpo"},
    {"loss_type": "cispo", "epsilon_high": 5.0},
    {"loss_type": "cispo", "epsilon_high": 1.1, "beta": 0.1},
    {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3, "beta": 0.04},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
    {"entropy_coef": 0.02},
    {"entropy_coef": 0.02, "loss_type": "cispo", "epsilon_high": 2.0},
]


@pytest.mark.parametrize("config", GRPO, ids=str)
def test_losses_of_grpo_in_trl(config, tmp_path):
    batch, logp = grouped()
    translation = read(tmp_path, ONE | {"num_generations": 8} | config)
    assert translation.lost == []
    same(loss_of(composed(translation), batch, logp), with_gradient(lambda x: trl_grpo(batch, x, **config), logp))


@pytest.mark.parametrize("config", [{}, {"normalize_advantages": True}, {"beta": 0.3, "epsilon": 0.1}], ids=str)
def test_losses_of_rloo_in_trl(config, tmp_path):
    batch, logp = grouped()
    translation = read(tmp_path, ONE | config, "rloo")
    kl = ((batch.old_logp - batch.ref_logp) * batch.mask).sum(1)
    rewards = (batch.score - config.get("beta", 0.05) * kl).view(2, 3)
    a = (rewards - (rewards.sum(1, keepdim=True) - rewards) / 2).flatten()
    if config.get("normalize_advantages"):
        a = (a - a.mean()) / (a.std() + 1e-4)
    eps = config.get("epsilon", 0.2)

    def theirs(x):
        r = ((x - batch.old_logp) * batch.mask).sum(1).exp()
        return -torch.minimum(r * a, r.clamp(1 - eps, 1 + eps) * a).mean()

    assert translation.lost == []
    same(loss_of(composed(translation), batch, logp), with_gradient(theirs, logp))


# ---- TRL: preferences


def trl_dpo(batch, logp, **config):
    """DPOTrainer's loss, by its documentation."""
    mask, beta, eps = batch.mask, config.get("beta", 0.1), config.get("label_smoothing", 0.0)
    lengths = mask.sum(1)
    kept = mask.double()
    if (alpha := config.get("ld_alpha")) is not None:
        shared = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)[:, None]
        kept = torch.where(mask.cumsum(1) > shared, alpha, 1.0) * mask
    policy, reference = (logp * kept).sum(1), (batch.ref_logp * kept).sum(1)
    ratio = policy - reference
    c, r = ratio[0::2], ratio[1::2]
    kind = config.get("f_divergence_type", "reverse_kl")
    score = {
        "reverse_kl": lambda h: h,
        "forward_kl": lambda h: 1 - (-h).exp(),
        "js_divergence": lambda h: math.log(2) + logsigmoid(h),
    }[kind]
    d = score(c) - score(r)
    mean = score(c) / lengths[0::2] - score(r) / lengths[1::2]
    q, p = torch.sigmoid(beta * d), torch.sigmoid(-beta * d)
    smooth = lambda x: -logsigmoid(beta * x) * (1 - eps) - logsigmoid(-beta * x) * eps  # noqa: E731
    wide = torch.sort(policy[0::2] - policy[1::2]).values - torch.sort(reference[0::2] - reference[1::2]).values
    gate = torch.sigmoid(beta * d / 0.05)
    losses = {
        "sigmoid": lambda: -logsigmoid(beta * d),
        "hinge": lambda: relu(1 - beta * d),
        "ipo": lambda: (mean - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -logsigmoid(beta * mean),
        "exo_pair": lambda: q * (q.log() - math.log(1 - eps)) + p * (p.log() - math.log(eps)),
        "nca_pair": lambda: -logsigmoid(beta * c) - 0.5 * logsigmoid(-beta * c) - 0.5 * logsigmoid(-beta * r),
        "robust": lambda: (-(1 - eps) * logsigmoid(beta * d) + eps * logsigmoid(-beta * d)) / (1 - 2 * eps),
        "bco_pair": lambda: -logsigmoid(beta * c) - logsigmoid(-beta * r),
        "sppo_hard": lambda: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "aot": lambda: smooth(wide),
        "aot_unpaired": lambda: smooth(torch.sort(c).values - torch.sort(r).values),
        "apo_zero": lambda: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * (c - r)),
        "discopop": lambda: -logsigmoid(beta * d) * (1 - gate) + (-beta * d).exp() * gate,
    }
    (name,) = config.get("loss_type", ["sigmoid"])
    loss = losses[name]()
    if config.get("use_weighting"):
        means = ((logp - batch.sum_pi_squared.log()) * mask).sum(1).detach() / lengths
        loss = loss * (means[0::2] + means[1::2]).exp()
    return loss.mean()


DPO = [
    *({"loss_type": [name]} for name in ("sigmoid", "hinge", "ipo", "nca_pair", "robust", "bco_pair", "sppo_hard")),
    *({"loss_type": [name]} for name in ("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm")),
    {"loss_type": ["exo_pair"], "label_smoothing": 0.1, "beta": 0.3},
    {"loss_type": ["robust"], "label_smoothing": 0.2},
    {"loss_type": ["aot_unpaired"], "label_smoothing": 0.2},
    {"loss_type": ["sigmoid"], "label_smoothing": 0.2},
    {"loss_type": ["hinge"], "label_smoothing": 0.2},
    {"loss_type": ["nca_pair"], "label_smoothing": 0.2},
    *({"f_divergence_type": kind} for kind in ("forward_kl", "js_divergence")),
    {"f_divergence_type": "js_divergence", "f_alpha_divergence_coef": 0.25},
    {"ld_alpha": 0.5},
    {"ld_alpha": 0.5, "loss_type": ["ipo"]},
    {"use_weighting": True},
]


@pytest.mark.parametrize("config", DPO, ids=str)
def test_losses_of_dpo_in_trl(config, tmp_path):
    batch, logp = paired()
    translation = read(tmp_path, ONE | config, "dpo")
    assert translation.lost == []
    same(loss_of(composed(translation), batch, logp), with_gradient(lambda x: trl_dpo(batch, x, **config), logp))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_of_kto_in_trl(loss, tmp_path):
    batch, logp = paired()
    config = {"loss_type": loss, "beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    good, z = batch.label[:, 0] > 0.5, 0.3 if loss == "kto" else 0.0

    def theirs(x):
        h = ((x - batch.ref_logp) * batch.mask).sum(1)
        return torch.where(
            good, 1.5 * (1 - torch.sigmoid(0.2 * (h - z))), 0.5 * (1 - torch.sigmoid(0.2 * (z - h)))
        ).mean()

    translation = read(tmp_path, ONE | config)
    assert translation.lost == []
    same(loss_of(composed(translation), batch, logp), with_gradient(theirs, logp))


CPO = [
    {"loss_type": "sigmoid", "cpo_alpha": 0.5, "beta": 0.2},
    {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7, "beta": 2.0},
    {"loss_type": "alphapo", "alpha": 0.25, "simpo_gamma": 0.1, "beta": 2.5},
]


@pytest.mark.parametrize("config", CPO, ids=str)
def test_losses_of_cpo_in_trl(config, tmp_path):
    batch, logp = paired()
    translation = read(tmp_path, ONE | config, "cpo")

    def theirs(x):
        h = (x * batch.mask).sum(1)
        if config["loss_type"] == "sigmoid":
            likelihood = -x[0::2][batch.mask[0::2]].mean()
            return -logsigmoid(config["beta"] * (h[0::2] - h[1::2])).mean() + config["cpo_alpha"] * likelihood
        h = h / batch.mask.sum(1)
        if alpha := config.get("alpha"):
            h = (1 - h.exp() ** -alpha) / alpha
        return -logsigmoid(config["beta"] * (h[0::2] - h[1::2] - config["simpo_gamma"] / config["beta"])).mean()

    assert translation.lost == []
    same(loss_of(composed(translation), batch, logp), with_gradient(theirs, logp))


@pytest.mark.parametrize("loss", ["nll", "dft"])
def test_losses_of_sft_in_trl(loss, tmp_path):
    batch, logp = grouped()
    translation = read(tmp_path, ONE | {"loss_type": loss}, "sft")
    weight = logp.exp() if loss == "dft" else 1.0
    assert translation.lost == []
    want = with_gradient(lambda x: token_mean(-weight * x, batch.mask), logp)
    same(loss_of(composed(translation), batch._replace(score=None), logp), want)


def test_the_loss_of_a_reward_model_in_trl(tmp_path):
    batch, x = paired()
    translation = read(tmp_path, ONE | {"center_rewards_coefficient": 0.1})
    last = batch.mask.sum(1) - 1

    def theirs(x):
        reward = x[torch.arange(6), last]
        c, r = reward[0::2], reward[1::2]
        return -logsigmoid(c - r).mean() + 0.1 * ((c + r) ** 2).mean()

    assert translation.lost == []
    same(loss_of(composed(translation), batch, x, "reward_model"), with_gradient(theirs, x))


# ---- verl


def verl_loss(batch, logp, a, config, reduce):
    """A policy loss of verl, by its documentation, with its entropy bonus and KL."""
    low, high = config.get(f"{ACTOR}.clip_ratio_low", 0.2), config.get(f"{ACTOR}.clip_ratio_high", 0.2)
    cap, mode = config.get(f"{ACTOR}.clip_ratio_c", 3.0), config.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    mask, r = batch.mask, (logp - batch.old_logp).exp()
    p, q = logp.detach().exp(), batch.old_logp.exp()
    if mode == "vanilla":
        loss = torch.maximum(-a * r, -a * r.clamp(1 - low, 1 + high))
        loss = torch.where(a < 0, torch.minimum(loss, -a * cap), loss)
    elif mode == "gspo":
        s = ((logp - batch.old_logp) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        s = (s.detach() + logp - logp.detach()).exp()
        loss = torch.maximum(-a * s, -a * s.clamp(1 - low, 1 + high))
    elif mode == "sapo":
        tau = either(a > 0, config.get(f"{ACTOR}.tau_pos", 1.0), config.get(f"{ACTOR}.tau_neg", 1.05))
        loss = -a * torch.sigmoid(tau * (r - 1)) * 4 / tau
    elif mode == "cispo":
        loss = -r.clamp(1 - low, 1 + high).detach() * a * logp
    else:
        if mode == "dppo_tv":
            near = torch.where(a > 0, p - q <= high, p - q >= -low)
        else:
            kl = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            near = torch.where(a > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
        loss = -a * r.clamp(max=cap).detach() * logp * near
    total = reduce(loss, mask) - config.get(f"{ACTOR}.entropy_coeff", 0.0) * reduce(batch.entropy, mask)
    if config.get(f"{ACTOR}.use_kl_loss"):
        gap = batch.ref_logp - logp
        kl = {"low_var_kl": gap.exp() - gap - 1, "mse": gap**2 / 2}[config.get(f"{ACTOR}.kl_loss_type", "low_var_kl")]
        total = total + config.get(f"{ACTOR}.kl_loss_coef", 0.001) * reduce(kl, mask)
    return total


MODE, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
OF_GROUPS = [
    ({f"{ACTOR}.clip_ratio_c": 1.3, f"{ACTOR}.clip_ratio_high": 0.28}, token_mean),
    ({AGGREGATION: "seq-mean-token-mean", f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.3}, sequence_mean),
    ({f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_type": "mse", f"{ACTOR}.entropy_coeff": 0.1}, token_mean),
    ({MODE: "gspo", AGGREGATION: "seq-mean-token-mean", f"{ACTOR}.clip_ratio_low": 3e-4}, sequence_mean),
    ({MODE: "sapo", f"{ACTOR}.tau_pos": 0.8}, sequence_mean),
    ({MODE: "cispo", f"{ACTOR}.clip_ratio_low": 0.9, f"{ACTOR}.clip_ratio_high": 0.5}, token_mean),
    ({MODE: "dppo_tv", f"{ACTOR}.clip_ratio_low": 0.05, f"{ACTOR}.clip_ratio_high": 0.1}, token_mean),
    ({MODE: "dppo_kl", f"{ACTOR}.clip_ratio_low": 0.02, f"{ACTOR}.clip_ratio_high": 0.03}, token_mean),
]


@pytest.mark.parametrize(("config", "reduce"), OF_GROUPS, ids=[str(config) for config, _ in OF_GROUPS])
def test_losses_of_groups_in_verl(config, reduce, tmp_path):
    batch, logp = grouped()
    translation = read(tmp_path, VERL | config)
    a = by_group(batch.score, 1e-6)[:, None].expand_as(logp)
    assert translation.lost == []
    same(
        loss_of(composed(translation), batch, logp),
        with_gradient(lambda x: verl_loss(batch, x, a, config, reduce), logp),
    )


def test_dppo_in_verl_with_the_engine_as_sampler(tmp_path):
    batch, logp = grouped()
    config = {MODE: "dppo_tv", "algorithm.rollout_correction.bypass_mode": True}
    translation = read(tmp_path, VERL | config)
    a, bypassed = by_group(batch.score, 1e-6)[:, None].expand_as(logp), batch._replace(old_logp=batch.rollout_logp)
    assert translation.lost == []
    want = with_gradient(lambda x: verl_loss(bypassed, x, a, config, token_mean), logp)
    same(loss_of(composed(translation), batch, logp), want)


def test_dr_grpo_in_verl(tmp_path):
    batch, logp = grouped()
    config = {
        "algorithm.norm_adv_by_std_in_grpo": False,
        AGGREGATION: "seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor": 32,
        "data.max_response_length": 32,
        **ONCE,
    }
    translation = read(tmp_path, VERL | config)
    a, exact = by_group(batch.score, None)[:, None].expand_as(logp), batch.old_logp  # one update: all ratios are 1

    def theirs(x):
        return verl_loss(batch, x, a, config, lambda loss, mask: (loss * mask).sum() / (len(loss) * 32))

    assert translation.flags["experiment"] == "dr_grpo" and translation.lost == []
    same(loss_of(composed(translation), batch, exact), with_gradient(theirs, exact))


def whitened(x, mask):
    mean = x[mask].mean()
    return torch.where(mask, (x - mean) / (x[mask].var() + 1e-8).sqrt(), 0.0)


def token_rewards(batch, kl_coef):
    """The score at the last token, less the KL of every token."""
    rewards = -kl_coef * (batch.old_logp - batch.ref_logp) * batch.mask
    rewards[torch.arange(6), batch.mask.sum(1) - 1] += batch.score
    return rewards


def to_go(rewards, gamma):
    out, running = torch.zeros_like(rewards), torch.zeros(6, dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        running = rewards[:, t] + gamma * running
        out[:, t] = running
    return out


KL = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.2}


def test_ppo_in_verl(tmp_path):
    batch, logp = grouped()
    config = KL | {"algorithm.gamma": 0.9, "algorithm.lam": 0.8, "critic.cliprange_value": 0.1}
    translation = read(tmp_path, VERL | config | {"algorithm.adv_estimator": "gae"})
    rewards, values, mask = token_rewards(batch, 0.2), batch.value, batch.mask
    a, following, running = torch.zeros_like(rewards), torch.zeros(6).double(), torch.zeros(6).double()
    for t in reversed(range(7)):
        error = rewards[:, t] + 0.9 * following - values[:, t]
        running = torch.where(mask[:, t], error + 0.72 * running, running)
        following = torch.where(mask[:, t], values[:, t], following)
        a[:, t] = running
    returns = a + values
    weighed = whitened(a, mask)
    algorithm = composed(translation)
    assert translation.lost == []
    same(
        loss_of(algorithm, batch, logp), with_gradient(lambda x: verl_loss(batch, x, weighed, config, token_mean), logp)
    )

    def value_loss(x):
        near = x.clamp(values - 0.1, values + 0.1)
        return 0.5 * token_mean(torch.maximum((x - returns) ** 2, (near - returns) ** 2), mask)

    predicted = values + 0.2 * logp
    same(loss_of(algorithm, batch, predicted, "critic"), with_gradient(value_loss, predicted))


OTHERS = [  # estimator, configuration, advantage, reduction; one update a batch, so all ratios are 1
    (
        "reinforce_plus_plus",
        KL | {"algorithm.gamma": 0.9},
        lambda b: whitened(to_go(token_rewards(b, 0.2), 0.9), b.mask),
        token_mean,
    ),
    (
        "reinforce_plus_plus_baseline",
        {},
        lambda b: whitened(by_group(b.score, None)[:, None].expand(6, 7), b.mask),
        token_mean,
    ),
    (
        "rloo",
        KL | {AGGREGATION: "seq-mean-token-sum"},
        lambda b: 1.5 * by_group(token_rewards(b, 0.2).sum(1), None)[:, None].expand(6, 7),
        sequence_sum,
    ),
    (
        "rloo_vectorized",
        {AGGREGATION: "seq-mean-token-sum"},
        lambda b: 1.5 * by_group(b.score, None)[:, None].expand(6, 7),
        sequence_sum,
    ),
    (
        "remax",
        KL | {AGGREGATION: "seq-mean-token-sum"},
        lambda b: to_go(token_rewards(b, 0.2), 1.0) - b.greedy_score[:, None],
        sequence_sum,
    ),
]


@pytest.mark.parametrize(("estimator", "config", "advantage", "reduce"), OTHERS, ids=[row[0] for row in OTHERS])
def test_other_estimators_in_verl(estimator, config, advantage, reduce, tmp_path):
    batch, _ = grouped()
    exact = batch.old_logp
    translation = read(tmp_path, VERL | ONCE | config | {"algorithm.adv_estimator": estimator})
    a = advantage(batch)
    assert translation.lost == []
    same(
        loss_of(composed(translation), batch, exact),
        with_gradient(lambda x: verl_loss(batch, x, a, config, reduce), exact),
    )
