"""GRPO in one file: a small decoder learns to add, from public pieces and without a flag.

    python examples/minimal_grpo.py

Demonstrations that often forget to carry come first; then completions are sampled, rewarded, compared within their
group, and made more or less likely. About a minute on a CPU. Everything else (meshes, files, evaluation) is in
`funrl/trainer/loop.py`, which joins the same functions.
"""

import functools
import time

import torch

from funrl import trees
from funrl.algos import grpo, sft
from funrl.batch import Batch
from funrl.data.packing import pad_rows
from funrl.data.prompts import Example, prompt_batch
from funrl.mesh.mesh import single
from funrl.models import decoder_model, place
from funrl.optim import adamw, chain, clip_by_global_norm
from funrl.rewards.pool import Pool
from funrl.rollout.native.engine import native_engine
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.sources.generation import RewardedEngine, rollout, to_rows
from funrl.trainer.steps.advantage_phase import advantages
from funrl.trainer.steps.learn import learn
from funrl.trainer.steps.roles import Role, RoleState
from funrl.trainer.steps.score import score
from funrl.trainer.steps.step_rows import UpdatePlan, rows_of

DIGITS, WARMUP, STEPS, PROMPTS, SAMPLES = 2, 200, 50, 32, 8


def optimizer(lr):
    return chain(clip_by_global_norm(1.0), adamw(lr))


def demonstrations(tokenizer, seed, count=128):
    """Rows of prompt and answer; the mask is true on the answers."""
    pairs = [[tokenizer.encode(text) for text in pair] for pair in arithmetic.demonstrations(seed, count, DIGITS)]
    tokens = torch.as_tensor(pad_rows([[*p, *a, tokenizer.eos_token_id] for p, a in pairs], 0, 8))
    begin, end = (torch.tensor([[len(p) + n * (len(a) + 1)] for p, a in pairs]) for n in (0, 1))
    at_T = torch.arange(tokens.shape[1])
    return rows_of(Batch(tokens=tokens, mask=(at_T >= begin) & (at_T < end), length=end[:, 0]))


def main():
    torch.set_num_threads(1)
    start, tokenizer = time.perf_counter(), arithmetic.tokenizer()
    placed = place(decoder_model(arithmetic.model_config()))
    params = placed.model.init(torch.Generator().manual_seed(0))

    learner = Role(placed, loss=sft().losses["policy"], optimizer=optimizer(3e-3), metric="train/loss")
    states = {"policy": RoleState(params, learner.optimizer.init(params))}
    for step in range(WARMUP):
        states, metrics = learn({"policy": learner}, states, demonstrations(tokenizer, step), UpdatePlan(step + 1))
    print(f"warm start: loss {metrics['train/loss']:.2f}")

    algorithm = grpo(kl_coef=0.01)
    policy = Role(placed, {"old_logp": "logp"}, algorithm.losses["policy"], optimizer(1e-3))
    params = states["policy"].params
    reference, frozen = Role(placed, {"ref_logp": "logp"}), trees.clone(params)
    states = {"policy": RoleState(params, policy.optimizer.init(params))}
    engine = native_engine(placed.model)
    stop = (tokenizer.eos_token_id,)
    sampling = Sampling(max_new_tokens=arithmetic.MAX_NEW_TOKENS, stop=stop, samples=SAMPLES)
    examples = [
        Example(tokenizer.encode(p.prompt), p.prompt, p.fields) for p in arithmetic.training_prompts(0, digits=DIGITS)
    ]
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    rewarded = RewardedEngine(engine, single(), decode, Pool([arithmetic.reward]))
    chain_state, means = algorithm.advantage.init(), []
    for step in range(STEPS):
        engine.load(trees.named(states["policy"].params))
        drawn = prompt_batch(examples, PROMPTS, seed=0, consumed=step * PROMPTS)
        done = rollout(rewarded, drawn, sampling, step)
        rows = to_rows(drawn, done, sampling)
        roles = {"policy": policy, "reference": reference}
        rows = score(roles, {"policy": states["policy"].params, "reference": frozen}, rows)
        rows, chain_state, chain_metrics = advantages(algorithm.advantage, chain_state, rows)
        states, metrics = learn({"policy": policy}, states, rows, UpdatePlan(step + 1, minibatches=2))
        means.append(chain_metrics["reward/mean"])
        print(f"step {step + 1}: reward {means[-1]:.3f}, loss {metrics['actor/pg_loss']:.4f}")
    print(f"mean reward {sum(means[:5]) / 5:.3f} -> {sum(means[-5:]) / 5:.3f} in {time.perf_counter() - start:.0f} s")
    return means


if __name__ == "__main__":
    main()
