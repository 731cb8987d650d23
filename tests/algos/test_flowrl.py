"""FlowRL: the losses of policy and partition function are one joint loss at the first update on a batch."""

import pytest
import torch
from pieces import example

from funrl.algos import Advantage, apply_advantage, chain, flowrl, reads
from funrl.batch import Batch, as_dict


def prepared(algorithm):
    held = reads(algorithm).required | {"tokens", "mask", "length"}
    batch = Batch(**{name: x for name, x in as_dict(example()).items() if name in held})
    return apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)[0]


def test_the_two_losses_have_the_gradient_of_the_joint_loss():
    algorithm = flowrl(flow_beta=0.7)
    batch = prepared(algorithm)
    logp_BT = batch.old_logp.clone().requires_grad_()
    value_BT = batch.value.clone().requires_grad_()
    separate = [
        torch.autograd.grad(algorithm.losses[role](x_BT, batch)[0], x_BT)[0]
        for role, x_BT in (("policy", logp_BT), ("critic", value_BT))
    ]
    groups, score = batch.group.tolist(), batch.score
    losses = []
    for i, mask_T in enumerate(batch.mask):
        if mask_T.any():
            own = score[[j for j, number in enumerate(groups) if number == groups[i]]]
            deviation = own.std().item() if len(own) > 1 else 0.0
            reward = (score[i] - own.mean()) / (deviation + 1e-6) if deviation > 0 else torch.tensor(0.0)
            first = int(mask_T.nonzero()[0])
            moved = (logp_BT[i] - batch.ref_logp[i])[mask_T].mean()
            losses.append((value_BT[i, first] + moved - 0.7 * reward) ** 2)
    joint = torch.autograd.grad(torch.stack(losses).mean(), (logp_BT, value_BT))
    for whole, part in zip(joint, separate, strict=True):
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-12)


def test_the_partition_function_sees_the_prompt_alone_though_the_first_token_is_masked():
    algorithm = flowrl()
    whole = prepared(algorithm)
    first_BT = whole.mask & (whole.mask.cumsum(1) == 1)
    mask = Advantage(lambda: (), lambda signal, state, batch: (signal._replace(mask=signal.mask & ~first_BT), state))
    held = {name: x for name, x in as_dict(whole).items() if name in reads(algorithm).required | {"tokens", "length"}}
    masked, _, _ = apply_advantage(chain(mask, algorithm.advantage), ((), algorithm.advantage.init()), Batch(**held))
    assert torch.equal(masked.opening, first_BT) and not (masked.mask & first_BT).any() and masked.mask.any()
    torch.testing.assert_close(masked.advantage[masked.mask], whole.advantage[masked.mask], rtol=0, atol=1e-12)


def test_the_optimum_is_the_tilted_reference():
    """On one prompt with three answers of one token, log pi - log pi_ref + log Z becomes beta r for each."""
    reference = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    score = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    algorithm = flowrl(flow_beta=0.5)
    logits = reference.clone().requires_grad_()
    log_z = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, log_z], lr=0.05)
    mask = torch.ones(3, 1, dtype=torch.bool)
    for _ in range(600):
        logp_BT = logits.log_softmax(0)[:, None]
        held = {"old_logp": logp_BT.detach(), "ref_logp": reference[:, None], "value": log_z.detach().expand(3, 1)}
        batch = Batch(tokens=mask.long(), mask=mask, score=score, group=torch.zeros(3, dtype=torch.int64), **held)
        batch, _, _ = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)
        optimizer.zero_grad()
        losses = [
            algorithm.losses[role](x, batch)[0] for role, x in (("policy", logp_BT), ("critic", log_z.expand(3, 1)))
        ]
        sum(losses).backward()
        optimizer.step()
    standard = (score - score.mean()) / (score.std() + 1e-6)
    tilted = (reference + 0.5 * standard).softmax(0)
    assert logits.softmax(0).tolist() == pytest.approx(tilted.tolist(), abs=1e-4)
    assert log_z.item() == pytest.approx((reference + 0.5 * standard).logsumexp(0).item(), abs=1e-3)
