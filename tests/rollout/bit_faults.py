"""Faults after which engine and trainer have other bits: each a patch, and draws of the kind that it shows in.

What leaves every bit as it is, such as other page numbers, is no fault.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from funrl.compiled_kernels import (
    linear,
    linear_logprob,
    norm,
    paged_attention,
    rotary,
    varlen_attention,
)
from funrl.compiled_kernels.exact import gate
from funrl.mesh.collectives import all_gather, psum
from funrl.models import placed, split_residual
from funrl.models.decoder import attention, decoder, dense, layers, row_parallel, sequence_parallel
from funrl.rollout.native import backends, engine, sequences


class Fault(NamedTuple):
    """A fault.

    Attributes:
      plant: sets it by a monkeypatch.
      fixed: choices of the draws that it may show in.
    """

    plant: Any
    fixed: dict[str, Any]


SMALL = {"samples": 3, "new_tokens": 6, "pause": "no", "threads": 1}
ONE = SMALL | {"generate": "tp1", "train": "dp1,sp1,tp1", "packed": True}  # the compiled step, and one trainer
IN_TORCH = ONE | {"packed": False}
BFLOAT16 = ONE | {"dtype": torch.bfloat16}
FLOAT32 = ONE | {"dtype": torch.float32}
AFTER_A_PAUSE = {"pause": "other weights after a pause", "samples": 4, "new_tokens": 12}
IN_FLIGHT = AFTER_A_PAUSE | {"pause": "other weights in flight"}
FOUR_RANKS = ONE | {"train": "dp1,sp1,tp4", "splits": False}
DRAFTS = IN_TORCH | {"speculate": 3, "max_rows": 1, "new_tokens": 12}


def instead(module, name, make):
    """A fault by which `make(right)` stands in for a function."""
    return lambda m: m.setattr(module, name, make(getattr(module, name)))


def by_torch(module):
    return lambda m: m.setattr(module, "computes_exactly", lambda *_: False)


def torch_linear(x, weight, bias=None, *_, **__):
    return F.linear(x, weight.reshape(-1, x.shape[-1]), None if bias is None else bias.flatten())


def in_halves(x, w, parts, wide=False):
    return sum(F.linear(a, b) for a, b in zip(x.chunk(2, -1), w.chunk(2, 1), strict=True))


def in_turn(x, mesh, axes):
    return functools.reduce(torch.add, all_gather(x[None], mesh, axes).unbind(0))


def norm_by_halves(right):
    def wrong(x, weight, eps, offset=0.0):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        first, second = wide.square().tensor_split(2, -1)
        mean = (first.sum(-1, keepdim=True) + second.sum(-1, keepdim=True)) / x.shape[-1]
        unit = wide * torch.rsqrt(mean + eps)
        return (unit * (offset + weight)).to(x.dtype) if offset else unit.to(x.dtype) * weight

    return wrong


def rotation_in_double(right):
    def wrong(self, positions, dtype, axial=None):
        turns = layers.frequencies(self.size, self.theta, self.scaling, torch.float64)
        return layers.rotary(positions, turns, dtype)

    return wrong


def wide_rotation(right):
    def wrong(x, rope):
        cos, sin = rope.cos.double(), rope.sin.double()
        size = cos.shape[-1]
        part = x[..., :size].double()
        turned = (part * cos + part.roll(size // 2, -1) * sin).to(x.dtype)
        return torch.cat((turned, x[..., size:]), -1)

    return wrong


def by_sigmoid(gate_x, up, activation="silu"):
    return gate_x * gate_x.sigmoid() * up


def rounded_once(gate_x, up, activation="silu"):
    return (F.silu(gate_x.float()) * up.float()).to(up.dtype)


def running_maximum(right):
    """Sums of exponentials block after block, which are scaled whenever the maximum grows."""

    def wrong(logits, top, ids, temperature, parts, more=False):
        moments = right(logits, top, ids, temperature, parts, more)
        total = torch.zeros(len(logits), dtype=logits.dtype)
        most = torch.full_like(total, -torch.inf)
        for block in logits.div(temperature).split(32, 1):
            larger = torch.maximum(most, block.amax(1))
            total = total * (most - larger).exp() + (block - larger[:, None]).exp().sum(1)
            most = larger
        sums = moments.sums_T3.clone()
        sums[:, 0] = (total * (most - top / temperature).exp()).double()
        return moments._replace(sums_T3=sums)

    return wrong


def one_sum(right):
    return lambda logits, top, ids, temperature, parts, more=False: right(logits, top, ids, temperature, 1, more)


def with_padded_vocabulary(right):
    def wrong(logits, top, ids, temperature, parts, more=False):
        moments = right(logits, top, ids, temperature, parts, more)
        padding = (-top.double() / temperature).exp()  # of one logit that is 0
        return moments._replace(sums_T3=moments.sums_T3 + padding[:, None])

    return wrong


def without_cap(module, name):
    def plant(m):
        right = getattr(module, name)
        m.setattr(module, name, lambda *args, cap=None, **kwargs: right(*args, cap=None, **kwargs))

    return plant


def logits_without_cap(right):
    return lambda hidden, unembed, cap=None: right(hidden, unembed)


def window_of(change):
    """A window that is another one in training."""

    def make(right):
        def wrong(q, k, v, offsets, mesh, window=None, form="auto", **options):
            return right(q, k, v, offsets, mesh, None if window is None else window + change, form, **options)

        return wrong

    return make


def output_bias_later(m):
    """The bias of attention's output is added to the residual stream, after the product."""
    mixed = []
    apply_mixer = attention.Attention.apply
    add = decoder._add

    def without(self, params, h, mesh, context):
        mixed.append(params["o_bias"])
        return apply_mixer(self, {**params, "o_bias": torch.zeros_like(params["o_bias"])}, h, mesh, context)

    def later(config, x, branch, out_norm):
        x = add(config, x, branch, out_norm)
        return x + mixed.pop() if mixed else x  # after the mixer, which has left its bias

    m.setattr(attention.Attention, "apply", without)
    m.setattr(decoder, "_add", later)


def bias_in_two_steps(right):
    return lambda x, weight, bias=None: right(x, weight) if bias is None else right(x, weight) + bias.flatten()


def wide_residual(right):
    """The stream between the halves of a layer is not rounded to 16 bits."""

    def wrong(config, x, branch, out_norm):
        if x.dtype != torch.float32:  # the mixer's half begins with the rounded stream
            return right(config, x.float(), branch.float(), out_norm)
        return right(config, x, branch.to(x.dtype), out_norm).bfloat16()

    return wrong


def wide_norm(right):
    return lambda x, weight, eps, offset=0.0: right(x, weight.to(x.dtype), eps, offset).to(weight.dtype)


def wide_stream(m):
    m.setattr(decoder, "_add", wide_residual(decoder._add))
    m.setattr(decoder, "rms_norm", wide_norm(decoder.rms_norm))


def token_scores(change):
    """A fault in what the trainer's scoring receives."""

    def plant(m):
        right = placed.Placed.token_scores

        def wrong(self, params, batch, want=("logp",), temperature=1.0, *rest):
            batch, temperature = change(batch, temperature)
            return right(self, params, batch, want, temperature, *rest)

        m.setattr(placed.Placed, "token_scores", wrong)

    return plant


def temperature_after(right):
    def wrong(self, params, batch, want=("logp",), temperature=1.0, *rest):
        scores = right(self, params, batch, want, 1.0, *rest)
        return scores._replace(logp=scores.logp / temperature)

    return wrong


def neighbours_joined(batch, temperature):
    """Two packed rows are one: the second sees the first."""
    offsets = batch.offsets
    return batch._replace(offsets=torch.cat([offsets[:1], offsets[2:]])) if len(offsets) > 2 else batch, temperature


def positions_go_on(batch, temperature):
    return batch._replace(positions=torch.arange(batch.tokens.shape[1])[None]), temperature


def positions_off(batch, temperature):
    return batch._replace(positions=batch.positions + 1), temperature


def padding_seen(right):
    """The first row begins with a token of padding, which it sees."""

    def front(x, value):
        return torch.cat([x.new_full((1, 1), value), x], 1)

    def wrong(self, params, batch, want=("logp",), temperature=1.0, *rest):
        shifted = batch._replace(
            tokens=front(batch.tokens, 0),
            positions=front(batch.positions, 0),
            segments=front(batch.segments, 1),
            mask=front(batch.mask, False),
            offsets=torch.cat([batch.offsets[:1], batch.offsets[1:] + 1]),
        )
        scores = right(self, params, shifted, want, temperature, *rest)
        return scores._replace(logp=scores.logp[:, 1:])

    return wrong


def newest_version(right):
    """All tokens of a completion have the version of its last one."""

    def wrong(self):
        return [done._replace(versions=torch.full_like(done.versions, int(done.versions[-1]))) for done in right(self)]

    return wrong


def pages_backwards(right):
    def wrong(q, paged, offsets, options):
        full = paged.ends_S // paged.keys.shape[1]
        table = paged.table_SP.clone()
        for row, count in zip(table, full.tolist(), strict=True):
            row[:count] = row[:count].flip(0)
        return right(q, paged._replace(table_SP=table), offsets, options)

    return wrong


def kept_pages(m):
    """New weights are loaded without the keys and values of the old ones being dropped."""
    right = engine.NativeEngine.load

    def wrong(self, named, version=0):
        if self.version is None:
            return right(self, named, version)
        with m.context() as inner:
            inner.setattr(engine.NativeEngine, "_drop_cache", lambda self: self._poll())
            return right(self, named, version)

    m.setattr(engine.NativeEngine, "load", wrong)


def other_row(right):
    def wrong(self, output, source, noise, sampling, seen):
        token, sampling_logp, raw_logp = right(self, output, source, noise, sampling, seen)
        return token, sampling_logp, raw_logp.roll(1)

    return wrong


def narrow_cache(right):
    def wrong(q, k, v, cache, paging, window=None, **options):
        k, v = (x.bfloat16().to(x.dtype) for x in (k, v))
        return right(q, k, v, cache, paging, window, **options)

    return wrong


def four_parts(right):
    return lambda size: min(4, right(size))


def plain_leave(right):
    return lambda x, mesh, split, pairwise=False: right(x, mesh, split)


def rounded_logits(right):
    return lambda hidden, unembed, cap=None: right(hidden, unembed, cap).bfloat16().float()


def whole_gelu(right):
    """Gelu itself in training, the approximation by tanh in the engine."""

    def wrong(gate_x, up, activation="silu"):
        return right(gate_x, up, activation) if torch.is_inference_mode_enabled() else F.gelu(gate_x) * up

    return wrong


FAULTS = {
    "attention by torch, whose order of keys is another": Fault(by_torch(varlen_attention), ONE),
    "attention over pages by torch": Fault(by_torch(paged_attention), IN_TORCH),
    "products by MKL": Fault(by_torch(linear), FLOAT32),
    "norms by torch": Fault(by_torch(norm), ONE),
    "rotations by torch": Fault(by_torch(rotary), ONE),
    "gates by torch": Fault(by_torch(gate), ONE),
    "normalizers by torch": Fault(by_torch(linear_logprob), ONE),
    "a merged split": Fault(lambda m: m.setattr(row_parallel, "parts_of", lambda size: 1), ONE),
    "four parts instead of eight": Fault(instead(row_parallel, "parts_of", four_parts), ONE),
    "one product in one part by MKL": Fault(
        lambda m: m.setattr(row_parallel, "linear_in_parts", lambda x, w, parts, wide=False: F.linear(x, w)), FLOAT32
    ),
    "half of a product's terms first": Fault(lambda m: m.setattr(row_parallel, "linear_in_parts", in_halves), FLOAT32),
    "queries, keys and values by MKL": Fault(lambda m: m.setattr(attention, "multiply", torch_linear), FLOAT32),
    "gate and up by MKL": Fault(lambda m: m.setattr(dense, "multiply", torch_linear), FLOAT32),
    "a norm with another tree": Fault(instead(decoder, "rms_norm", norm_by_halves), ONE),
    "norms of heads with another tree": Fault(instead(layers, "rms_norm", norm_by_halves), ONE | {"family": "qwen3"}),
    "angles in double precision": Fault(instead(layers.Rope, "rotations", rotation_in_double), FLOAT32),
    "rotation in double precision": Fault(instead(attention, "rotate", wide_rotation), FLOAT32),
    "a gate by a sigmoid": Fault(lambda m: m.setattr(dense, "gated", by_sigmoid), ONE | {"family": "llama"}),
    "a gate rounded once": Fault(lambda m: m.setattr(dense, "gated", rounded_once), BFLOAT16 | {"family": "qwen3"}),
    "gelu without the approximation": Fault(instead(dense, "gated", whole_gelu), ONE | {"family": "gemma2"}),
    "a running maximum": Fault(instead(linear_logprob, "logit_moments", running_maximum), FLOAT32),
    "a normalizer in one sum": Fault(
        instead(linear_logprob, "logit_moments", one_sum), ONE | {"dtype": torch.float64, "family": "llama"}
    ),
    "a padded vocabulary": Fault(instead(linear_logprob, "logit_moments", with_padded_vocabulary), ONE),
    "logits without their cap": Fault(
        instead(linear_logprob, "project", logits_without_cap), IN_TORCH | {"family": "gemma2"}
    ),
    "attention without its cap": Fault(without_cap(attention, "split_attention"), ONE | {"family": "gemma2"}),
    "a window of one token more": Fault(instead(attention, "split_attention", window_of(1)), ONE | {"family": "qwen2"}),
    "a window of one token less": Fault(
        instead(attention, "split_attention", window_of(-1)), ONE | {"family": "odd sizes"}
    ),
    "a bias after the residual": Fault(output_bias_later, FLOAT32 | {"family": "qwen2"}),
    "a bias after rounding": Fault(instead(attention, "multiply", bias_in_two_steps), BFLOAT16 | {"family": "qwen2"}),
    "a residual stream in 32 bits": Fault(wide_stream, BFLOAT16 | {"family": "llama"}),
    "logits of 16 bits": Fault(instead(linear_logprob, "project", rounded_logits), BFLOAT16),
    "the temperature twice": Fault(token_scores(lambda batch, t: (batch, t * t)), ONE | {"temperature": 0.7}),
    "no temperature": Fault(token_scores(lambda batch, t: (batch, 1.0)), ONE | {"temperature": 0.7}),
    "the temperature after the normalizer": Fault(
        instead(placed.Placed, "token_scores", temperature_after), ONE | {"temperature": 1.3}
    ),
    "a packed neighbour that leaks": Fault(token_scores(neighbours_joined), ONE | {"budget": 400}),
    "positions that go on in the next row": Fault(token_scores(positions_go_on), FLOAT32 | {"budget": 400}),
    "positions off by one": Fault(token_scores(positions_off), FLOAT32),
    "padding that is seen": Fault(instead(placed.Placed, "token_scores", padding_seen), ONE),
    "pages backwards": Fault(instead(paged_attention, "page_attention", pages_backwards), IN_TORCH | {"samples": 4}),
    "pages of old weights": Fault(kept_pages, ONE | IN_FLIGHT),
    "a prefix of old weights": Fault(kept_pages, ONE | AFTER_A_PAUSE),
    "old tokens with the new version": Fault(
        instead(sequences.RunningSequences, "take_ended", newest_version), ONE | IN_FLIGHT
    ),
    "the log-probability of another row": Fault(
        instead(backends.PackedBackend, "sample", other_row), ONE | {"max_rows": 512}
    ),
    "drafts with that of another position": Fault(instead(backends.TorchBackend, "sample", other_row), DRAFTS),
    "a page shared by samples that write": Fault(
        lambda m: m.setattr(backends.PackedBackend, "copy_pages", lambda *_: None), ONE | {"samples": 4}
    ),
    "keys of 16 bits in the cache": Fault(instead(attention, "paged_attention", narrow_cache), FLOAT32 | IN_TORCH),
    "ring attention": Fault(
        lambda m: m.setattr(sequence_parallel, "is_ring", lambda *_: True), ONE | {"train": "dp1,sp2,tp1"}
    ),
    "sums by ranks in turn": Fault(lambda m: m.setattr(split_residual, "psum_pairwise", in_turn), FLOAT32 | FOUR_RANKS),
    "sums by psum": Fault(instead(row_parallel, "leave", plain_leave), FLOAT32 | FOUR_RANKS),
    "a split stream by psum_scatter": Fault(
        instead(row_parallel, "leave", plain_leave), FLOAT32 | FOUR_RANKS | {"splits": True}
    ),
    "a normalizer by psum": Fault(
        lambda m: m.setattr(linear_logprob, "psum_pairwise", psum), FOUR_RANKS | {"dtype": torch.float64}
    ),
    "the engine's sums by psum": Fault(
        instead(row_parallel, "leave", plain_leave), FLOAT32 | {"generate": "tp4", "max_rows": 512}
    ),
}
