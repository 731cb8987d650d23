"""The pool of reward workers: order, parallelism, and every way to fail."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from forked_python import start_python
from rewarded_rows import score_rows

from funrl.rewards import pool as reward_pool
from funrl.rewards.call import CompletedRow, RewardError
from funrl.rewards.pool import Pool, open_pool
from funrl.rewards.verifiers import exact_match

BOTH = pytest.mark.parametrize("workers", [0, 2])


def results(futures):
    return [future.result(timeout=120) for future in futures]


def rows_of(*completions, **fields):
    return [CompletedRow("p", completion, fields) for completion in completions]


@BOTH
def test_results_are_in_order_one_number_a_function(workers):
    def slow_if_short(prompt, completion, *, unit):  # a closure: `workers` cannot be pickled with it
        time.sleep(0.05 if len(completion) == 1 else 0)
        return len(completion) * unit + workers * 0

    with open_pool([slow_if_short, lambda p, c, **_: float(c == "xx")], workers) as pool:
        first = score_rows(pool, rows_of("x", "xx", "xxx", unit=2))
        second = score_rows(pool, rows_of("", unit=3))
        assert results(first) == [[2, 0], [4, 1], [6, 0]] and results(second) == [[0, 0]]
        assert score_rows(pool, []) == []
        assert results(score_rows(pool, rows_of("x" * 1_000_000, unit=1))) == [[1_000_000, 0]]


def test_the_printed_example():
    with open_pool([exact_match], 1) as pool:
        assert results(score_rows(pool, [CompletedRow("1+1=", "2", {"answer": "2"})])) == [[1.0]]


def test_rows_are_rewarded_side_by_side_while_the_rank_does_something_else(tmp_path):
    def wait(prompt, completion):
        """Wait for a row in each worker, and for the rank."""
        (tmp_path / str(os.getpid())).touch()
        end = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 4 + 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        return os.getpid()

    with open_pool([wait], 4) as pool:
        futures = score_rows(pool, rows_of(*"abcdefgh"))
        assert not any(future.done() for future in futures)
        (tmp_path / "rank").touch()
        pids = {int(pid) for (pid,) in results(futures)}
        assert len(pids) == 4 and os.getpid() not in pids


@BOTH
def test_an_exception_shows_the_row_and_the_functions_own_traceback(workers):
    def picky(prompt, completion, *, answer):
        if completion == "bad":
            raise KeyError("no such thing")
        return {"nan": float("nan"), "text": "1", "object": object()}.get(completion, 1.0)

    with open_pool([picky], workers) as pool:
        good, bad, nan, text, thing = score_rows(pool, rows_of("good", "bad", "nan", "text", "object", answer=4))
        assert good.result(120) == [1.0]
        with pytest.raises(RewardError, match=r"raised KeyError\('no such thing'\)\n  prompt: 'p'\n") as caught:
            bad.result(120)
        assert "in picky" in str(caught.value) and "fields: {'answer': 4}" in str(caught.value)
        assert (caught.value.prompt, caught.value.completion) == ("p", "bad")
        for future, given in ((nan, "gave nan"), (text, "gave '1'"), (thing, "gave <object object")):
            with pytest.raises(RewardError, match=f"the reward function {given}.*\n  prompt: 'p'"):
                future.result(120)
        assert results(score_rows(pool, rows_of("good", answer=4))) == [[1.0]]


@pytest.mark.timed
def test_a_function_that_hangs_is_ended_and_the_others_go_on():
    def hangs(prompt, completion):
        while completion == "hang":
            pass
        return 1.0

    with open_pool([hangs], 2, timeout_s=0.5) as pool:
        start = time.perf_counter()
        futures = score_rows(pool, rows_of("hang", "a", "hang", "b", "hang", "c"))
        assert results(futures[1::2]) == [[1.0]] * 3
        for future in futures[::2]:
            with pytest.raises(RewardError, match=r"took longer than 0.5 s\n  prompt: 'p'\n  completion: 'hang'"):
                future.result(120)
        assert time.perf_counter() - start < 10
        assert results(score_rows(pool, rows_of("d"))) == [[1.0]]


def test_a_function_that_ends_its_process_is_named():
    def dies(prompt, completion):
        if completion == "exit":
            os._exit(7)
        if completion == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "leave":
            sys.exit(3)
        return 1.0

    with open_pool([dies], 1) as pool:
        futures = score_rows(pool, rows_of("exit", "kill", "leave", "live"))
        for future, ended in zip(futures, ("with exit code 7", "by signal SIGKILL"), strict=False):
            with pytest.raises(RewardError, match=rf"ended its process \({ended}\)\n  prompt: 'p'"):
                future.result(120)
        with pytest.raises(RewardError, match=r"raised SystemExit\(3\)"):
            futures[2].result(120)
        assert futures[3].result(120) == [1.0]


def test_workers_compute_with_torch_although_the_rank_has_threads():
    """The server is forked first; then the rank makes threads, and workers are still replaced without a lock held."""

    def multiplies(prompt, completion):
        if completion == "exit":
            os._exit(0)
        return float((torch.ones(300, 300) @ torch.ones(300, 300)).mean())

    threads = torch.get_num_threads()
    with open_pool([multiplies], 2) as pool:
        torch.set_num_threads(2)
        torch.ones(700, 700) @ torch.ones(700, 700)
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait)
        thread.start()
        try:
            futures = score_rows(pool, rows_of("exit", "a", "exit", "b", "exit", "c"))
            assert results(futures[1::2]) == [[300.0]] * 3
        finally:
            stop.set()
            thread.join()
            torch.set_num_threads(threads)


def test_fields_may_be_functions_and_a_row_that_cannot_be_sent_fails_alone():
    with open_pool([lambda p, c, f: f(c)], 1) as pool:
        fields = [{"f": len}, {"f": threading.Lock()}, {"f": lambda completion: 7}]
        first, second, third = score_rows(pool, [CompletedRow("p", "c", each) for each in fields])
        assert results([first, third]) == [[1], [7]]
        with pytest.raises(RewardError, match=r"cannot be sent .*--reward_workers=0\n  prompt: 'p'\n  completion: 'c'"):
            second.result(0)


def test_a_pool_without_workers_needs_no_context():
    pool = Pool([exact_match])
    assert pool.workers == 0 and results(score_rows(pool, rows_of("2", "3", answer="2"))) == [[1.0], [0.0]]


@pytest.mark.timed
def test_workers_are_added_where_they_wait_and_not_where_they_compute():
    def waits(prompt, completion):
        time.sleep(0.05)
        return os.getpid()

    def computes(prompt, completion):
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        return os.getpid()

    for function, rows, enough in ((waits, 48, lambda pids: 8 <= pids <= 16), (computes, 24, lambda pids: pids <= 4)):
        with open_pool([function], 1, most=16) as pool:
            start = time.perf_counter()
            pids = {pid for (pid,) in results(score_rows(pool, [CompletedRow("p", "c")] * rows))}
            assert enough(len(pids)), (function, pids)
            assert function is computes or time.perf_counter() - start < 1.2  # 2.4 s one after the other


def test_a_batched_function_is_given_rows_together_and_fails_together():
    def sizes(completions, unit):
        if "hang" in completions:
            time.sleep(60)
        if "exit" in completions:
            os._exit(3)
        return [float(len(completions))] * len(completions)

    with open_pool([sizes, lambda prompt, completion, unit: unit], 1, timeout_s=2) as pool:
        assert results(score_rows(pool, rows_of("a", "b", "c", unit=7))) == [[3, 7]] * 3
        assert score_rows(pool, []) == []
        for text, says in (("hang", "took longer than 2 s"), ("exit", r"ended its process \(with exit code 3\)")):
            first, second = score_rows(pool, rows_of("a", text, unit=7))
            with pytest.raises(RewardError, match=f"function sizes {says} for 2 completions, the first of which is\n"):
                second.result(120)
            failure, unit = first.outcomes(120)
            assert failure.prompt == "p" and unit == 7.0
        assert results(score_rows(pool, rows_of("a", unit=7))) == [[1, 7]]


@BOTH
def test_many_calls_of_an_awaited_function_are_under_way_at_once(workers):
    begun, enough = [], asyncio.Event()

    async def waits(prompt, completion):
        """Wait until so many have begun in this process."""
        begun.append(completion)
        if len(begun) == 30:
            enough.set()
        await asyncio.wait_for(enough.wait(), 30)
        return len(completion)

    with open_pool([waits], workers) as pool:
        assert results(score_rows(pool, rows_of(*["x" * (n % 5) for n in range(120)]))) == [[n % 5] for n in range(120)]


def test_an_awaited_function_that_hangs_ends_alone_and_one_that_blocks_takes_the_loop_with_it(monkeypatch):
    monkeypatch.setattr(reward_pool, "AWAITED_GRACE_S", 1.0)

    async def reward(prompt, completion):
        if completion == "hang":
            await asyncio.sleep(60)
        if completion == "block":
            time.sleep(60)
        if completion == "exit":
            os._exit(3)
        await asyncio.sleep(0.01)
        return 1.0

    with open_pool([reward], 2, timeout_s=1.5) as pool:
        slow, good = score_rows(pool, rows_of("hang", "good"))
        assert good.result(120) == [1.0]
        with pytest.raises(RewardError, match=r"took longer than 1.5 s\n  prompt: 'p'\n  completion: 'hang'"):
            slow.result(120)
        blocked = score_rows(pool, rows_of("block"))
        time.sleep(0.2)
        late = score_rows(pool, rows_of("good"))  # given to the loop that is blocked, and then to its successor
        with pytest.raises(RewardError, match="took longer"):
            blocked[0].result(120)
        assert results(late) == [[1.0]]
        with pytest.raises(RewardError, match="ended its process"):
            score_rows(pool, rows_of("exit"))[0].result(120)
        assert results(score_rows(pool, rows_of("good"))) == [[1.0]]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def sleeper(prompt, completion, path):
    """A reward that starts a program, and leaves the number of its process in a file."""
    program = subprocess.Popen(["sleep", "600"])
    with open(path, "w") as file:
        file.write(f"{program.pid} ")
    if completion == "terminate":
        program.terminate()
    return program.wait()


def number_in(path):
    end = time.monotonic() + 120
    while not (path.exists() and path.read_text().endswith(" ")) and time.monotonic() < end:
        time.sleep(0.01)
    return int(path.read_text())


def gone(pids):
    end = time.monotonic() + 120
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("how", ["timeout", "close"])
def test_a_program_that_a_function_starts_ends_with_its_worker(how, tmp_path):
    with open_pool([sleeper], 1, timeout_s=3 if how == "timeout" else 300) as pool:
        (future,) = score_rows(pool, rows_of("", path=tmp_path / "pid"))
        pid = number_in(tmp_path / "pid")
        if how == "timeout":
            with pytest.raises(RewardError, match="took longer"):
                future.result(120)
            assert gone([pid])
    assert gone([pid])


def test_a_program_that_a_function_starts_takes_signals_in_the_usual_way(tmp_path):
    """Although its rank may not: a run takes SIGTERM as an interrupt."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with open_pool([sleeper], 1) as pool:
            assert results(score_rows(pool, rows_of("terminate", path=tmp_path / "pid"))) == [[-signal.SIGTERM]]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_to_all_of_a_group_leave_the_pool_to_its_rank():
    """A terminal's interrupt and a scheduler's SIGTERM go to every process; what becomes of the run, the rank says."""
    with open_pool([lambda p, c: os.getpid()], 1) as pool:
        ((pid,),) = results(score_rows(pool, rows_of("a")))
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(pool.client.server, sign)
            os.kill(int(pid), sign)
        assert results(score_rows(pool, rows_of("a"))) == [[pid]]
        assert os.getpgid(int(pid)) == pid and os.getpgid(pool.client.server) == os.getpgid(0)


def forking(prompt, completion):
    """How a fork of the worker that waits for SIGTERM ends."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)
    os.kill(pid, signal.SIGTERM)
    return float(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def test_a_fork_of_a_worker_takes_signals_in_the_usual_way():
    """As the processes of `multiprocessing` must, whose `terminate` sends SIGTERM."""
    with open_pool([forking], 1) as pool:
        assert results(score_rows(pool, rows_of("a"))) == [[-signal.SIGTERM]]


def test_a_process_that_has_threads_already_may_open_a_pool():
    """As that of a notebook has, in which something was trained before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.ones(700, 700, requires_grad=True) @ torch.ones(700, 700)).sum().backward()
        with open_pool([lambda p, c: (torch.ones(700, 700) @ torch.ones(700, 700))[0, 0]], 2) as pool:
            assert results(score_rows(pool, rows_of("a", "b", "c"))) == [[700.0]] * 3
            assert (torch.ones(700, 700) @ torch.ones(700, 700))[0, 0] == 700
    finally:
        torch.set_num_threads(threads)


def test_closing_ends_all_processes_and_fails_what_waits():
    with open_pool([lambda p, c: time.sleep(60) or 1.0 if c == "long" else os.getpid()], 2) as pool:
        pids = {int(pid) for (pid,) in results(score_rows(pool, rows_of(*"abcdef")))}
        waiting = score_rows(pool, rows_of("long", "long", "long"))
    for future in waiting:
        with pytest.raises(RewardError, match="was closed"):
            future.result(60)
    assert pids and not any(alive(pid) for pid in pids)
    with pytest.raises(RewardError, match="is closed"):
        score_rows(pool, rows_of("a"))


def test_the_death_of_the_server_is_an_error_and_not_a_wait():
    with open_pool([lambda p, c: time.sleep(60)], 1) as pool:
        futures = score_rows(pool, rows_of("a", "b"))
        os.kill(pool.client.server, signal.SIGKILL)
        for future in futures:
            with pytest.raises(RewardError, match="the server of the reward workers has died"):
                future.result(120)


PROGRAM = """
import os, subprocess, time
from funrl.rewards.pool import CompletedRow, open_pool
with open_pool([lambda p, c: os.getpid() * 10**8 + subprocess.Popen(["sleep", "60"]).pid], 2) as pool:
    futures = [pool.begin(0, [CompletedRow("p", "c")]) for _ in range(9)]
    pids = {int(pid) for future in futures for pid in divmod(future.result()[0], 10**8)}
    fork = os.fork()
    if not fork:  # it keeps the rank's end of the pipe open
        os.close(1)
        time.sleep(300)
        os._exit(0)
    print(fork, pool.client.server, *pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux: a process that ends with its parent")
def test_a_rank_that_is_killed_takes_its_workers_with_it(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    rank = start_python([str(tmp_path / "program.py")], os.environ, stderr=None)
    fork, *pids = (int(pid) for pid in rank.stdout.readline().split())
    try:
        assert all(alive(pid) for pid in pids)
        rank.kill()
        rank.wait()
        assert len(pids) >= 1 + 1 + 9 and gone(pids)
        assert alive(fork)
    finally:
        os.kill(fork, signal.SIGKILL)
