"""The engine over transformers: its log-probabilities are the trainer's, of the distribution that it says."""

import pytest
import torch

from funrl.mesh.mesh import Mesh, MeshError, parse
from funrl.models import Config, Inputs, decoder_model
from funrl.rollout.completions import Sampling
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.sampling import candidates

CONFIG = Config(vocab=40, embed=32, layers=2, heads=4, kv_heads=2, head=8, mlp=48, max_positions=64, eos=(2,))
MODEL = decoder_model(CONFIG)
PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 9, "top_p": 0.8}], ids=str)
def test_log_probs_are_of_the_distribution_that_was_drawn_from(how):
    sampling = Sampling(**how, samples=3, max_new_tokens=12, stop=(3, 17))
    params = MODEL.init(torch.Generator().manual_seed(0))
    params["unembed"] = params["unembed"] * 25
    engine = hf_engine(MODEL)
    engine.load(engine.weights.named(params), 3)
    assert engine.version == 3
    told = []
    done = engine.generate(PROMPTS, sampling, seed=4, on_done=lambda *rows: told.append(rows))
    ((numbers, ids),) = told
    assert list(numbers) == list(range(len(done.tokens)))
    assert [len(row) for row in ids] == (done.lengths - done.finished.long()).tolist()
    assert 0 < done.finished.sum() < 9  # eos of the model does not end a completion: `stop` does
    for r, (tokens, length) in enumerate(zip(done.tokens.tolist(), done.lengths.tolist(), strict=True)):
        prompt = PROMPTS[r // 3]
        hidden = MODEL.apply(params, Inputs(torch.tensor([[*prompt, *tokens[:length]]]))).hidden
        logits = hidden[0, len(prompt) - 1 : -1] @ params["unembed"].T
        logp, ids = candidates(logits, sampling)
        if ids is not None:
            logp = torch.full_like(logits, -torch.inf).scatter(1, ids, logp)
        for whole, ours in ((logits.log_softmax(-1), done.model_logp), (logp, done.logp)):
            expected = whole.gather(1, torch.tensor(tokens[:length]).unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(ours[r, :length], expected, atol=3e-5, rtol=0)


def test_the_seed_fixes_the_samples_and_leaves_the_callers_noise_alone():
    engine, how = hf_engine(MODEL), Sampling(max_new_tokens=8)
    torch.manual_seed(0)
    first, again, other = (engine.generate(PROMPTS, how, seed).tokens for seed in (0, 0, 1))
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(after, torch.rand(1))


def test_it_holds_whole_weights():
    with pytest.raises(MeshError, match="without tp instead of tp2"):
        hf_engine(MODEL, Mesh(parse("tp2")))
