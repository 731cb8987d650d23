"""--numerics=aligned: bits that engine and trainer share, or a run that is refused."""

import contextlib
import dataclasses

import pytest
import torch
from small_runs import GRPO, Quiet, begin, small_job
from torch._dynamo.backends.common import aot_autograd

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import align_gpu_kernels, aligned_on, computes_exactly
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.compiled_kernels.paged_attention import paging_of
from funrl.mesh.mesh import Mesh, parse, single
from funrl.models import compile_layer, decoder_config, decoder_model, with_fields
from funrl.models.model import Inputs
from funrl.trainer import inference
from funrl.trainer.checkpoints.stored_models import StoredModel
from funrl.trainer.gap import gap_problem
from funrl.trainer.jobs import numerics
from funrl.trainer.jobs.numerics import check_numerics, sums_problem
from funrl.trainer.placement import ranks
from funrl.trainer.settings.declaration import SettingsError

EXACT = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))


def on_gpus(job, training="dp1", generating="dp1"):
    """The reason against the job on GPUs, whose meshes need none."""
    meshes = (Mesh(parse(text), device=torch.device("cuda")) for text in (training, generating))
    return sums_problem(job, job.models[job.main_role], *meshes)


@EXACT
def test_a_cpu_is_aligned_without_the_flag():
    trainer, _ = begin(small_job(GRPO, numerics="aligned", dtype="bfloat16"), single())
    assert gap_problem(trainer.job, trainer.parts) is None and trainer.gap_check is not None
    assert not aligned_on("cpu") and computes_exactly(torch.zeros(1))


def test_a_run_that_would_have_a_gap_is_refused(monkeypatch):
    monkeypatch.setattr("funrl.trainer.jobs.numerics.kernels_work", lambda: False)
    with pytest.raises(SettingsError, match=r"--numerics=aligned: there are no C\+\+ kernels here; leave it out"):
        small_job(GRPO, numerics="aligned", dtype="float32")
    with pytest.raises(SettingsError, match="--numerics"):
        small_job(GRPO, numerics="aligned", dtype="float32", engine="hf")


def test_gpus_are_aligned_where_kernels_compute_the_run():
    pytest.importorskip("triton")
    assert "--numerics=aligned has others" in on_gpus(small_job(GRPO, dtype="bfloat16"))
    job = aligned_job()
    assert on_gpus(job) is on_gpus(job, "dp2") is None
    for axis, text in (("tensor", "tp2"), ("sequence", "sp2"), ("expert", "ep2")):
        assert on_gpus(job, text) == f"kernels of a fixed order are for one {axis} rank, not for 2"
    assert on_gpus(job, "dp1", "tp4") == "kernels of a fixed order are for one tensor rank, not for 4"
    shared = decoder_model(with_fields(job.model.config, heads=130, kv_heads=2))
    problem = on_gpus(dataclasses.replace(job, models=job.models | {job.main_role: shared}))
    assert problem == "kernels of a fixed order take 64 query heads that share keys, not 65"
    sinks = decoder_model(with_fields(job.model.config, attention_sinks=True))
    problem = on_gpus(dataclasses.replace(job, models=job.models | {job.main_role: sinks}))
    assert problem == "kernels of a fixed order do not take attention_sinks=True"
    gpu = Mesh(parse("tp2"), device=torch.device("cuda"))
    with pytest.raises(SettingsError, match="--numerics=aligned: kernels of a fixed order are for one tensor rank"):
        check_numerics(job, gpu, gpu)


def aligned_job():
    job = small_job(GRPO, dtype="bfloat16")
    models = dataclasses.replace(job.settings.models, numerics="aligned")
    return dataclasses.replace(job, settings=dataclasses.replace(job.settings, models=models))


def test_ranks_with_other_gpus_are_refused(monkeypatch):
    """They multiply by other instructions, whose sums have another order."""
    mesh = Mesh(parse("dp2"), device=torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    for others, refused in ((["NVIDIA H200"], False), (["NVIDIA A100-SXM4-80GB"], True)):
        monkeypatch.setattr(numerics, "gather_objects", lambda name, mesh, others=others: [name, *others])
        with (
            pytest.raises(SettingsError, match="NVIDIA A100-SXM4-80GB and NVIDIA H200; leave it out")
            if refused
            else (contextlib.nullcontext())
        ):
            numerics.check_gpu_kinds(aligned_job(), mesh)
        numerics.check_gpu_kinds(small_job(GRPO), mesh)


def test_kernels_that_fail_their_trial_are_refused(monkeypatch):
    tried = []
    problems = iter([None, "engine and trainer differ by 0.1 nats"])
    monkeypatch.setattr(numerics, "aligned_trial_problem", lambda *args: (tried.append(args), next(problems))[1])
    job = aligned_job()
    device = torch.device("cuda:3")
    numerics.check_kernels(job, device)
    with pytest.raises(SettingsError, match="fail their trial on this GPU: engine and trainer differ by"):
        numerics.check_kernels(job, device)
    assert tried == [(job.models[job.main_role], torch.bfloat16, device)] * 2


def test_a_run_leaves_the_kernels_of_the_process_as_they_were(monkeypatch):
    def align(*args, **named):
        assert not aligned_on("cuda")
        align_gpu_kernels(True)
        raise RuntimeError("the run fails")

    monkeypatch.setattr(ranks, "train_loop", align)
    monkeypatch.setattr(inference, "build_with_weights", align)
    runs = (
        lambda: ranks.run_rank(small_job(), single(), Quiet()),
        lambda: inference.run_inference(small_job(), StoredModel("x", None, {}), 0, single(), None, Quiet()),
    )
    for run in runs:
        with pytest.raises(RuntimeError, match="the run fails"):
            run()
        assert not aligned_on("cuda")


def test_only_an_aligned_run_takes_other_kernels_on_a_gpu():
    x = torch.empty(3, device="meta")
    assert not computes_exactly(x)
    align_gpu_kernels(True)
    assert aligned_on("cuda") and not aligned_on("cpu")
    align_gpu_kernels(False)
    assert not aligned_on("cuda")


@EXACT
@pytest.mark.slow
def test_the_compiler_sees_residual_sums_alone_between_operators_of_a_fixed_order():
    """Scoring and decoding over pages: what is traced is operators, additions and other views of the same numbers."""
    targets = set()

    def backend(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    sizes = {"heads": 4, "kv_heads": 2, "head": 8, "mlp": 24, "qk_norm": "head", "attention_bias": True}
    config = decoder_config(vocab=32, embed=16, layers=1, **sizes)
    model = decoder_model(config)
    params = trees.map(lambda x: x.bfloat16(), model.init(torch.Generator().manual_seed(0)))
    layer = compile_layer(model, "on", backend=aot_autograd(fw_compiler=backend))
    tokens = torch.arange(12)[None]
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    paging = paging_of([5, 7], [5, 7], torch.tensor([[0], [1]]), 16)
    cache = model.empty_cache(single(), 2, 16, torch.bfloat16, torch.device("cpu"))
    with torch.no_grad():
        packed = Inputs(tokens, offsets=offsets, positions=torch.cat([torch.arange(5), torch.arange(7)]))
        scored = model.apply(params, packed, layer=layer)
        decoded = model.apply(params, Inputs(tokens, paging=paging), cache=cache, layer=layer)
    assert torch.equal(scored.hidden, decoded.hidden)
    views = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "alias", "detach", "slice", "copy_"}
    views |= {"permute", "t", "transpose", "expand", "clone", "as_strided", "getitem", "split"}
    other = {name for name in targets if not name.startswith("funrl.") and name.split(".")[-2:][0] not in views}
    assert {name for name in targets if name.startswith("funrl.exact_")} >= {
        f"funrl.exact_{kind}.default" for kind in ("linear", "norm", "rotate", "gate")
    }
    structure = {"<built-in function ge>", "<built-in function getitem>", "aten._assert_scalar.default"}
    structure.add("<built-in function mul>")  # of sizes, where code was compiled for others before: not of tensors
    assert other - structure == {"aten.add.Tensor", "auto_functionalized_v2"}, other  # which is attention over pages
