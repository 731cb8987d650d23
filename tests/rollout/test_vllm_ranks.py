"""vLLM over two tensor ranks keeps every engine's promises too, in one run: it takes seconds to start."""

import pytest
from small_engines import KINDS, NO_VLLM
from test_engines import CONTRACT

from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse


@pytest.mark.gloo
@pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
def test_two_ranks_of_vllm_keep_every_promise():
    def program(mesh):
        kept = []
        for promise in CONTRACT:
            promise(KINDS["vllm"], mesh)
            kept.append(promise.__name__)
        return kept

    assert launch(program, parse("tp2"), "cpu") == [promise.__name__ for promise in CONTRACT]
