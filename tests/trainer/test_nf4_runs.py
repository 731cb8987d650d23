"""Runs whose frozen base is in 4 bits train as on the values of these, which engine, files and proofs have too."""

import functools
import importlib.util

import pytest
import torch
from safetensors.torch import load_file
from small_runs import GRPO, PPO, begin, one_step, scored_batch, small_job
from small_runs import Quiet as Observer
from test_checkpoint import assert_equal_steps, remove_later_checkpoints

import funrl
from funrl import trees
from funrl.algos.recipes.reward_model import reward_model
from funrl.algos.recipes.sft import sft
from funrl.cost.dry_run import engine_bytes
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.decoder.routing import Experts
from funrl.models.deployed import deployed
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.names import names_of
from funrl.models.lora import is_trained
from funrl.models.nf4_base import is_stored_in_4_bits, nf4_model_problem
from funrl.rollout.certificate import SyncError
from funrl.trainer import phases, startup
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints, recorded
from funrl.trainer.checkpoints.export import export_checkpoint
from funrl.trainer.jobs import prepare
from funrl.trainer.loop import train_loop
from funrl.trainer.phases import prove_sync
from funrl.trainer.settings import checks
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.foreign_rows import ForeignRowError
from funrl.trainer.steps.sync import compare_base, sync
from funrl.trainer.storage.shard_server import CheckpointError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs funrl[nf4]")

SIZES = {"embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 64}
LORA = {"lora_rank": 2, "lora_alpha": 4.0, "sizes": SIZES}
NF4 = LORA | {"base_format": "nf4"}
NUMBERS = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 64  # of the projections of a layer


def begin_on_values(compose, **settings):
    """A run on whole weights, those that the 4-bit base of the same run stands for."""
    packed, _ = startup.begin_run(small_job(compose, **NF4 | settings), single(), Observer())
    whole = deployed(packed.parts.begin, packed.frozen["base"]).weight
    run, state = startup.begin_run(small_job(compose, **LORA | settings), single(), Observer())
    for name, x in trees.named(run.frozen["base"]):
        assert torch.equal(x, whole(name)) != is_stored_in_4_bits(name, tuple(x.shape))
        x.copy_(whole(name))
    return run, sync(run.parts, state, frozen=run.frozen)


@pytest.mark.parametrize("compose", [functools.partial(GRPO, kl_coef=0.05), pytest.param(PPO, marks=pytest.mark.slow)])
def test_training_is_that_on_the_values_of_the_base(compose):
    runs = [begin(small_job(compose, **NF4), single()), begin_on_values(compose)]
    states = [state for _, state in runs]
    for _ in range(2):
        steps = [one_step(run, state) for (run, _), state in zip(runs, states, strict=True)]
        states = [state for state, _ in steps]
        losses = [metrics["actor/pg_loss"] for _, metrics in steps]
        assert abs(losses[0] - losses[1]) < 1e-9 and steps[0][1]["actor/grad_norm"] > 0
    batches = [scored_batch(run, state)[0].batch for (run, _), state in zip(runs, states, strict=True)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    for own, other in zip(*(trees.leaves(state.roles) for state in states), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-9)
    changed = trees.named(states[0].roles["policy"].params)
    assert all(is_trained(name) and x.any() for name, x in changed)


def test_reference_base_and_engine_have_one_layer_to_compile():
    job = small_job(functools.partial(GRPO, kl_coef=0.05), **NF4)
    run, _ = startup.begin_run(job, single(), Observer())
    roles = run.parts.roles
    base = run.parts.generator.base
    layers = {base.placed.layer, roles["reference"].placed.layer, roles["base"].placed.layer}
    assert len(layers) == 1 and roles["policy"].placed.layer not in layers


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_engine_shares_the_base_and_samples_what_the_trainer_scores(dtype):
    run, state = begin(small_job(GRPO, **NF4, dtype=dtype, compile="off"), single())
    assert prove_sync(run, state, first=True)["sync/verified"] == 1.0
    base = run.frozen["base"]
    held = dict(run.parts.generator.whole.held_weights())
    named = dict(trees.named(base))
    assert held.keys() == named.keys() and {"layers/1/mlp/down_codes", "layers/1/mlp/down_scales"} <= held.keys()
    assert all(x.data_ptr() == held[name].data_ptr() for name, x in named.items())
    packed = [x for name, x in named.items() if name.endswith(("_codes", "_scales"))]
    assert sum(x.nbytes for x in packed) == 2 * NUMBERS * (4 + 32 / 64) / 8
    for _ in range(2):
        state, metrics = one_step(run, state)
        assert metrics["rollout/logprob_gap_max"] == 0
    before = trees.clone(base)
    before["layers"][0]["attn"]["k_codes"][0, 0, 0] ^= 1
    with pytest.raises(SyncError, match=r"layers/0/attn/k_codes differs on rank 0; 1 of 35 weights"):
        compare_base(run.parts, {"base": before})


def test_a_row_that_another_base_sampled_ends_the_run(monkeypatch):
    prove = phases.prove_sync

    def prove_and_change_a_scale(trainer, state, *, first=False):
        metrics = prove(trainer, state, first=first)
        generator = trainer.parts.generator
        generator.proof.settle()
        if state.version == 2:
            engine = generator.whole
            held = {name: x.clone() for name, x in engine.held_weights()}
            held["layers/0/attn/v_scales"][0, 0, 0] *= 2
            engine.load(held.items(), engine.version)
        return metrics

    monkeypatch.setattr(phases, "prove_sync", prove_and_change_a_scale)
    observer = Observer()
    outcome = train_loop(small_job(GRPO, **NF4 | {"steps": 3}), single(), observer)
    assert isinstance(outcome.cause, ForeignRowError) and "row 0, token" in str(outcome.error)
    assert len(observer.steps) == 1


@pytest.mark.parametrize("engine", [pytest.param("hf", marks=pytest.mark.slow), "native"])
def test_whole_weights_are_merged_from_the_values(engine):
    targets = {"lora_targets": "q_proj"} if engine == "hf" else {}
    run, state = begin(small_job(GRPO, **NF4, **targets, engine=engine, dtype="float32"), single())
    state, _ = one_step(run, state)
    role = run.parts.roles["policy"]
    params = role.whole(state.roles["policy"].params, run.frozen)
    source = deployed(role.placed, params)
    named = dict(trees.named(params))
    q = source.weight("layers/0/attn/q")
    a, b = (named[f"layers/0/attn/q_lora_{part}"] for part in "ab")
    values = deployed(run.parts.begin, run.frozen["base"]).weight
    torch.testing.assert_close(q, values("layers/0/attn/q") + 2 * torch.einsum("hnr,rd->hnd", b, a))
    assert dict(source.exported(names_of(source.model))).keys() == {name for name, _ in names_of(source.model).values()}
    if engine == "hf":
        assert prove_sync(run, state, first=True)["sync/verified"] > 0 and run.parts.generator.base is None


def run_to_end(folder, **settings):
    """An observer of a run with a directory, at its end."""
    observer = Observer(str(folder))
    train_loop(small_job(GRPO, **NF4 | {"steps": 2, "save_every": "1"} | settings), single(), observer)
    return observer


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_resumed_run_has_the_same_bits_and_its_export_is_its_model(dtype, tmp_path):
    ended = run_to_end(tmp_path / "checkpoints", keep_checkpoints=3, dtype=dtype)
    assert not any("_codes" in name for name in recorded(complete_checkpoints(tmp_path / "checkpoints")[2]).arrays)
    exported = export_checkpoint(tmp_path, 2).directory
    saved = load_file(exported / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    job = small_job(GRPO, **NF4, dtype=dtype)
    run, _ = startup.begin_run(job, single(), Observer())
    placed = run.parts.roles["policy"].placed
    source = deployed(placed, ended.params)
    expected = dict(source.exported(names_of(source.model)))
    assert saved.keys() == expected.keys() == base.keys()
    for name, x in expected.items():
        assert torch.equal(saved[name], x) and torch.equal(base[name], x) != ("proj" in name)
    remove_later_checkpoints(tmp_path / "checkpoints", 1)
    again = run_to_end(tmp_path / "checkpoints", resume=True, run_dir="x", dtype=dtype)
    assert_equal_steps(again.steps, ended.steps[1:])
    assert all(map(torch.equal, trees.leaves(again.params), trees.leaves(ended.params)))
    with pytest.raises(CheckpointError, match="its adapters stand on another base; give --base_format=nf4"):
        run_to_end(tmp_path / "checkpoints", resume=True, run_dir="x", base_format="auto")


@pytest.mark.parametrize("compose", [sft, reward_model])
def test_texts_are_learned_on_a_base_in_4_bits(compose):
    run, state = startup.begin_run(small_job(compose, **NF4, reward=None), single(), Observer())
    state, metrics = one_step(run, state)
    assert metrics["train/grad_norm"] > 0


def test_a_directory_is_read_into_4_bits(tmp_path):
    run, _ = startup.begin_run(small_job(GRPO, **NF4 | {"sizes": None}), single(), Observer())
    placed = run.parts.begin
    whole = trees.from_named(
        placed.stored,
        ((name, deployed(placed, run.frozen["base"]).weight(name)) for name, _ in trees.named(placed.stored)),
    )
    hf.save(tmp_path, placed.model, whole, run.job.tokenizer)
    again, _ = startup.begin_run(small_job(GRPO, **NF4 | {"sizes": None, "model": str(tmp_path)}), single(), Observer())
    assert all(map(torch.equal, trees.leaves(again.frozen["base"]), trees.leaves(run.frozen["base"])))


def test_bytes_of_the_base_are_counted():
    totals = {}
    for form in ("auto", "nf4"):
        run, _ = begin(small_job(GRPO, **LORA | {"base_format": form, "dtype": "bfloat16"}), single())
        own, shared = engine_bytes(run.job, run.parts, run.parts.generator)
        base = trees.nbytes(run.frozen["base"])
        assert sum(x.nbytes for _, x in run.parts.generator.whole.held_weights()) == base
        assert shared == base + run.parts.generator.sync_bytes
        totals[form] = own + shared
    assert totals["auto"] - totals["nf4"] == 2 * NUMBERS * (16 - 4.5) / 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": None}, "base_format=nf4 does nothing without --lora_rank"),
        ({"mesh": "dp2"}, "base_format=nf4 with --mesh=dp2: bytes and scales of 4 bits are not split or gathered"),
        ({"place": "train:dp1 generate:dp1"}, "base_format=nf4 with --place=.*: a base in 4 bits is on one device"),
        ({"backend": "xla"}, "base_format=nf4: weights in 4 bits are expanded by operators of torch"),
        ({"rollout_dtype": "float8"}, "rollout_dtype=float8 with --base_format=nf4: products are of weights in 8 or"),
    ],
    ids=str,
)
def test_what_a_base_in_4_bits_cannot_be_with_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        small_job(GRPO, **{"lora_rank": 2, "base_format": "nf4"} | settings)


def test_adapters_that_a_run_goes_on_with_give_the_rank(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    flags = [{"model": str(tmp_path)}, {"model": "BASE", "adapter": str(tmp_path)}]
    for given in flags:
        checks.check_requirements(settings_of(base_format="nf4", **given))
    (tmp_path / "config.json").write_text("{}")  # of a model
    with pytest.raises(SettingsError, match="base_format=nf4 does nothing without --lora_rank"):
        checks.check_requirements(settings_of(base_format="nf4", **flags[0]))


def test_a_missing_library_and_a_device_that_it_lacks_are_named(monkeypatch):
    monkeypatch.setattr(prepare, "nf4_problem", lambda device: f"bitsandbytes has no NF4 on {device}: none")
    with pytest.raises(SettingsError, match="base_format=nf4: bitsandbytes has no NF4 on cpu: none; leave it out"):
        small_job(GRPO, **NF4)
    monkeypatch.setattr(checks, "is_installed", lambda module: module != "bitsandbytes")
    with pytest.raises(SettingsError, match=r"bitsandbytes is not installed; pip install 'funrl\[nf4\]'"):
        small_job(GRPO, **NF4)


def test_models_without_such_matrices_are_refused():
    model = small_job(GRPO).model
    assert nf4_model_problem(decoder_model(with_fields(model.config, **SIZES))) is None
    narrow = decoder_model(with_fields(model.config, **SIZES | {"embed": 16, "head": 4, "mlp": 48}))
    assert nf4_model_problem(narrow).startswith("no layer has a projection of q, k, v, o, gate, up, down whose rows")
    experts = decoder_model(with_fields(model.config, **SIZES, experts=Experts(4, 2, 16)))
    assert nf4_model_problem(experts).startswith("matrices of experts")


def test_further_models_of_agents_are_refused():
    settings = settings_of(agents="a:policy,b:initial", lora_rank=2, base_format="nf4")
    with pytest.raises(SettingsError, match=r"agents=.* with --base_format=nf4: further models have whole weights"):
        checks.check_agents(settings)


@pytest.mark.slow
def test_the_reward_rises_on_a_base_in_4_bits():
    run = funrl.train(GRPO(), steps=20, lora_rank=8, base_format="nf4", device="cpu", eval_every=20)
    rewards = [metrics["reward/mean"] for metrics in run.metrics]
    assert all(metrics["rollout/logprob_gap_max"] == 0 for metrics in run.metrics)
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
