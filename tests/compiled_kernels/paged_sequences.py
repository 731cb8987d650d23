"""Small decoders, their weights, and sequences whose tokens they compute in any calls."""

import functools

import torch

from funrl import trees
from funrl.compiled_kernels import kernel_library
from funrl.compiled_kernels.decode_step import PAGE
from funrl.models.decoder.config import decoder_config
from funrl.models.decoder.decoder import decoder_model
from funrl.models.decoder.layers import RopeScaling

NO_KERNEL = kernel_library.library_problem()
_SIZES = {"vocab": 130, "embed": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 96}
CONFIGS = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "output_bias": True},
    "llama with scaled rope": {"rope_scaling": RopeScaling("llama3", 4.0, original=64), "tied": True},
    "qwen2": {"family": "qwen2", "attention_bias": True, "windows": (None, 7)},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head": 32, "windows": (5, 20)},
    "one head each": {"kv_heads": 4, "head": 64, "rope_scaling": RopeScaling("yarn", 4.0, 1.0, 32.0, original=64)},
    "groups of 7": {"heads": 14, "kv_heads": 2, "head": 8},
    "groups of 10": {"heads": 10, "kv_heads": 1, "head": 18},
    "odd sizes": {"vocab": 101, "embed": 90, "heads": 6, "head": 8, "mlp": 77, "windows": (9, None)},
}


def config_of(name):
    return decoder_config(**(_SIZES | CONFIGS[name]))


@functools.cache
def weights(config):
    """Random weights in which norms and biases count too."""
    generator = torch.Generator().manual_seed(0)
    params = decoder_model(config).init(generator)

    def disturb(name, x):
        some = 0.1 * torch.randn(x.shape, generator=generator)
        return x + some if name.endswith(("norm", "bias")) else x

    return trees.map_named(disturb, params)


def cast(params, dtype):
    return trees.map_named(lambda _, x: x.to(dtype), params)


class Sequences:
    """Sequences of random tokens over pages of a decoder's cache; any tokens are computed in any order."""

    def __init__(self, decoder, lengths, shuffle=None, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.decoder, self.lengths = decoder, lengths
        self.tokens = [torch.randint(decoder.sizes.vocab, (length,), generator=generator) for length in lengths]
        width = -(-max(lengths) // PAGE)
        pages = torch.arange(len(lengths) * width)
        if shuffle is not None:
            pages = torch.randperm(len(pages) + 5, generator=torch.Generator().manual_seed(shuffle))[: len(pages)]
        self.tables = pages.int().view(len(lengths), width)
        self.cache = decoder.init_cache(len(lengths) * width + 5)

    def compute(self, parts):
        """Logits of all tokens of parts (sequence, first, end), in one call."""
        tokens = torch.cat([self.tokens[s][first:end] for s, first, end in parts])
        positions = torch.cat([torch.arange(first, end) for _, first, end in parts])
        sequence = torch.cat([torch.full((end - first,), s) for s, first, end in parts])
        draw = torch.arange(len(tokens))
        return self.decoder.forward(self.cache, tokens, positions, sequence, self.tables, draw)

    def all(self, calls):
        """Logits of each sequence, [T, V], computed in these calls."""
        results = [[None] * length for length in self.lengths]
        for parts in calls:
            logits = iter(self.compute(parts))
            for s, first, end in parts:
                results[s][first:end] = [next(logits) for _ in range(first, end)]
        return [torch.stack(item) for item in results]

    def pages(self, s):
        """Keys and values of one sequence, a page after the other; less what was never written."""
        return [x[:, self.tables[s, : -(-self.lengths[s] // PAGE)].long()] for x in self.cache]


def at_once(lengths):
    return [[(s, 0, length) for s, length in enumerate(lengths)]]


def one_by_one(lengths):
    return [[(s, t, t + 1)] for s, length in enumerate(lengths) for t in range(length)]


def together(lengths):
    """Prompts of 5 tokens, then all rows decode together as long as they last."""
    first = [[(s, 0, min(5, length)) for s, length in enumerate(lengths)]]
    return first + [[(s, t, t + 1) for s, n in enumerate(lengths) if t < n] for t in range(5, max(lengths))]


def chunks(lengths):
    """The first sequence in chunks of 7 beside decoding rows of the others, last sequence first."""
    calls = [[(s, 0, 3) for s in range(1, len(lengths))]]
    for i in range(max(-(-lengths[0] // 7), max(lengths) - 3)):
        call = [(s, 3 + i, 4 + i) for s in reversed(range(1, len(lengths))) if 3 + i < lengths[s]]
        if 7 * i < lengths[0]:
            call.append((0, 7 * i, min(7 * i + 7, lengths[0])))
        calls.append(call)
    return [call for call in calls if call]


def equal(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
