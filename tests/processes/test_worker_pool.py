"""Worker processes that a rank calls."""

import pickle

from funrl.processes.worker_pool import Lane, WorkerCall, open_workers


def allocate(payload):
    try:
        return len(bytearray(pickle.loads(payload)))
    except MemoryError:
        return "no memory"


def test_a_worker_may_take_so_much_memory_beyond_what_it_has():
    with open_workers([Lane(allocate, 1, 1, memory_bytes=1 << 29)], "allocating workers") as client:
        calls = [client.begin(WorkerCall(payload=pickle.dumps(1 << bits))) for bits in (27, 31)]
        assert [call.future.result(60) for call in calls] == [1 << 27, "no memory"]
