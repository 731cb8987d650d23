"""Seconds until a compiled layer has gone forward and backward: with an empty cache, and with that cache again."""

from __future__ import annotations

import os
import tempfile
import time

import torch
from gpu_parts.models import model_of, random_weights
from gpu_parts.rows import Bench, Row, Rows, now

from funrl import trees
from funrl.mesh.mesh import Mesh, parse
from funrl.models import Model, compile_layer
from funrl.models.model import Inputs

TOKENS = 1024


def compile_rows(bench: Bench) -> Rows:
    """A cold and a warm compile; dynamo starts anew each time, and the processes of inductor stay."""
    name = "0.2M" if bench.small else "1.7B"
    model = model_of(name).with_layers(1)
    with tempfile.TemporaryDirectory() as folder:
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[variable] = os.path.join(folder, variable.lower())
        for kind in ("cold", "warm"):
            torch.compiler.reset()
            begin = time.perf_counter()
            one_pass(bench, model)
            yield Row(f"compile a layer, {name}, {kind}", now(bench.device) - begin, "s")


def one_pass(bench: Bench, model: Model) -> None:
    """Forward and backward of a model of one compiled layer over a packed row."""
    params = random_weights(model, bench.device, torch.bfloat16)
    leaves = [x.requires_grad_() for x in trees.leaves(params)]
    tokens_1T = torch.arange(TOKENS, device=bench.device)[None] % 2
    offsets = torch.tensor([0, TOKENS // 2, TOKENS], dtype=torch.int32, device=bench.device)
    inputs = Inputs(tokens_1T, torch.arange(TOKENS, device=bench.device)[None] % (TOKENS // 2), offsets=offsets)
    layer = compile_layer(model, "on", bench.device.type)
    hidden, _, _ = model.apply(params, inputs, Mesh(parse("dp1"), 0, bench.device), None, layer)
    torch.autograd.grad(hidden.sum(), leaves, allow_unused=True)
