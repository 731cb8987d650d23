"""The first operation that differs between engine and trainer is named, whichever it is."""

import functools

import pytest
import torch
from selection import quick
from small_runs import GRPO, SIZES, Quiet, begin, scored_batch, small_job

from funrl.compiled_kernels import decode_step, linear_logprob
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.models.decoder import attention, decoder, dense, layers
from funrl.trainer import gap_row
from funrl.trainer.gap import GAP_METRIC, GapError
from funrl.trainer.gap_search import search_gap
from funrl.trainer.phases import update_batch

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
OFF = 1 + 1e-6


def off(m, module, name, when=lambda *args, **kwargs: True):
    """Let a function's result be off by a millionth, in the passes of the trainer alone."""
    right = getattr(module, name)

    @functools.wraps(right)
    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return result * OFF if when(*args, **kwargs) and not torch.is_inference_mode_enabled() else result

    m.setattr(module, name, wrong)


def own_heads_off(m, which):
    right = attention.own_heads

    def wrong(params, name, used, mesh):
        weight, bias = right(params, name, used, mesh)
        return weight * (OFF if name == which and not torch.is_inference_mode_enabled() else 1), bias

    m.setattr(attention, "own_heads", wrong)


def window_off(m):
    right = decode_step.PackedDecoder._layer

    def wrong(self, index, params):
        layer = right(self, index, params)
        layer.window = 3
        return layer

    m.setattr(decode_step.PackedDecoder, "_layer", wrong)


def residual_off(m, half):
    right = decoder._add

    def wrong(config, x, branch, out_norm, half_of):
        if half_of != half:
            return right(config, x, branch, out_norm, half_of)
        return decoder.watched(f"residual after the {half}", (x + branch) * OFF)

    m.setattr(decoder, "_add", wrong)


def frequencies_off(m):
    right = decode_step.frequencies
    m.setattr(decode_step, "frequencies", lambda *args: right(*args) * OFF)


def moments_off(m):
    right = linear_logprob.logit_moments

    def wrong(*args, **kwargs):
        moments = right(*args, **kwargs)
        return moments._replace(sums_T3=moments.sums_T3 * OFF)

    m.setattr(linear_logprob, "logit_moments", wrong)


FAULTS = {
    "norm before the mixer": lambda m: off(m, decoder, "_norm", lambda config, x, weight: weight is not None),
    "q product": lambda m: off(m, attention, "project_heads"),
    "k product": lambda m: own_heads_off(m, "k"),
    "v product": lambda m: own_heads_off(m, "v"),
    "q norm": lambda m: off(m, layers, "rms_norm"),
    "rotation of q": lambda m: off(m, attention, "rotate"),
    "rotation of k": lambda m: off(m, attention, "rotate", lambda x, rope: x.shape[-2] == SIZES["kv_heads"]),
    "attention": lambda m: off(m, attention, "split_attention"),
    "output product": lambda m: off(m, attention, "multiply_and_sum"),
    "residual after the mixer": lambda m: residual_off(m, "mixer"),
    "gate product": lambda m: off(m, dense, "multiply"),
    "gate": lambda m: off(m, dense, "gated"),
    "down product": lambda m: off(m, dense, "multiply_and_sum"),
    "residual after the mlp": lambda m: residual_off(m, "mlp"),
    "logits": lambda m: off(m, linear_logprob, "project"),
    "log-sum-exp": moments_off,
}
OF_THE_ENGINE = {"attention": window_off, "rotation of q": frequencies_off}
QUICK = ("k product", "attention", "residual after the mlp", "logits", "log-sum-exp", "rotation of q of the engine")
MESHES = [
    ("dp2", "tp2", "gate"),
    ("tp2", "tp2", "down product"),
    ("sp2", "tp2", "attention"),
]  # of trainer and engine, and what is off
AFTER_LAYERS = ("logits", "log-sum-exp")


def found(job, folder, mesh, plant):
    """What is found of a step that a planted fault has stopped, with the message."""
    trainer, state = begin(job, mesh, Quiet(str(folder / "checkpoints")))
    plant()
    rows, _, metrics = scored_batch(trainer, state)
    with pytest.raises(GapError) as stopped:
        trainer.gap_check.scored(rows, metrics, 1)
    return str(stopped.value), search_gap(job, gap_row.newest_gap(folder / "gap"), mesh, print)


@pytest.mark.parametrize("fault", quick([*FAULTS, *(f"{op} of the engine" for op in OF_THE_ENGINE)], QUICK))
def test_an_operation_that_is_off_is_named(fault, tmp_path, monkeypatch):
    op = fault.removesuffix(" of the engine")
    plant = FAULTS[op] if fault in FAULTS else OF_THE_ENGINE[op]
    job = small_job(GRPO, sizes=SIZES | {"qk_norm": True}, on_gap="stop", max_new_tokens=8, dtype="float32")
    if fault not in FAULTS:
        plant(monkeypatch)
    text, search = found(job, tmp_path, single(), lambda: plant(monkeypatch))
    assert search.first is not None and search.first.name == op
    assert search.layer == (None if op in AFTER_LAYERS else 0)
    assert text.endswith(
        f"most at {search.row}; this command names the operation that differs: funrl bisect {tmp_path} --gap"
    )


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("meshes", MESHES)
def test_so_it_is_on_meshes(meshes, tmp_path):
    trained, generating, op = meshes
    job = small_job(GRPO, on_gap="stop", mesh=trained, generate_mesh=generating, max_new_tokens=8, temperature=0.8)

    def program(mesh):
        with pytest.MonkeyPatch.context() as patch:
            _, search = found(job, tmp_path, mesh, functools.partial(FAULTS[op], patch))
        return search.first and search.first.name

    assert launch(program, job.sizes, "cpu") == op


def test_a_row_whose_gap_came_from_its_batch_is_the_same_alone(tmp_path):
    job = small_job(GRPO, on_gap="stop", max_new_tokens=8)
    trainer, state = begin(job, single(), Quiet(str(tmp_path / "checkpoints")))
    rows, _, metrics = scored_batch(trainer, state)
    assert metrics[GAP_METRIC] == 0
    rows = rows.with_fields(rollout_logp=rows.batch.rollout_logp - 1e-9 * rows.batch.mask)
    with pytest.raises(GapError):
        trainer.gap_check.scored(rows, {GAP_METRIC: 1e-9}, 1)
    search = search_gap(job, gap_row.newest_gap(tmp_path / "gap"), single(), print)
    assert search.first is None and search.engine == search.trainer == search.row.trainer != search.row.engine


def test_a_gap_of_an_update_is_said_with_its_token(tmp_path, monkeypatch):
    """Where the update's forward pass is the scoring, the engine's weights score the rows again."""
    notes = []
    show = Quiet(str(tmp_path / "checkpoints"))
    show.note = notes.append
    trainer, state = begin(small_job(GRPO, dtype="float32", minibatches=1), single(), show)
    FAULTS["gate"](monkeypatch)
    rows, state, metrics = scored_batch(trainer, state)
    assert GAP_METRIC not in metrics and rows.batch.get("old_logp") is None
    _, learned, _ = update_batch(trainer, state, rows)
    assert learned[GAP_METRIC] > 0
    assert f"differ by {learned[GAP_METRIC]:.3g} nats" in notes[-1] and "most at row" in notes[-1]
    search = search_gap(trainer.job, gap_row.newest_gap(tmp_path / "gap"), single(), print)
    assert search.first is not None and search.first.name == "gate"
    assert abs(search.row.engine - search.row.trainer) == pytest.approx(learned[GAP_METRIC])
