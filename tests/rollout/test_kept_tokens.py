"""The tokens that truncated sampling could take, beside what it takes."""

import numpy as np
import pytest
import torch
from test_sampling import mixed_logits, name, uniform

from funrl.rollout.kept_tokens import keep_tokens, pack_bits, unpack_ids
from funrl.rollout.sampling import sample_tokens
from funrl.rollout.sampling_parameters import Sampling

WAYS = (
    Sampling(top_k=9),
    Sampling(top_p=0.8, temperature=0.7),
    Sampling(top_k=300, min_p=0.01),
    Sampling(top_k=20, top_p=0.9, min_p=0.02, temperature=1.3),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", WAYS, ids=name)
def test_every_sampled_token_is_kept_and_has_the_sampler_s_log_probability(how, dtype):
    logits_RV = mixed_logits(2053, dtype)
    for step in range(20):
        noise_R = uniform(5, torch.arange(len(logits_RV)), torch.tensor([step]))[:, 0]
        token_R, logp_R, _ = sample_tokens(logits_RV, noise_R, how)
        kept_logp_R, bits_RB = keep_tokens(logits_RV, token_R, how)
        assert (kept_logp_R - logp_R).abs().max() < (1e-5 if dtype == torch.float32 else 1e-9)
        kept = unpack_ids(bits_RB.numpy())
        for token, ids, logits_V in zip(token_R.tolist(), kept, logits_RV, strict=True):
            assert token in ids and 0 < len(ids) <= (how.top_k or 2053)
            others = np.setdiff1d(np.arange(2053), ids)
            assert logits_V[ids].min() >= logits_V[others].max()


@pytest.mark.parametrize("vocab", [1, 8, 13])
def test_bits_come_back_as_ids(vocab):
    x_RV = torch.rand(5, vocab, generator=torch.Generator().manual_seed(1)) > 0.5
    ids = unpack_ids(pack_bits(x_RV).numpy())
    assert [row.tolist() for row in ids] == [row.nonzero()[:, 0].tolist() for row in x_RV]
    assert unpack_ids(pack_bits(x_RV[:0]).numpy()) == []
