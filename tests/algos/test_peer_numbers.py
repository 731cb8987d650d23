"""Numbers of TRL, of verl and of authors' code on small inputs, beside those of the recipes.

`peer_numbers.json` holds the inputs, and what these calls returned in float64, with torch 2.13 on a CPU, to 11 digits.
Methods were called unbound, with the attributes that they read; logits stand for forward passes. Gradients are those of
the policy's logits, of flowrl those of its log-probabilities and of log Z.

TRL 1.16.0, trl.experimental:
  iw_opd: IWOPDTrainer._compute_iw_opd_loss, temperature 1, iw_opd_gamma 0.5, iw_opd_epsilon 1e-8.
  iw_opd.jsd: IWOPDTrainer.generalized_jsd_loss.
  sdpo: SDPOTrainer.compute_loss, sampled_token, alpha 1, is_clip 2, loss_type grpo, weight 0.5 or, after a move, 1.
  sdpo.advantages: SDPOTrainer._prepare_training_batch, one group.
  sdft: SDFTTrainer.compute_loss, without log-probabilities of a rollout.
  sdft.per_token: sdpo.loss_utils.compute_topk_self_distillation_loss, alpha 0.
  gold.spans: utils.encode_with_byte_offsets, then ULDLoss._align_by_byte_offsets; two byte-level BPE tokenizers, the
    merges of the student spell "un", "likely" and an accented "e", those of the teacher "like", "ly!" and "caf".
  gold.merged: ULDLoss._merge_probabilities_with_alignment_groups, "bayesian", of the last token of each group.
verl 0.9.1:
  verl: core_algos.kl_penalty, compute_policy_loss_vanilla and agg_loss (token-mean, clip ratio 0.2) with the advantage
    -kl_penalty, as distillation.losses.distillation_loss has it; distillation.fsdp.losses.compute_forward_kl_topk.
  Masked means, and the advantages of flowrl: torch_functional and core_algos.compute_grpo_outcome_advantage.
NeMo-RL at 7ea279ab:
  nemo.mopd: OPDAdvantageEstimator.compute_advantage and ClippedPGLossFn.__call__, disable_ppo_ratio, icepop from 0.8 to
    1.3, means by sequence; the old logits are those of the engine.
Authors:
  flowrl.verl: FlowRLActor.compute_flowrl of verl-recipe at 48ea0a79.
  flowrl.authors: compute_flowrl_objective of Xuekai-Zhu/FlowRL at decbc57b, dp_actor.py, clip ratio 0.2.
  flowrl.geometric: compute_flowrl_objective_tis_clip of volcengine/verl at 11fba5b5, recipe/flowrl/functions.py, where
    it is commented out; clip ratios 0.1 and 0.04, no rollout weights.
  treepo: compute_tree_reinforce_plus_plus_baseline_outcome_advantage of multimodal-art-projection/TreePO at f0555239,
    one token a row.
"""

import itertools
import json
import pathlib

import pytest
import torch

from funrl.algos import Algorithm, apply_advantage
from funrl.algos.advantages.subtrees import subtree_baselines
from funrl.algos.advantages.teacher_rewards import teacher_advantage, weigh_early_tokens
from funrl.algos.applying import first_signal
from funrl.algos.core import chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean, token_mean
from funrl.algos.losses.teacher import divergence_to_teacher, forward_kl_topk
from funrl.algos.losses.token_terms import clipped_importance, policy_gradient
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.flowrl import flowrl
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.iw_opd import iw_opd
from funrl.algos.recipes.mopd import mopd
from funrl.algos.recipes.sdpo import sdpo
from funrl.batch import Batch
from funrl.compiled_kernels.linear_divergence import linear_divergence_reference
from funrl.data.spans import span_ends

PEERS = json.loads(pathlib.Path(__file__).with_name("peer_numbers.json").read_text())


def numbers(x):
    return torch.tensor(x, dtype=torch.float64)


STUDENT, OLD, TEACHER, SCORE = (
    numbers(PEERS["inputs"][name]) for name in ("student_logits", "old_logits", "teacher_logits", "score")
)
TOKENS = torch.tensor(PEERS["inputs"]["tokens"])
MASK = torch.arange(TOKENS.shape[1]) < torch.tensor(PEERS["inputs"]["lengths"])[:, None]


def log_probabilities(logits):
    return logits.log_softmax(-1).gather(-1, TOKENS[..., None])[..., 0]


def batch_of(mask=MASK, old=STUDENT, **fields):
    """One group, sampled by the policy with the old logits."""
    return Batch(
        tokens=TOKENS,
        mask=mask,
        group=torch.zeros(len(TOKENS), dtype=torch.int64),
        score=SCORE,
        old_logp=log_probabilities(old),
        teacher_logp=log_probabilities(TEACHER),
        **fields,
    )


def with_advantage(advantage, batch):
    return apply_advantage(advantage, advantage.init(), batch)[0]


def assert_gradient(loss, batch, peer, fields=lambda logits: {}, rtol=1e-9):
    """Compare the gradient of the logits, and return the loss."""
    logits = STUDENT.clone().requires_grad_()
    value, _ = loss(log_probabilities(logits), batch._replace(**fields(logits)))
    value.backward()
    torch.testing.assert_close(logits.grad, numbers(peer["gradient"]), rtol=rtol, atol=rtol / 10)
    return value.item()


def assert_trained(algorithm, batch, peer):
    return assert_gradient(algorithm.losses["policy"], with_advantage(algorithm.advantage, batch), peer)


# ---- IW-OPD


def test_iw_opd_has_trls_gradient_and_weights():
    peer = PEERS["iw_opd"]["on_policy"]
    batch = batch_of()
    assert_trained(iw_opd(gamma=0.5), batch, peer)
    plain, weighed = (
        with_advantage(x, batch).advantage[MASK]
        for x in (teacher_advantage("k1"), chain(teacher_advantage("k1"), weigh_early_tokens(0.5)))
    )
    weights = weighed / plain
    names = ("mean_advantage", "mean_weight", "min_weight", "max_weight")
    wanted = [peer["metrics"][f"iw_opd/{name}"] for name in names]
    measured = [weighed.mean(), weights.mean(), weights.min(), weights.max()]
    assert [x.item() for x in measured] == pytest.approx(wanted, rel=1e-9)


def test_iw_opd_after_a_move_differs_from_trl_by_the_ratio():
    """TRL has neither a ratio nor a clip: with -A log pi as the term, its loss is this one's."""
    peer = PEERS["iw_opd"]["after_a_move"]
    batch = with_advantage(iw_opd(gamma=0.5).advantage, batch_of(old=OLD))
    assert assert_gradient(reduce(policy_gradient(), token_mean()), batch, peer) == pytest.approx(
        peer["loss"], rel=1e-9
    )


# ---- divergences


def top_fields(logits):
    top = TEACHER.topk(2).indices
    teacher, student = (x.log_softmax(-1).gather(-1, top) for x in (TEACHER, logits))
    return {"teacher_topk_logp": teacher, "topk_logp": student}


def divergence_field(beta):
    def fields(logits):
        eye = torch.eye(logits.shape[-1], dtype=torch.float64)
        flat = linear_divergence_reference(logits.flatten(0, 1), eye, TEACHER.flatten(0, 1), eye, beta)
        return {"divergence": flat.view(logits.shape[:2])}

    return fields


def test_forward_kl_over_the_teachers_top_tokens_is_trls():
    peer = PEERS["iw_opd"]["jsd"]["forward_top2_rest"]
    loss = distillation(kind="forward", rest=True).losses["policy"]
    assert assert_gradient(loss, batch_of(), peer, top_fields) == pytest.approx(peer["loss"], rel=1e-9)


def test_gkd_is_trls_divergence_over_the_vocabulary():
    peer = PEERS["iw_opd"]["jsd"]["jsd_0.3"]
    value = assert_gradient(gkd(beta=0.3).losses["policy"], batch_of(), peer, divergence_field(0.3))
    assert value == pytest.approx(peer["loss"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "beta"), [("forward_whole", 0.0), ("divergence_0.3", 0.3), ("reverse_whole", 1.0)], ids=str
)
def test_sdft_over_the_vocabulary_is_a_divergence_by_sequence(name, beta):
    """TRL takes the mean of each completion first; `gkd` takes that of all tokens."""
    loss = reduce(divergence_to_teacher(), sequence_mean())
    value = assert_gradient(loss, batch_of(), PEERS["sdft"][name], divergence_field(beta))
    assert value == pytest.approx(PEERS["sdft"][name]["loss"], rel=1e-9)


def test_sdft_over_top_tokens_chooses_those_of_the_policy():
    """Equal with the rest where both models have the same top tokens. Without it TRL divides by the tokens' mass."""
    same = (STUDENT.topk(2).indices.sort().values == TEACHER.topk(2).indices.sort().values).all(-1)
    assert same.any() and not same.all()
    batch = batch_of(**top_fields(STUDENT))
    with_rest, plain = (forward_kl_topk(rest)(log_probabilities(STUDENT), batch)[0] for rest in (True, False))
    peer = numbers(PEERS["sdft"]["per_token_forward_top2_rest"])
    torch.testing.assert_close(with_rest[same], peer[same], rtol=1e-9, atol=1e-10)
    assert not torch.isclose(with_rest[~same], peer[~same], rtol=1e-3).any()
    teacher, student = (batch.get(name).logsumexp(-1) for name in ("teacher_topk_logp", "topk_logp"))
    raw = (batch.teacher_topk_logp.exp() * (batch.teacher_topk_logp - batch.topk_logp)).sum(-1)
    torch.testing.assert_close(plain, raw.clamp_min(0))
    renormalised = raw / teacher.exp() - teacher + student
    peer = numbers(PEERS["sdft"]["per_token_forward_top2"])
    torch.testing.assert_close(renormalised[same], peer[same], rtol=1e-9, atol=1e-10)


# ---- distillation


@pytest.mark.parametrize("kind", ["k1+", "k2", "k3"])
def test_direct_distillation_has_verls_loss(kind):
    peer = PEERS["verl"]["direct"][kind]
    loss = distillation(direct=True, kind=kind).losses["policy"]
    assert assert_gradient(loss, batch_of(), peer) == pytest.approx(peer["loss"], rel=1e-9)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_distillation_by_policy_gradient_has_verls_loss_before_a_move(kind):
    peer = PEERS["verl"][f"policy_gradient_{kind}"]
    assert assert_trained(distillation(kind=kind), batch_of(), peer) == pytest.approx(peer["loss"], rel=1e-9)


def test_distillation_after_a_move_differs_from_verl_in_the_advantage():
    """verl takes that of the moved policy; here it is of the policy that sampled, as the ratio supposes."""
    peer = PEERS["verl"]["policy_gradient_k1_after_a_move"]
    algorithm = distillation(clip_low=0.2, clip_high=0.2)
    advantage = with_advantage(algorithm.advantage, batch_of(old=STUDENT)).advantage
    value = assert_gradient(algorithm.losses["policy"], batch_of(old=OLD, advantage=advantage), peer)
    assert value == pytest.approx(peer["loss"], rel=1e-9)


def test_forward_kl_without_the_rest_is_verls():
    """To 1e-6: verl computes it in float32."""
    peer = PEERS["verl"]["forward_top2"]
    loss = distillation(kind="forward").losses["policy"]
    assert assert_gradient(loss, batch_of(), peer, top_fields, 1e-6) == pytest.approx(peer["loss"], rel=1e-6)


# ---- SDPO and SDFT, on sampled tokens


def by_sequence(algorithm):
    return Algorithm(algorithm.advantage, {"policy": reduce(clipped_surrogate(), sequence_mean())})


def test_sdpo_has_trls_advantages_and_gradient():
    """Before a move; TRL's means are by sequence, which is one mean where completions are equally long."""
    peer = PEERS["sdpo"]
    rewards = sdpo(reward_share=1.0, std_eps=1e-4)
    advantage = with_advantage(rewards.advantage, batch_of()).advantage
    torch.testing.assert_close(advantage[:, 0], numbers(peer["advantages"]), rtol=1e-9, atol=1e-10)
    assert_trained(sdpo(std_eps=1e-4), batch_of(torch.ones_like(MASK)), peer["equal_lengths"])
    assert_trained(by_sequence(sdpo(std_eps=1e-4)), batch_of(), peer["lengths"])


def test_sdpo_after_a_move_differs_from_trl_in_weight_and_advantage():
    """TRL's teacher term has the advantage of the moved policy, weighed by the ratio to the old one, at most 2."""
    peer = PEERS["sdpo"]["teacher_alone_after_a_move"]
    advantage = with_advantage(sdpo(reward_share=0.0).advantage, batch_of(old=STUDENT)).advantage
    batch = batch_of(old=OLD, advantage=advantage)
    value = assert_gradient(reduce(clipped_importance(None, 1.0), sequence_mean()), batch, peer)
    assert value == pytest.approx(peer["loss"], rel=1e-9)


def test_sdft_is_distillation_by_sequence():
    assert_trained(by_sequence(distillation()), batch_of(), PEERS["sdft"]["sampled_token"])


def test_mopd_without_rewards_has_nemos_gradient_before_a_move():
    """To 1e-7: NeMo-RL's masked mean adds 1e-8 to the number of tokens."""
    algorithm = mopd(alpha=0.0, clip_low=0.2, clip_high=0.3)
    batch = with_advantage(algorithm.advantage, batch_of(rollout_logp=log_probabilities(OLD)))
    ratios = (batch.old_logp - batch.rollout_logp).exp()[MASK]
    assert (ratios < 0.8).any() and (ratios > 0.8).any()
    loss, peer = algorithm.losses["policy"], PEERS["nemo"]["mopd"]
    assert assert_gradient(loss, batch, peer, rtol=1e-7) == pytest.approx(peer["loss"], rel=1e-7)


# ---- a teacher with another tokenizer


def texts_of(text, ends):
    """The text that each token adds, from the bytes where tokens end: "" before the last byte of a character."""
    ends_of_characters = set(itertools.accumulate(len(x.encode()) for x in text))
    texts, written = [], 0
    for end in ends:
        if end in ends_of_characters:
            texts.append(text.encode()[written:end].decode())
            written = end
        else:
            texts.append("")
    return texts


def groups_of(ends, side):
    places = [-1, *(end[side] for end in ends)]
    return [list(range(first + 1, last + 1)) for first, last in itertools.pairwise(places)]


@pytest.mark.parametrize("case", PEERS["gold"]["spans"], ids=lambda case: ascii(case["text"]))
def test_spans_are_trls_except_within_a_character(case):
    """TRL's groups end at bytes where both tokens do: also within a character that both have cut there."""
    text, bytes_of_characters = case["text"], set(itertools.accumulate(len(x.encode()) for x in case["text"]))
    ends = span_ends(*(texts_of(text, case[f"{side}_ends"]) for side in ("student", "teacher")))
    for side, name in enumerate(("student", "teacher")):
        joined, group = [], []
        for tokens in case[f"{name}_groups"]:
            group = group + tokens
            if case[f"{name}_ends"][tokens[-1]] in bytes_of_characters:
                joined.append(group)
                group = []
        assert groups_of(ends, side) == joined
    assert (joined == case["teacher_groups"]) is ("\u4e16" not in text)


def test_the_advantage_of_a_span_is_the_log_ratio_of_trls_merged_probabilities():
    case, peer = PEERS["gold"]["spans"][0], PEERS["gold"]["merged"]
    student, teacher = (
        numbers(peer[f"{name}_logits"]).log_softmax(-1).gather(-1, torch.tensor(peer[f"{name}_ids"])[:, None])[:, 0]
        for name in ("student", "teacher")
    )
    span, at_places = torch.zeros(len(student), dtype=torch.int64), torch.zeros_like(student)
    for own, other in zip(case["student_groups"], case["teacher_groups"], strict=True):
        span[own] = own[-1]
        at_places[own[-1]] = teacher[other].sum()
    batch = Batch(
        tokens=torch.tensor([peer["student_ids"]]),
        mask=torch.ones(1, len(student), dtype=torch.bool),
        score=torch.zeros(1),
        old_logp=student[None],
        teacher_logp=at_places[None],
        teacher_span=span[None],
    )
    advantage = with_advantage(teacher_advantage("k1"), batch).advantage[0]
    wanted = (numbers(peer["teacher_probability"]) / numbers(peer["student_probability"])).log()
    for own, ratio in zip(case["student_groups"], wanted, strict=True):
        torch.testing.assert_close(advantage[own], ratio.expand(len(own)), rtol=1e-9, atol=1e-9)


# ---- FlowRL


def flow_gradients(logits):
    """Loss of the policy, and gradients of log-probabilities and of log Z, after a batch of the old policy."""
    algorithm = flowrl(clip_low=0.1, clip_high=0.04)
    log_z = numbers(PEERS["flowrl"]["log_z"])
    values = torch.zeros_like(log_probabilities(OLD))
    values[:, 0] = log_z
    batch = batch_of(old=OLD, ref_logp=log_probabilities(TEACHER), value=values)
    batch = with_advantage(algorithm.advantage, batch)
    gradients = []
    losses = []
    for role, x in (("policy", log_probabilities(logits)), ("critic", values)):
        leaf = x.clone().requires_grad_()
        value, _ = algorithm.losses[role](leaf, batch)
        gradients += torch.autograd.grad(value, leaf)
        losses.append(value.item())
    return losses[0], gradients[0], gradients[1][:, 0]


@pytest.mark.parametrize("peer", ["verl_on_policy", "authors_on_policy"])
def test_flowrl_has_verls_and_the_authors_loss_before_a_move(peer):
    """To 1e-7: verl's masked mean adds 1e-8 to the number of tokens."""
    loss, of_policy, of_log_z = flow_gradients(OLD)
    wanted = PEERS["flowrl"][peer]
    assert loss == pytest.approx(wanted["loss"], rel=1e-7)
    torch.testing.assert_close(of_policy, numbers(wanted["gradient"]), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(of_log_z, numbers(wanted["gradient_of_log_z"]), rtol=1e-7, atol=1e-8)


def test_flowrl_has_the_weight_of_the_authors_geometric_variant():
    loss, of_policy, _ = flow_gradients(STUDENT)
    wanted = PEERS["flowrl"]["geometric_after_a_move"]
    assert loss == pytest.approx(wanted["loss"], rel=1e-7)
    torch.testing.assert_close(of_policy, numbers(wanted["gradient"]), rtol=1e-7, atol=1e-8)


def test_flowrl_after_a_move_differs_from_verls_recipe_by_the_weight():
    """There the product of ratios, at most 10; here their geometric mean, clipped."""
    _, of_policy, _ = flow_gradients(STUDENT)
    moved = (log_probabilities(STUDENT) - log_probabilities(OLD)) * MASK
    product = moved.sum(1).exp().clamp(max=10)
    geometric = (moved.sum(1) / MASK.sum(1)).exp().clamp(0.9, 1.04)
    wanted = numbers(PEERS["flowrl"]["verl_after_a_move"]["gradient"])
    torch.testing.assert_close(of_policy * (product / geometric)[:, None], wanted, rtol=1e-7, atol=1e-8)


# ---- TreePO


@pytest.mark.parametrize("by_size", [False, True])
def test_treepo_has_the_authors_advantages_of_leaves(by_size):
    """Before `whiten`, which takes each token of a shared reply once; the authors whiten it once for each path."""
    peer = PEERS["treepo"]
    paths = [[int(x) for x in path.split("#")] for path in peer["paths"]]
    tokens = torch.tensor([[prompt, 10 + first, 20 + last] for prompt, first, last in paths])
    mask = torch.tensor([False, True, True]).expand(tokens.shape)
    batch = Batch(
        tokens=tokens,
        mask=mask,
        turn=torch.tensor([0, 0, 1]).expand(tokens.shape),
        group=tokens[:, 0],
        score=numbers(peer["score"]),
    )
    piece = subtree_baselines(by_size)
    leaf = piece.update(first_signal(batch), piece.init(), batch)[0].x[:, -1]
    wanted = numbers(peer["group_size" if by_size else "average"])
    torch.testing.assert_close((leaf - leaf.mean()) / (leaf.var() + 1e-8).sqrt(), wanted, rtol=1e-7, atol=1e-7)
