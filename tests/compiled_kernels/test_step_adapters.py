"""Adapters in the decoding step: the bits of the trainer's products one by one, whatever adapters a call mixes."""

import functools

import pytest
import torch
from paged_sequences import NO_KERNEL, Sequences, config_of, weights

from funrl import trees
from funrl.compiled_kernels.decode_step import packed_decoder
from funrl.compiled_kernels.exact.adapters import TokenAdapters
from funrl.compiled_kernels.linear_logprob import project
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.decoder.decoder import decoder_model
from funrl.models.lora import factors_of_layers, scale_of, with_lora
from funrl.models.model import Inputs, Lora

pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))
ALL = ("q", "k", "v", "o", "gate", "up", "down")
LORAS = [Lora(3, 5.0, ALL), Lora(1, 2.0, ("q", "up")), Lora(20, 7.0, ("k", "o", "down"))]
FAMILIES = ["llama with biases", "qwen3", "odd sizes"]


@functools.cache
def adapted(name, number):
    """A model with adapters that count, and its weights."""
    model = with_lora(decoder_model(config_of(name)), LORAS[number])
    generator = torch.Generator().manual_seed(number)
    own = model.init(generator, torch.float64)
    base = dict(trees.named(weights(config_of(name))))

    def draw(name, x):
        return base[name].double() if name in base else x + 0.3 * torch.randn(x.shape, generator=generator)

    return model, trees.map_named(draw, own)


def trained_logits(model, params, tokens, dtype):
    params = trees.map(lambda x: x.to(dtype), params)
    hidden = model.apply(params, Inputs(tokens[None], offsets=torch.tensor([0, len(tokens)], dtype=torch.int32))).hidden
    return project(hidden[0], model.unembed(params))


class Mixed(Sequences):
    """Sequences each with an adapter of its own, or none."""

    def __init__(self, decoder, lengths, adapters, numbers):
        super().__init__(decoder, lengths)
        self.adapters, self.numbers = adapters, numbers

    def compute(self, parts):
        forward = self.decoder.forward
        each = torch.cat([torch.full((end - first,), self.numbers[s]) for s, first, end in parts])
        self.decoder.forward = functools.partial(forward, adapters=TokenAdapters(self.adapters, each))
        try:
            return super().compute(parts)
        finally:
            self.decoder.forward = forward


@pytest.mark.parametrize(
    "name,dtype", [*zip(FAMILIES, [torch.bfloat16, torch.float32, torch.float64], strict=True)], ids=str
)
def test_tokens_have_the_trainer_s_bits_whatever_adapters_a_call_mixes(name, dtype):
    base = trees.map(lambda x: x.to(dtype), weights(config_of(name)))
    decoder = packed_decoder(step_sizes(config_of(name)), base, dtype, threads=2)
    packed = []
    for number in range(len(LORAS)):
        params = trees.map(lambda x: x.to(dtype), adapted(name, number)[1])
        packed.append(decoder.adapter(factors_of_layers(params), scale_of(LORAS[number])))
    lengths, numbers = [9, 30, 1, 17, 70, 5], [0, 2, -1, 1, 0, -1]
    mixed = Mixed(decoder, lengths, packed, numbers)
    calls = [[(s, 0, (n + 1) // 2) for s, n in enumerate(lengths)]]
    calls += [[(s, t, t + 1)] for s, n in enumerate(lengths[:4]) for t in range((n + 1) // 2, n)]
    calls += [[(5, 3, 5), (4, 35, 70)]]
    for s, logits in enumerate(mixed.all(calls)):
        plain = (decoder_model(config_of(name)), trees.map(lambda x: x.double(), weights(config_of(name))))
        model, params = plain if numbers[s] < 0 else adapted(name, numbers[s])
        assert torch.equal(logits, trained_logits(model, params, mixed.tokens[s], dtype)), s


def test_the_factors_are_read_back_as_they_were_given():
    for name in FAMILIES:
        base = weights(config_of(name))
        decoder = packed_decoder(step_sizes(config_of(name)), base, torch.float32)
        for number in range(len(LORAS)):
            layers = factors_of_layers(adapted(name, number)[1])
            results = [*decoder.adapter(layers, 1.0).factors()]
            for layer, back in zip(layers, results, strict=True):
                assert layer.keys() == back.keys()
                for which in layer:
                    pairs = zip(layer[which], back[which], strict=True)
                    assert all(torch.equal(x.float(), y) for x, y in pairs)


def test_a_call_s_adapters_are_checked():
    decoder = packed_decoder(step_sizes(config_of("qwen3")), weights(config_of("qwen3")), torch.float32)
    sequences = Mixed(decoder, [3], [], [0])
    with pytest.raises(ValueError, match="a token's adapter is not one of the call's"):
        sequences.compute([(0, 0, 3)])
