"""FlashREINFORCE gives the numbers of its authors' reference loss, from their repository, on the same inputs."""

import torch

from funrl.algos import apply_advantage, flash_reinforce
from funrl.batch import Batch

MASK = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0]]).bool()
GRADIENT = (  # of log-probabilities, by the authors' code in float64; it rejects the third of four sequences
    (0.0, -0.030093953267923138, -0.03103707678912153, -0.032117653723394486, 0.0),
    (0.0, 0.04065661116256548, 0.037905782504265094, 0.03586783442058661, 0.03539509564139099),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.01548315739421178, 0.0, 0.01533277221623611, 0.0),
)


def test_the_gradient_is_that_of_the_authors_code():
    t = torch.arange(20, dtype=torch.float64).reshape(4, 5)
    logp = -(1 + t.sin()) / 2 - 0.1
    gap = 0.1 * (t * 7).cos() * torch.tensor([[0.5], [1.0], [3.0], [0.2]])
    batch = Batch(
        tokens=torch.zeros(4, 5, dtype=torch.int64),
        mask=MASK,
        score=torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64),
        old_logp=logp,
        rollout_logp=logp + gap,
    )
    algorithm = flash_reinforce()
    assert algorithm.advantage is not None
    batch, _, metrics = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)
    leaf = logp.clone().requires_grad_()
    value, _ = algorithm.losses["policy"](leaf, batch)
    (gradient,) = torch.autograd.grad(value, leaf)
    torch.testing.assert_close(gradient, torch.tensor(GRADIENT, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert metrics["rollout_corr/rejected"].value.item() == 3 / 12
