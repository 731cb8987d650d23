"""Launches and copies by the dry run's pretended device, beside those of the same functions that compute on a CPU."""

import contextlib
import dataclasses
from collections import Counter

import pytest
import torch
from dry_jobs import CPU, H100, plain, small, write_config
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.cost import device_calls as cost_calls
from funrl.cost.device_calls import AS_GRAPH, DECODE, decoding_calls, device_calls, step_calls
from funrl.cost.dry_run import estimate
from funrl.cost.full_rows import full_rows
from funrl.cost.reports import dry_report
from funrl.cost.tracing.device_counter import DEVICE, DeviceCounter
from funrl.cost.tracing.estimate import rows_of_a_pass
from funrl.data import micro_batch
from funrl.mesh.mesh import single
from funrl.processes import device_memory
from funrl.rollout.native import static_decode
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.trainer import phases
from funrl.trainer.jobs.build import build, first_state
from funrl.trainer.sources.source import Source
from funrl.trainer.steps import micro
from funrl.trainer.steps.clock import Clock

PRETENDED = dataclasses.replace(single(), device=DEVICE)
MEMORY_ONLY = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "detach_", "_local_scalar_dense", "promote_types")


class Operators(TorchDispatchMode):
    """Numbers of calls by name of the operator, without views and what only makes memory or reads a number."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # the guard imports dynamo

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = "CompositeImplicitAutograd", "CPU"
        composite, own = (torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), name) for name in names)
        if composite and not own:
            with self:
                return func.decompose(*args, **kwargs or {})
        out = func(*args, **kwargs or {})
        name = func._schema.name.split("::")[1]
        writes = any(r.alias_info is None or r.alias_info.is_write for r in func._schema.returns)
        if writes and not func.is_view and not name.startswith(MEMORY_ONLY):
            self.calls[name] += 1
        return out


class CountedPhases(DeviceCounter):
    """A counter that notes the calls of each phase by name of the operator, those of the host included."""

    calls = None

    @contextlib.contextmanager
    def phase(self, name):
        before = Counter(self.operators)
        with super().phase(name):
            yield
        CountedPhases.calls[name] = Counter()
        for (_, operator), number in (self.operators - before).items():
            CountedPhases.calls[name][operator] += number


def weights_of(layouts, dtype):
    return trees.map(lambda layout: 0.1 * torch.randn(layout.local_shape(0), dtype=dtype), layouts)


class CountedClock(Clock):
    """A clock of the calls of each phase, and of the bytes that it hands to the device."""

    def __init__(self, copied):
        super().__init__()
        self.seen, self.copied = Operators(), copied
        self.calls, self.bytes = {}, {}

    @contextlib.contextmanager
    def phase(self, name):
        before, bytes_before = Counter(self.seen.calls), sum(self.copied)
        yield
        self.calls[name], self.bytes[name] = self.seen.calls - before, sum(self.copied) - bytes_before


def real_step(job, local, monkeypatch):
    """The clock of a step that computes."""
    copied = []
    copy = device_memory.copy_to_device
    for module in (micro, micro_batch):
        monkeypatch.setattr(module, "copy_to_device", lambda x, on: (copied.append(x.nbytes), copy(x, on))[1])
    parts = build(job, single(), lambda _: None)
    rows = full_rows(job, parts, 8, local)
    dtypes = {name: job.dtype if role.loss is None else job.master for name, role in parts.roles.items()}
    weights = {name: weights_of(role.stored, dtypes[name]) for name, role in parts.roles.items()}
    frozen = {name: tree for name, tree in weights.items() if parts.roles[name].loss is None}
    source = Source(dict, lambda state, step: (rows, state, {}), lambda roles, step: {})
    clock = CountedClock(copied)
    trainer = phases.Trainer(job, parts, source, frozen, clock)
    state = first_state(job, parts, weights, ())
    with clock.seen:
        drawn, state, _ = phases.draw_batch(trainer, state)
        drawn, state, _ = phases.score_batch(trainer, state, drawn)
        phases.learn_batch(trainer, state, drawn)
    return clock


@pytest.mark.slow
def test_a_step_calls_the_same_operators_and_copies_the_same_bytes_as_one_that_computes(monkeypatch):
    job = small("ppo", sizes={"layers": 1})
    parts = build(job, PRETENDED, lambda _: None)
    monkeypatch.setattr(cost_calls, "DeviceCounter", CountedPhases)
    row = full_rows(job, parts, 8, 1)
    fit = rows_of_a_pass(256, int(row.lengths.max()), single())
    phases = []
    for rows in (fit, 2 * fit):  # one micro-batch and two
        CountedPhases.calls = {}
        counter = step_calls(job, parts, 8, rows)
        phases.append(counter.phases)
        real = real_step(job, rows, monkeypatch)
        names = real.calls.keys() - {"advantage"}  # it computes on the host, on numbers that only the real one has
        assert names and all(CountedPhases.calls[name] == real.calls[name] for name in names)
        assert all(counter.phases[name].to_device == real.bytes[name] for name in names)
    one, two = (of["update_policy"] for of in phases)
    calls = device_calls(job, 8)
    piece, rest = (calls[f"update_policy: {part}"] for part in ("a micro-batch", "the rest of an update"))
    assert piece.launches > 200 and piece.launches + rest.launches == one.launches
    assert piece.to_device == two.to_device - one.to_device > 0
    assert piece.to_host == (two.to_host - one.to_host) == fit * (row.batch.mask.nbytes + 8), (
        "the mask and the length of each"
    )
    assert (rest.to_device, rest.to_host) == (0, 3 * 8), "loss, norm and number of tokens"


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}])
def test_a_decoding_iteration_calls_the_same_operators_as_one_that_computes(monkeypatch, lora):
    job = small("grpo", **lora)
    engine = native_engine(job.model, single(), job.dtype, NativeOptions(16, packed=False, static=True))
    engine.load(engine.weights.named(weights_of(engine.weights.layouts, job.dtype)))
    if lora:
        spec = engine.adapter_weights(job.lora)
        engine.load_adapter("policy", job.lora, spec.named(weights_of(spec.layouts, job.dtype)))
    copied = []
    copy = static_decode.HostCopy
    monkeypatch.setattr(static_decode, "HostCopy", lambda xs: (copied.append(sum(x.nbytes for x in xs)), copy(xs))[1])
    sampling = dataclasses.replace(job.sampling, max_new_tokens=12, stop=(), samples=1)
    engine.submit([Request(i, [1, 1], sampling, i, adapter="policy" if lora else None) for i in range(16)])
    for _ in range(3):
        engine.step()
    copied.clear()
    with Operators() as seen:
        engine.step()
    monkeypatch.undo()
    built = native_engine(job.model, PRETENDED, job.dtype, NativeOptions(16, packed=False))
    calls = decoding_calls(job, built, job.lora)
    assert calls[DECODE].launches == seen.calls.total() > 100
    assert (calls[DECODE].to_device, calls[DECODE].to_host) == (0, copied[0]) and copied == [16 * (8 + 4 + 4)]
    assert calls[AS_GRAPH] == (1, 0, copied[0])
    penalised = dataclasses.replace(job, sampling=dataclasses.replace(job.sampling, repetition_penalty=1.2))
    other = decoding_calls(penalised, native_engine(job.model, PRETENDED, job.dtype, NativeOptions(16, packed=False)))
    assert AS_GRAPH not in other and other[DECODE].to_device > 0, "the host makes each pass"


def test_old_log_probabilities_are_scored_where_a_step_has_several_updates():
    assert "score_policy: a micro-batch" in device_calls(small("grpo", minibatches=2, sizes={"layers": 1}), 8)


@pytest.mark.slow
def test_deep_models_are_on_the_line():
    whole = small("sft", sizes={"layers": 7})
    calls = device_calls(whole, 8)
    counter = step_calls(whole, build(whole, PRETENDED, lambda _: None), 8, 4)
    parts = [calls[f"update_policy: {part}"].launches for part in ("a micro-batch", "the rest of an update")]
    assert sum(parts) == counter.phases["update_policy"].launches


@pytest.mark.slow
def test_every_mesh_and_experts_are_counted(tmp_path):
    experts = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = write_config(tmp_path, **experts)
    alone = device_calls(plain("grpo", H100.memory, model=model, dtype="bfloat16"), 8)
    flags = {"mesh": "dp2,ep2,tp2", "generate_mesh": "dp4,tp2", "fsdp": True, "dtype": "bfloat16"}
    split = device_calls(plain("grpo", H100.memory, model=model, **flags), 8)
    assert split.keys() == alone.keys()
    assert all(split[name].launches > x.launches for name, x in alone.items() if name != AS_GRAPH)
    assert split[AS_GRAPH].launches == 1


def test_results_of_repeated_calls_are_tensors_of_their_own():
    with DeviceCounter():
        x = torch.empty(3, 4, device=DEVICE)
        sums = [x + 1, x + 1, x + 1.5, x.double() + 1]
        (values, places), (other, _) = x.sort(1), x.sort(1)
        values.add_(1)
    assert [tuple(y.shape) for y in sums] == [(3, 4)] * 4 and sums[3].dtype == torch.float64
    assert len({y.untyped_storage()._cdata for y in (x, *sums, values, places, other)}) == 8


def test_what_the_host_reads_is_what_it_wrote_and_else_one():
    with DeviceCounter() as counter:
        x = torch.arange(4.0).to(DEVICE)
        y = x * 2
        assert torch.equal(x.cpu(), torch.arange(4.0)) and torch.equal(y.cpu(), torch.ones(4))
        assert y.sum().item() == 1
        y.copy_(torch.zeros(4))
        assert torch.equal(y.to("cpu"), torch.zeros(4))
        with counter.phase("views"):
            x.view(2, 2).T.unsqueeze(0)
    assert counter._now == (2, 32, 4 * 16 - 16 + 4) and counter.phases == {"views": (0, 0, 0)}
    assert counter.operators["meta", "mul"] == counter.operators["meta", "sum"] == 1


def test_the_report_has_them_on_a_device_and_says_why_not(monkeypatch):
    job = small("sft")
    estimated = estimate(job, 8, H100)
    said = dry_report.report(job.settings, lambda *_: estimated, 8)
    assert "\non the device of a rank " in said and "\nupdate_policy: a micro-batch " in said
    monkeypatch.setitem(dry_report.HARDWARE, "h100", CPU)
    assert "on the device" not in dry_report.report(job.settings, lambda *_: estimated, 8)
    monkeypatch.undo()

    def fails(job, tokens):
        raise RuntimeError("it reads a number")

    monkeypatch.setattr(dry_report, "device_calls", fails)
    said = dry_report.report(job.settings, lambda *_: estimated, 8)
    assert "on the device" not in said and said.endswith("launches and copies: it reads a number")
