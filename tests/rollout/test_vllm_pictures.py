"""Prompts with pictures in vLLM: the same tokens, and the trainer's log-probabilities."""

import itertools

import pytest
import torch
from small_engines import NO_VLLM

from funrl.batch import Batch, declare
from funrl.kinds import joined_lines, owned_lines
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model, place
from funrl.models.errors import ModelError
from funrl.models.vision.config import TowerConfig, TowerForm
from funrl.models.vision.inputs import collapsed
from funrl.models.vision.model import with_vision
from funrl.rollout.engine import complete
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.contract import VLLMOptions
from funrl.rollout.vllm.core import check_vllm, start_vllm
from funrl.rollout.vllm.engine import VLLMEngine, vllm_weights
from funrl.rollout.vllm.pictures import torchvision_problem, vllm_prompt
from funrl.trainer.steps.step_rows import owned_fields, ragged

NO_PICTURES = NO_VLLM or torchvision_problem()
needs_pictures = pytest.mark.skipif(NO_PICTURES is not None, reason=str(NO_PICTURES))
PLACEHOLDER, VIDEO, BEGIN, END = 44, 45, 46, 47
SIZES = {"vocab": 48, "embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head": 32, "mlp": 48, "max_positions": 256}
SIDES = {"layers": 2, "embed": 32, "heads": 2, "inner": 40, "patch": 4}
TOKENS = {"placeholder": PLACEHOLDER, "banned": (VIDEO,), "begin": BEGIN, "end": END}
DEEP = TowerForm(
    norm="layer",
    gated=False,
    patch_bias=True,
    table=6,
    deep_layers=(0, 1),
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
AXES = {
    "qwen2_5_vl": (0,) * 8 + (1,) * 4 + (2,) * 4,
    "qwen3_vl": tuple(i % 3 if i < 12 else 0 for i in range(16)),
}
TOWERS = {
    "qwen2_5_vl": TowerConfig(**SIDES, **TOKENS, window=16, whole_layers=(1,)),
    "qwen3_vl": TowerConfig(**SIDES, **TOKENS, window=None, form=DEEP),
}
GREEDY = Sampling(max_new_tokens=8, greedy=True)


def model_of(family):
    """A tiny model, and weights with distributions that are neither flat nor certain."""
    switches = {"attention_bias": True, "norm_eps": 1e-6} if family == "qwen2_5_vl" else {"qk_norm": True}
    config = decoder_config(**SIZES, **switches, family=family, rope_axes=AXES[family], eos=(1,), pad=0)
    model = with_vision(decoder_model(config), TOWERS[family])
    params = model.init(torch.Generator().manual_seed(0))
    params["embed"] *= 8
    params["unembed"] *= 25
    return model, params


def pictures(seed, *grids):
    """Pictures of these heights and widths in patches."""
    draw = torch.Generator().manual_seed(seed)
    patches = torch.randint(0, 256, (sum(h * w for h, w in grids), 3, 4, 4), generator=draw, dtype=torch.uint8)
    return owned_lines({"patches": patches, "grids": torch.tensor(grids, dtype=torch.int64).reshape(-1, 2)})


def prompt(*grids, text=(3, 4, 5)):
    """Token ids of pictures, and of a text behind them."""
    return [*itertools.chain(*([BEGIN] + [PLACEHOLDER] * (h * w // 4) + [END] for h, w in grids)), *text]


def requests():
    """Two prompts of equal tokens and other pictures, one of several, and two texts; one owns no picture."""
    grids = (6, 8), (2, 2)
    some = [Request(i, prompt(*grids), GREEDY, seed=i, owned=pictures(i, *grids)) for i in range(2)]
    large = (12, 4), (2, 10), (8, 8)
    many = Request(2, prompt(*large, text=range(3, 12)), GREEDY, seed=2, owned=pictures(2, *large))
    texts = [Request(3, [3, 4, 5], GREEDY, seed=3), Request(4, [5, 4, 3], GREEDY, seed=4, owned=pictures(4))]
    return [*some, many, *texts]


def trainer_logp(model, params, request, completion):
    """Log-probabilities of a completion as the trainer scores it."""
    assert len(completion.tokens) and not set(completion.tokens.tolist()) & {PLACEHOLDER, VIDEO}
    tokens = torch.tensor([[*request.prompt, *completion.tokens.tolist()]])
    mask = torch.arange(tokens.shape[1]).unsqueeze(0) >= len(request.prompt)
    batch = Batch(tokens=tokens, mask=mask)
    if request.owned is not None:
        fields = {name: ragged([x], x[:0]) for name, x in request.owned.values.items()}
        batch = declare(batch, owned_fields(request.owned.values))._replace(**fields)
    return place(model).token_scores(params, batch).logp[0, len(request.prompt) :]


def assert_later_turns(engine, model, weights):
    """Two conversations of equal tokens and other pictures go on: with a further picture, then with none."""
    begun = [([], [], number) for number in range(2)]
    for turn, grids in enumerate(((6, 8), (2, 10), None)):
        asked = []
        for before, shown, number in begun:
            new = prompt(text=(7, 8)) if grids is None else prompt(grids)
            shown += [] if grids is None else [pictures(10 + 2 * turn + number, grids)]
            owned = joined_lines(shown)
            tokens = [*before, *new]
            asked.append(Request(number, tokens, GREEDY, seed=number, owned=owned, computed=max(0, len(before) - 1)))
        done = complete(engine, asked)
        for request, completion in zip(asked, done, strict=True):
            expected = trainer_logp(model, weights, request, completion)
            assert (completion.raw_logp - expected).abs().max() < 2e-5
        results = [
            [*request.prompt, *completion.tokens.tolist()] for request, completion in zip(asked, done, strict=True)
        ]
        begun = [(tokens, shown, number) for tokens, (_, shown, number) in zip(results, begun, strict=True)]


@needs_pictures
@pytest.mark.parametrize("family", AXES)
def test_completions_have_the_trainers_log_probabilities(family):
    model, params = model_of(family)
    core = start_vllm(model, SINGLE, torch.float32, VLLMOptions(4))
    engine = VLLMEngine(model, vllm_weights(model, SINGLE, torch.float32), core, VLLMOptions(4))
    other = model.init(torch.Generator().manual_seed(1))
    asked = requests()
    for version, weights in enumerate((params, {**params, "vision": other["vision"]})):
        engine.load(engine.weights.named(weights), version=version)
        done = complete(engine, asked)
        for request, completion in zip(asked, done, strict=True):
            expected = trainer_logp(model, weights, request, completion)
            assert (completion.raw_logp - expected).abs().max() < 2e-5
        assert not torch.equal(done[0].raw_logp, done[1].raw_logp)
        assert_later_turns(engine, model, weights)
    held = [name for name, x in engine.held_weights() if x is not None]
    assert any("visual" in name for name in held) and any("norm" in name for name in held)


def test_each_picture_has_one_placeholder_and_its_pixels():
    owned = pictures(0, (4, 6), (2, 2))
    tokens = [3, *[PLACEHOLDER] * 6, PLACEHOLDER, 5]
    assert collapsed(TOWERS["qwen3_vl"], tokens, ((4, 6), (2, 2))) == [3, PLACEHOLDER, PLACEHOLDER, 5]
    first, second = vllm_prompt(TOWERS["qwen3_vl"], tokens, owned)["multi_modal_data"]["image"]
    assert (first.size, second.size) == ((24, 16), (8, 8))
    corner = torch.frombuffer(bytearray(second.crop((4, 0, 8, 4)).tobytes()), dtype=torch.uint8)
    assert torch.equal(corner, owned.values["patches"][25].permute(1, 2, 0).flatten())


def test_tensor_ranks_that_share_a_model_with_pictures_are_refused():
    model, _ = model_of("qwen3_vl")
    with pytest.raises(ModelError, match="2 tensor ranks share a model that sees pictures, with which vLLM has not"):
        check_vllm(model, "cpu", torch.float32, tensor=2)
