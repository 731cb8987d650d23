"""The comparison with float64 that ends the trial of aligned kernels; the rest needs Triton's interpreter."""

import pytest
import torch

from funrl import trees
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model, place
from funrl.rollout.native import aligned_trial


@pytest.mark.parametrize("planted", ["nothing", "score", "gradient"])
def test_a_later_number_that_is_not_finite_fails_the_trial(planted):
    model = decoder_model(decoder_config(vocab=20, embed=8, layers=1, heads=2, kv_heads=1, head=4, mlp=12))
    generator = torch.Generator().manual_seed(0)
    params = model.init(generator)
    leaves = trees.map(lambda x: x.clone().requires_grad_(), params)
    lengths = (3, 2)
    rows = [torch.randint(20, (length + 3,), generator=generator) for length in lengths]
    scores = aligned_trial._score_rows(place(model, SINGLE, dtype=torch.float32), leaves, rows, lengths, [0, 1])
    if planted == "score":
        scores[1] = scores[1] * torch.tensor([1.0, 1.0, torch.nan])
    if planted == "gradient":
        trees.leaves(leaves)[-1].register_hook(lambda grad: torch.nan * grad)
    problem = aligned_trial._error_problem(model, params, (scores, leaves), (rows, lengths), (1e-3, 1e-3))
    expected = {"score": "log-probabilities differ by nan", "gradient": "gradients differ by nan%"}
    assert problem is None if planted == "nothing" else problem.startswith(expected[planted])
