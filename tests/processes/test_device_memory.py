"""The allocator of a GPU is configured before the device is used, and never against the user."""

import pytest
import torch
from torch.distributed import HashStore

from funrl.mesh import launch
from funrl.mesh.mesh import parse
from funrl.processes import device_memory
from funrl.processes.device_memory import VARIABLES, expand_segments


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", made.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append("device"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return made


def test_segments_expand_unless_the_user_says_otherwise(calls, monkeypatch):
    assert expand_segments() and expand_segments(False)
    assert calls == ["expandable_segments:True", "expandable_segments:False"]
    for name in VARIABLES:
        assert not expand_segments(environment={name: "max_split_size_mb:512"})
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not expand_segments() and len(calls) == 2


def test_one_process_configures_memory_before_it_takes_its_device(calls):
    with launch._single("cpu"):
        assert calls == []
    with launch._single("cuda"):
        assert calls == ["expandable_segments:True", "device"]


def test_a_rank_configures_memory_before_it_takes_its_device(calls, monkeypatch):
    def init_process_group(*given, **named):
        raise RuntimeError("no further")

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(launch, "_check_same_mesh", lambda *given: None)
    rank = launch._Rank(1, 1, 2)
    group = launch._process_group(parse("dp2"), rank, "cuda", HashStore(), launch.WaitLimits().timeout)
    with pytest.raises(RuntimeError, match="no further"), group:
        pass
    assert calls == ["expandable_segments:True", "device"]


def test_copies_to_the_host_are_waited_for_where_there_is_a_gpu(monkeypatch):
    waits = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            waits.append(self.device)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device_memory.copy_stream.cache_clear()
    device_memory.wait_for_copies()
    assert waits == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device_memory.wait_for_copies()
    assert waits == [torch.device("cuda:1")]
    device_memory.copy_stream.cache_clear()
