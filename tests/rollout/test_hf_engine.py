"""The engine over transformers: its log-probabilities are the trainer's, of the distribution that it says."""

import pytest
import torch
from plain_sampling import plain_logp
from small_engines import completed, rows

from funrl.mesh.mesh import Mesh, MeshError, parse
from funrl.models import Inputs, decoder_config, decoder_model
from funrl.rollout.hf_engine import MOST_ROWS, hf_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.versions

CONFIG = decoder_config(vocab=40, embed=32, layers=2, heads=4, kv_heads=2, head=8, mlp=48, max_positions=64, eos=(2,))
MODEL = decoder_model(CONFIG)
PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10]]
HOWS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 9, "top_p": 0.8},
    {"min_p": 0.05},
    {"repetition_penalty": 1.6, "temperature": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_log_probs_are_of_the_distribution_that_was_drawn_from(how):
    sampling = Sampling(**how, samples=3, max_new_tokens=12, stop=(3, 17))
    params = MODEL.init(torch.Generator().manual_seed(0))
    params["unembed"] = params["unembed"] * 25
    engine = hf_engine(MODEL)
    engine.load(engine.weights.named(params), 3)
    assert engine.version == 3
    prompts = PROMPTS if sampling.repetition_penalty == 1 else [p * (6 // len(p)) for p in PROMPTS]  # of one length
    done = completed(engine, prompts, sampling, seed=4)
    assert (
        0 < sum(completion.finished for completion in done) < 9
    )  # eos of the model does not end a completion: `stop` does
    for r, item in enumerate(done):
        prompt, tokens, length = prompts[r // 3], item.tokens.tolist(), len(item.tokens)
        hidden = MODEL.apply(params, Inputs(torch.tensor([[*prompt, *tokens]]))).hidden
        logits = hidden[0, len(prompt) - 1 : -1] @ params["unembed"].T
        seen = torch.zeros(len(logits), CONFIG.vocab, dtype=torch.bool)
        for i in range(length):
            seen[i, [*prompt, *tokens[:i]]] = True
        logp = plain_logp(logits, sampling, seen)
        for whole, ours in ((logits.log_softmax(-1), item.raw_logp), (logp, item.sampling_logp)):
            expected = whole.gather(1, item.tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(ours, expected, atol=3e-5, rtol=0)


def test_the_seed_fixes_the_samples_and_leaves_the_callers_noise_alone():
    engine, how = hf_engine(MODEL), Sampling(max_new_tokens=8)
    torch.manual_seed(0)
    engine.load(engine.weights.named(MODEL.init(torch.Generator().manual_seed(0))))
    first, again, other = (rows(completed(engine, PROMPTS, how, seed)) for seed in (0, 0, 1))
    after = torch.rand(1)
    torch.manual_seed(0)
    assert first == again != other
    assert torch.equal(after, torch.rand(1))


def test_what_it_cannot_do_is_refused():
    engine = hf_engine(MODEL)
    with pytest.raises(ValueError, match=r"stop_strings is \('a',\): the hf engine knows no texts"):
        completed(engine, PROMPTS, Sampling(stop_strings=("a",), max_new_tokens=2))
    with pytest.raises(ValueError, match=r"repetition_penalty is 1.1: .*prompts of one length"):
        completed(engine, PROMPTS, Sampling(repetition_penalty=1.1, max_new_tokens=2))


def test_it_holds_whole_weights():
    with pytest.raises(MeshError, match="without tp instead of tp2"):
        hf_engine(MODEL, Mesh(parse("tp2")))


def test_a_batch_has_a_bound_however_many_requests_wait():
    engine = hf_engine(MODEL)
    engine.load(engine.weights.named(MODEL.init(torch.Generator().manual_seed(0))))
    requests = requests_of([[5, 6]] * (MOST_ROWS + 3), Sampling(max_new_tokens=1), seed=0)
    engine.submit(requests)
    assert len(engine.step()) == MOST_ROWS and engine.unfinished() == 3 and engine.room() == MOST_ROWS - 3
    assert [completion.number for completion in engine.step()] == [request.number for request in requests[-3:]]
