"""Engine and trainer compute the same bits of models with experts, whatever the mesh of the trainer.

Families of their own for the draws of `test_same_bits`; `-k "draw and 17"` runs one draw alone.
"""

import dataclasses
import functools
import itertools
import random

import pytest
import torch
from bit_texts import Texts as PlainTexts
from bit_texts import unlike
from selection import quick

from funrl import trees
from funrl.compiled_kernels import grouped_linear
from funrl.compiled_kernels.exact import gate, router
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder import experts as experts_module
from funrl.models.decoder import routing
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.layers import RopeScaling
from funrl.models.decoder.routing import ClampedGate, Experts

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
QUICK = 3
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = {"vocab": 136, "embed": 64, "layers": 2, "heads": 8, "kv_heads": 4, "head": 16, "mlp": 96}
FAMILIES = {
    "mixtral": {"experts": Experts(8, 2, 48)},
    "qwen3 moe": {"qk_norm": True, "experts": Experts(16, 5, 40, dense=(0,))},
    "qwen2 moe": {
        "attention_bias": True,
        "experts": Experts(8, 3, 24, normalized=False, shared=40, shared_weighted=True),
    },
    "deepseek v2": {
        "experts": Experts(8, 3, 16, normalized=False, groups=4, chosen_groups=2, best_of_group=1, scale=1.5, shared=32)
    },
    "deepseek v3": {
        "experts": Experts(
            16, 4, 24, scoring="sigmoid", biased=True, groups=4, chosen_groups=2, scale=2.5, shared=24, wide=True
        )
    },
    "deepseek": {
        "kv_heads": 8,
        "head": 24,
        "latent": LatentSizes(24, 20, 16, 8, 12),
        "experts": Experts(8, 3, 16, scoring="sigmoid", biased=True, shared=16, dense=(0,)),
    },
    "latent attention": {"kv_heads": 8, "head": 24, "latent": LatentSizes(40, None, 16, 8, 32, interleaved=False)},
    "olmo2": {"norms": "post", "qk_norm": True, "qk_norm_over": "projection"},
    "olmo2, one key head": {"norms": "post", "qk_norm": True, "qk_norm_over": "projection", "kv_heads": 1},
    "odd sizes": {"embed": 90, "head": 10, "experts": Experts(5, 2, 11, shared=13)},
}
YARN = RopeScaling("yarn", 8.0, 1.0, 4.0, original=32, truncate=False)
BIASES = {"attention_bias": True, "output_bias": True}
SWITCHES = {  # which no draw has: each is tried by itself
    "gpt-oss": BIASES
    | {
        "attention_sinks": True,
        "windows": (9, None),
        "rope_scaling": YARN,
        "experts": Experts(8, 3, 24, clamped=ClampedGate(limit=0.9)),
    },
    "gpt-oss, one key head": {
        "attention_sinks": True,
        "kv_heads": 1,
        "head": 10,
        "experts": Experts(8, 1, 24, clamped=ClampedGate()),
    },
    "ernie 4.5": BIASES | {"rotary_pairs": True, "mlp_bias": True},
    "ernie 4.5 moe": {"rotary_pairs": True, "experts": Experts(8, 3, 24, biased=True, shared=24, wide=True)},
    "ministral 3": {"query_growth": 0.3, "rope_scaling": dataclasses.replace(YARN, original=8)},
    "phi3, long": {"rotary_part": 8, "rope_scaling": RopeScaling("longrope", 8.0, short=(1.0, 1.3, 2.0, 3.0))},
    "exaone 4": {"norms": "post", "qk_norm": True, "rotates": (True, False), "windows": (9, None)},
    "gelu": {"activation": "gelu_erf", "mlp_bias": True},
}
ALL_FAMILIES = FAMILIES | SWITCHES


@functools.cache
def model_of(family):
    model = decoder_model(decoder_config(**(SIZES | ALL_FAMILIES[family])))
    generator = torch.Generator().manual_seed(0)
    params = model.init(generator, torch.float64)

    def larger(name, x):
        if name.endswith("router_bias"):
            return torch.rand(x.shape, generator=generator, dtype=x.dtype)
        if name.endswith("bias") and family in SWITCHES:
            return torch.randn(x.shape, generator=generator, dtype=x.dtype) / 3
        return x * (20 if name in ("embed", "unembed") or name.endswith("router") else 1)

    return model, trees.map_named(larger, params)


class Texts(PlainTexts):
    """Completions of an engine of a model with experts."""

    def __init__(self, family, dtype, seed):
        self.pick = random.Random(seed)
        self.model, self.params = model_of(family)
        self.dtype = dtype
        self.temperature = self.pick.choice([1.0, 1.0, 0.7, 1.3])

    def packed(self, some, multiple):
        """Rows that up to eight ranks can share."""
        return super().packed(some, -(-multiple // 8) * 8)


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", quick(range(len(FAMILIES)), range(QUICK)))
def test_a_draw(number):
    """One of each family."""
    pick = random.Random(number)
    torch.set_num_threads(pick.choice([1, 2]))
    texts = Texts(list(FAMILIES)[number], DTYPES[number % len(DTYPES)], number)
    assert texts.generate(speculate=pick.choice([0, 0, 3]), max_rows=pick.choice([1, 3, 512])).differ() == 0


OF_SWITCHES = list(zip(SWITCHES, itertools.cycle(DTYPES), strict=False))


@pytest.mark.parametrize("case", quick(OF_SWITCHES, [("gpt-oss", torch.float32)]), ids=str)
def test_a_switch(case):
    family, dtype = case
    assert Texts(family, dtype, 29).generate(max_rows=3).differ() == 0


def by_torch(*modules):
    def plant(monkeypatch):
        for module in modules:
            monkeypatch.setattr(module, "computes_exactly", lambda *_: False)

    return plant


def added_by_expert(monkeypatch):
    """A token's experts in the order of their numbers."""
    combine = routing.combine

    def ordered(y_MD, weights_TK, slots):
        order_TK = slots.row_TK.argsort(-1, descending=True)
        weights_TK, row_TK = (x.gather(1, order_TK) for x in (weights_TK, slots.row_TK))
        return combine(y_MD, weights_TK, slots._replace(row_TK=row_TK))

    monkeypatch.setattr(experts_module, "combine", ordered)


FAULTS = {
    "grouped products by MKL": by_torch(grouped_linear, experts_module),
    "scores by torch": by_torch(router),
    "gates by torch": by_torch(gate),
    "sums in the order of experts": added_by_expert,
    "sums over an expert's inner size in one part": lambda m: m.setattr(experts_module, "fixed_parts", lambda *_: 1),
}


@functools.cache
def right_texts(family):
    return Texts(family, torch.float32, 2).generate()


@pytest.mark.parametrize("fault", quick(FAULTS, ["gates by torch", "sums in the order of experts"]))
def test_a_planted_fault_is_found(fault, monkeypatch):
    """In float32, where the engine is right and the trainer is not."""
    right = [right_texts(family) for family in ("qwen3 moe", "deepseek v3")]
    FAULTS[fault](monkeypatch)
    assert any(texts.differ() for texts in right)


@functools.cache
def texts_of_one_rank(family, dtype):
    """Texts of an engine on one rank; ranks that are forked later have them."""
    return Texts(family, dtype, 18).generate()


def count_on(mesh, cases):
    """Differing tokens of texts of an engine on one rank: scored on a mesh, with and without a split stream, and
    generated on it.

    What a mesh generates bit for bit like one rank is scored like it.
    """
    counts = {}
    for family, dtype in cases:
        alone = texts_of_one_rank(family, dtype)
        counts[family, dtype] = [alone.differ(mesh), alone.differ(mesh, splits=True)]
        if mesh.size("expert") == 1:
            counts[family, dtype].append(unlike(Texts(family, dtype, 18).generate(mesh).done, alone.done))
    return counts


OF_TENSOR_RANKS = [("latent attention", torch.float32), ("olmo2, one key head", torch.bfloat16)]
OF_BOTH = [("deepseek v3", torch.bfloat16), ("gpt-oss", torch.float32)]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh,cases",
    [
        ("ep2", [("qwen3 moe", torch.float32)]),
        pytest.param("tp2", OF_TENSOR_RANKS, marks=pytest.mark.slow),
        pytest.param("ep2,tp2", OF_BOTH, marks=pytest.mark.slow),
    ],
)
def test_the_bits_do_not_depend_on_the_mesh(mesh, cases):
    for family, dtype in cases:
        texts_of_one_rank(family, dtype)
    result = launch(functools.partial(count_on, cases=cases), parse(mesh), "cpu")
    assert all(not any(counts) for counts in result.values()), result


def scored_by_ulysses(mesh, families):
    return {family: texts_of_one_rank(family, torch.float32).differ(mesh) for family in families}


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_that_share_a_row_keep_the_bits():
    families = ["deepseek", "gpt-oss"]
    for family in families:
        texts_of_one_rank(family, torch.float32)
    result = launch(functools.partial(scored_by_ulysses, families=families), parse("sp2"), "cpu")
    assert result == dict.fromkeys(families, 0)


def test_equal_scores_choose_the_first_expert():
    """In rows of many and of few tokens alike."""
    experts = Experts(16, 3, 8)
    logits = torch.zeros(70, 16)
    logits[:, 5] = 1
    for rows in (1, 3, 70):
        chosen = routing.route(experts, logits[:rows], torch.float32).ids_TK
        assert chosen.tolist() == [[5, 0, 1]] * rows
