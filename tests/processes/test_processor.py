"""Products have the same bits wherever their tensors are in memory, and what decides bits is known and said."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from funrl.processes.processor import VARIABLE, other_processor, processor_facts, products_mode, products_problem

LINE = 64  # bytes of a line of the cache
SHAPES = [(1, 64, 64), (7, 33, 65), (16, 64, 128), (3, 5, 7), (64, 48, 40), (1, 256, 512)]  # m, k, n
OPERATIONS = {
    "mm": (torch.mm, lambda m, k, n: [(m, k), (k, n)]),
    "linear": (F.linear, lambda m, k, n: [(m, k), (n, k)]),
    "gradient of linear": (lambda x, y: x.t() @ y, lambda m, k, n: [(k, m), (k, n)]),
    "bmm": (torch.bmm, lambda m, k, n: [(2, m, k), (2, k, n)]),
    "mv": (torch.mv, lambda m, k, n: [(m, k), (k,)]),
    "attention": (F.scaled_dot_product_attention, lambda m, k, n: [(1, 2, m, k), (1, 2, n, k), (1, 2, n, k)]),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda m, k, n: [(k, n)]),
    "sum": (lambda x: x.sum(-1), lambda m, k, n: [(k, n)]),
    "silu": (F.silu, lambda m, k, n: [(k, n)]),
}


def placed(x, offset):
    """A copy of x whose memory begins `offset` numbers after a line of the cache."""
    line = LINE // x.element_size()
    memory = torch.empty(x.numel() + 2 * line, dtype=x.dtype)
    start = -(memory.data_ptr() // x.element_size()) % line + offset
    return memory[start : start + x.numel()].view(x.shape).copy_(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_bits_do_not_depend_on_where_tensors_are_in_memory(name, dtype):
    operation, shapes = OPERATIONS[name]
    draw = torch.Generator().manual_seed(0)
    for sizes in SHAPES:
        inputs = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes(*sizes)]
        expected = operation(*(placed(x, 0) for x in inputs))
        for moved in range(len(inputs)):
            for offset in (1, 2, 3, 5):
                moved_inputs = [placed(x, offset if i == moved else 0) for i, x in enumerate(inputs)]
                assert torch.equal(operation(*moved_inputs), expected), (sizes, moved, offset)


def in_a_process(code, value):
    """Output of a program in a process with a value of MKL_CBWR, or without one where it is None."""
    environment = {name: text for name, text in os.environ.items() if name != VARIABLE}
    environment |= {} if value is None else {VARIABLE: value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


SAY = """
import os
from funrl.processes.processor import products_mode, products_problem
print(os.environ["MKL_CBWR"], products_mode(), products_problem())
"""
MULTIPLY = "import torch; torch.ones(4, 4) @ torch.ones(4, 4)\n"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
@pytest.mark.slow
def test_the_users_mode_is_kept_and_one_that_comes_too_late_is_said():
    late = in_a_process(MULTIPLY + SAY, None)
    assert late.startswith("AUTO off ") and "before funrl was imported" in late and "import funrl first" in late
    assert in_a_process(MULTIPLY + SAY, "COMPATIBLE") == "COMPATIBLE COMPATIBLE"


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch has no MKL")
def test_the_mode_is_set_before_the_first_product():
    """As tests/conftest.py imports funrl before that."""
    assert os.environ[VARIABLE] == products_mode() and products_problem() == ""


def test_another_processor_is_named_where_a_run_goes_on():
    facts = processor_facts()
    assert facts["name"] and facts[VARIABLE] == products_mode()
    assert other_processor(facts) == other_processor(None) == ""
    assert "name Z80, now " + facts["name"] in other_processor(facts | {"name": "Z80"})


def test_a_cap_on_instructions_is_a_fact(monkeypatch):
    facts = processor_facts()
    monkeypatch.setenv("FUNRL_ISA", "avx2")
    assert processor_facts() == facts | {"FUNRL_ISA": "avx2"}
    assert other_processor(facts).endswith("FUNRL_ISA not set, now avx2")
