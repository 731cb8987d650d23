"""Signs of life: whoever waits says for whom, within a heartbeat, and a timeout names the rank that did not arrive."""

import os
import re
import signal
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port

from funrl.mesh import collectives
from funrl.mesh.launch import WaitLimits, WorkerError, launch
from funrl.mesh.mesh import parse
from funrl.processes import heartbeat, stall_monitor, store
from funrl.processes.heartbeat import ENDED, NOBODY, NOT_BEGUN, RUNNING, Heartbeat, Order, Sign, decode
from funrl.processes.store_link import Alone
from funrl.processes.watch import Watch

SIGN = Sign(1, 1, 0.0, 3, 7, 40, -1, NOBODY, RUNNING, 0, 0, "generate", "all_reduce over data", "host7")
WAITING = SIGN._replace(waiting=1, phase="reward")


@pytest.mark.parametrize(
    ("signs", "silent", "ranks"),
    [
        ({0: WAITING, 1: SIGN, 2: WAITING}, (), [1]),
        ({0: WAITING, 1: SIGN, 2: SIGN._replace(phases=8)}, (), [1]),  # 2 computes, and is farther
        ({0: SIGN, 1: SIGN._replace(collectives=39)}, (), [1]),  # on devices nobody is seen to wait
        ({0: WAITING, 1: WAITING}, (), [0, 1]),
        ({0: WAITING, 1: WAITING, 2: SIGN}, {1}, [1]),  # it was stopped in the collective
        ({0: WAITING, 1: SIGN._replace(status=ENDED)}, (), [0]),
    ],
)
def test_who_is_waited_for(signs, silent, ranks):
    assert stall_monitor.late(signs, silent) == ranks


def test_a_lookout_speaks_after_a_heartbeat_without_progress_and_then_ever_less_often():
    watch, signs = stall_monitor.StallMonitor(10.0, "; the end"), {0: WAITING, 1: SIGN}
    results = {}
    for second in range(100):
        signs = {rank: sign._replace(ticks=second) for rank, sign in signs.items()}
        if text := watch.poll(signs, float(second)):
            results[second] = text
    assert list(results) == [10, 20, 40, 80]
    assert results[10] == (
        "no progress for 10 s: the run waits for rank 1 on host7 (step 3, generate, last all_reduce over data); the end"
    )
    goes_on = {rank: sign._replace(beats=2, ticks=100) for rank, sign in signs.items()}
    assert watch.poll(goes_on, 100.0) is None
    assert "rank 0 on host7 (step 3, reward, in all_reduce over data), which does not answer" in str(
        watch.poll(goes_on | {1: goes_on[1]._replace(ticks=110, waiting=1)}, 111.0)
    )


def test_a_wait_for_a_reward_names_what_ends_it():
    rewarding = SIGN._replace(phase="reward")
    for signs, ending in (
        ({0: rewarding, 1: rewarding}, "; a reward"),
        ({0: rewarding}, "; a reward"),
        ({0: rewarding, 1: WAITING}, "; the end"),  # a rank waits for another
        ({0: rewarding, 1: SIGN}, "; the end"),
    ):
        watch = stall_monitor.StallMonitor(10.0, "; the end", reward="; a reward")
        watch.poll(signs, 0.0)
        assert str(watch.poll({rank: sign._replace(ticks=9) for rank, sign in signs.items()}, 10.0)).endswith(ending)


def test_a_rank_that_does_not_answer_stalls_and_one_that_makes_no_progress_does_not():
    watch, signs = stall_monitor.StallMonitor(10.0, stalled_s=60.0), {0: WAITING, 1: SIGN}
    polls = [watch.poll({0: WAITING._replace(ticks=2 + second), 1: SIGN}, float(second)) for second in range(60)]
    assert watch.stalled(signs) == []
    assert "; after 60 s without an answer the run ends (--stalled_after)" in str(polls[10])
    watch.poll({0: WAITING._replace(ticks=99), 1: SIGN}, 60.0)
    assert watch.stalled(signs) == [1]
    assert watch.stall([1], signs) == (
        "no answer for 60 s (--stalled_after) from rank 1 on host7 (step 3, generate, last all_reduce over data): the "
        "process is stopped, swapped out or in a call that holds it"
    )
    assert watch.stalled({1: SIGN._replace(status=ENDED)}) == [] == stall_monitor.StallMonitor(10.0).stalled(signs)


def test_time_in_which_the_watcher_itself_is_stopped_stalls_nobody():
    """As after Ctrl-Z and fg: the launcher runs again before its ranks have given a sign."""
    watch = stall_monitor.StallMonitor(10.0, stalled_s=60.0)
    watch.poll({0: SIGN}, 0.0)
    watch.poll({0: SIGN}, 3600.0)
    assert watch.stalled({0: SIGN}) == []


def test_a_rank_that_has_not_begun_does_not_stall():
    """Its interpreter may be loading for minutes from a slow disk."""
    watch, sign = stall_monitor.StallMonitor(10.0, stalled_s=60.0), NOT_BEGUN._replace(host="host7")
    for second in range(100):
        watch.poll({0: sign}, float(second))
    assert watch.stalled({0: sign}) == []


def test_of_many_ranks_a_line_names_a_few():
    text = stall_monitor.named_ranks(range(9), dict.fromkeys(range(9), SIGN))
    assert text.count("host7") == 4 and text.endswith(" and 5 more")


@pytest.mark.parametrize(
    ("replicas", "whole", "dead", "replica"),
    [
        ([0, 0, 1, 1], [4, 4, 4, 4], [], 0),
        ([0, 0, 1, 1], [4, 4, 4, 4], [1], 1),
        ([0, 1], [4, 4], [0, 1], NOBODY),
        ([0, 0, 1, 1], [4, 3, 4, 4], [], 1),
        ([0, 1], [3, 4], [], 1),
        ([0, 0], [4, 4], [1], NOBODY),
        ([0, 1], [-1, -1], [], NOBODY),
        ([NOBODY, NOBODY], [4, 4], [], NOBODY),
    ],
)
def test_who_saves_the_state_of_a_run_that_fails(replicas, whole, dead, replica):
    signs = {
        rank: SIGN._replace(replica=r, recoverable=w) for rank, (r, w) in enumerate(zip(replicas, whole, strict=True))
    }
    assert stall_monitor.rescuers(signs, dead, False) == Order(replica, False)


@pytest.mark.parametrize(
    ("waited", "failed", "says"),
    [
        ({0: 95.0, 1: 0.0, 2: 95.0}, [0, 2], "rank 0 on host7 (step 3, reward, in all_reduce over data) has waited "),
        ({0: 95.0, 1: 0.0, 2: 5.0}, [0, 2], None),  # rank 2 has failed for a reason of its own
        ({0: 95.0, 1: 0.0, 2: 95.0}, [0, 1], None),  # so has rank 1, outside a collective
        ({0: 95.0, 1: 0.0, 2: 95.0}, [], None),
    ],
)
def test_a_run_ends_by_the_timeout_where_every_rank_that_failed_has_waited_for_it(waited, failed, says):
    signs = {rank: SIGN if rank == 1 else WAITING for rank in range(3)}
    text = stall_monitor.timed_out(signs, failed, waited, [], 100.0)
    assert text is None if says is None else says in text and "for rank 1 on host7" in text


def test_a_rank_writes_where_it_is():
    heart = Heartbeat(Alone(None))
    with heartbeat.alive(heart):
        heartbeat.at_step(5)
        heartbeat.name_group("g", "data+tensor", True)
        with heartbeat.phase("score_policy"):
            heartbeat.entered("all_reduce", "g")
            inside = decode(heart.record())
            heartbeat.left()
        after = decode(heart.record())
        begin = time.thread_time()
        for _ in range(10_000):
            heartbeat.entered("all_reduce", "g")
            heartbeat.left()
        assert time.thread_time() - begin < 1  # 10 us for both
    assert (inside.step, inside.phase, inside.phases, inside.collectives) == (5, "score_policy", 1, 1)
    assert (inside.collective, inside.waiting, inside.status) == ("all_reduce over data+tensor", 1, RUNNING)
    assert (after.phase, after.waiting) == ("after score_policy", 0)
    assert decode(heart.record()).status == ENDED and inside.beats < after.beats < decode(heart.record()).beats


def stopped(rank):
    """A program in which one rank is stopped while the others wait for it."""

    def program(m):
        heartbeat.at_step(2)
        with heartbeat.phase("update_policy"):
            if m.rank == rank:
                os.kill(os.getpid(), signal.SIGSTOP)
            collectives.psum(torch.ones(1), m, "tensor")
            collectives.psum(torch.ones(1), m, "data")

    return program


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "rank"), [("dp2", 0), ("dp2,tp2", 3)])
@pytest.mark.timed
def test_a_rank_that_is_stopped_is_named_and_so_is_the_flag(mesh, rank, capfd):
    begin = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        launch(stopped(rank), parse(mesh), "cpu", waiting=WaitLimits(timeout=timedelta(seconds=2), heartbeat_s=1.0))
    assert time.monotonic() - begin < 8
    errors, late = capfd.readouterr().err, f"rank {rank} on {os.uname().nodename} (step 2, update_policy"
    assert f"no progress for 1 s: the run waits for {late}), which does not answer" in errors
    assert "the run ends when a rank has waited 2 s (--timeout)" in errors
    text = str(caught.value)
    assert f"has waited 2 s for {late}), which did not arrive; --timeout says" in text
    assert "Traceback" not in text and "gloo" not in text.lower()


@pytest.mark.gloo
def test_a_rank_that_is_stopped_ends_the_run_long_before_the_timeout():
    with pytest.raises(WorkerError) as caught:
        launch(stopped(1), parse("dp2"), "cpu", waiting=WaitLimits(timeout=timedelta(minutes=1), stalled_s=3.0))
    message = rf"no answer for 3 s \(--stalled_after\) from rank 1 on {os.uname().nodename} \(step 2, update_policy"
    assert re.match(message, str(caught.value))


@pytest.fixture
def messages(tmp_path, monkeypatch):
    """A file of the lines that are said, which ranks see too: they may wait for one instead of for some time."""
    file, say = tmp_path / "messages", stall_monitor.say
    file.touch()

    def also_written(text):
        say(text)
        with file.open("a") as out:
            out.write(f"{text}\n")

    monkeypatch.setattr(stall_monitor, "say", also_written)
    return file


def waited(condition):
    """Wait until something is so, two minutes at most; what the condition gave at last."""
    end = time.monotonic() + 120
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return result


@pytest.mark.gloo
def test_a_rank_that_is_slow_is_named_before_any_timeout_and_the_run_goes_on(messages, capfd):
    line = re.compile(
        r"^no progress for \d+ s: the run waits for rank 1 on \S+ \(before the first step, reward\); "
        r"the run ends when a rank has waited 10 minutes \(--timeout\)$",
        re.MULTILINE,
    )

    def program(m):
        with heartbeat.phase("reward"):
            if m.rank == 1:
                waited(lambda: line.search(messages.read_text()))
        return collectives.psum(torch.ones(1), m, "data").item()

    assert launch(program, parse("dp2"), "cpu", waiting=WaitLimits(heartbeat_s=1.0)) == 2
    assert line.search(capfd.readouterr().err)


def test_a_single_rank_says_what_it_does(messages, capfd):
    def program(_):
        with heartbeat.phase("reward"):
            return waited(lambda: "the run waits for rank 0 on" in messages.read_text())

    assert launch(program, parse(""), "cpu", waiting=WaitLimits(heartbeat_s=1.0))
    assert re.search(r"no progress for \d+ s: the run waits for rank 0 on", capfd.readouterr().err)


WAIT_S = 4  # in a collective: time to come to it, also on a machine that is busy


def store_port():
    """A port for the store of a run, below the range that the system itself gives away in the meantime."""
    return str(free_port(20_000, 32_000))


def in_the_store(rank):
    """True if the store has a rank's record of the phase that both ranks are in."""
    client, key = dist.distributed_c10d._get_default_store().underlying_store, f"{store.SIGNS}/{rank}"
    return client.check([key]) and decode(bytes(client.get(key))).phase == "generate"


def started_elsewhere(rank, port, program, errors, stalled_s=None, wait_s=WAIT_S):
    """Fork a rank that finds its place in the environment, as torchrun and srun set it; its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(errors, "w") as file:
            os.dup2(file.fileno(), 2)
            sys.stderr = file
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            try:
                timeout = timedelta(seconds=wait_s)
                launch(
                    program,
                    parse("dp2"),
                    "cpu",
                    waiting=WaitLimits(timeout=timeout, heartbeat_s=1.0, stalled_s=stalled_s),
                )
            except (WorkerError, MemoryError) as error:
                print(f"{type(error).__name__}: {error}", file=file, flush=True)
    finally:
        os._exit(1)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("late", "how", "message"),
    [
        (1, "stops", ["the run waits for rank 1 on", "(step 3, generate", "which did not arrive; --timeout says"]),
        (0, "stops", ["the run waits for rank 0 on", f"has waited {WAIT_S} s for rank 0 on", "which did not arrive"]),
        pytest.param(1, "hangs", ["rank 0 ends: rank 1 has failed"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.timed
def test_ranks_of_another_launcher_hear_of_each_other_through_the_store(late, how, message, tmp_path):
    """A process beside the first rank keeps the store, as under srun. A rank that hangs could wait for its device."""

    def program(m):
        heartbeat.at_step(3)
        with heartbeat.phase("generate"):
            collectives.psum(torch.ones(1), m, "data")
            assert waited(lambda: in_the_store(0) and in_the_store(1))
            collectives.psum(torch.ones(1), m, "data")  # the store answers until both have seen that
            if m.rank == late:
                if how == "stops":
                    os.kill(os.getpid(), signal.SIGSTOP)
                raise MemoryError("no room")
            if how == "hangs":
                time.sleep(60)
            collectives.psum(torch.ones(1), m, "data")

    port = store_port()
    pids = [started_elsewhere(rank, port, program, tmp_path / str(rank)) for rank in range(2)]
    ended = waited(lambda: os.waitpid(pids[1 - late], os.WNOHANG)[0] != 0)
    for pid in pids[late : late + 1] if ended else pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    err = "".join((tmp_path / str(rank)).read_text() for rank in (0, 1 - late))  # beside the first rank it is said
    assert ended
    assert [text for text in message if text not in err] == [], err


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("late", "sign"),
    [(1, signal.SIGSTOP), pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow), (0, signal.SIGKILL)],
)
def test_ranks_of_another_launcher_save_and_end_when_one_is_stopped_or_killed(late, sign, tmp_path):
    def program(m):
        heartbeat.at_step(3)
        with heartbeat.phase("generate"):
            heartbeat.set_rescue(lambda *_: f"rank {m.rank} saves", m.rank)
            heartbeat.mark_recoverable(2)
            collectives.psum(torch.ones(1), m, "data")
            if m.rank == late:
                os.kill(os.getpid(), sign)
            try:
                collectives.psum(torch.ones(1), m, "data")
            except RuntimeError as error:
                heartbeat.failed(error)
                raise

    port = store_port()
    pids = [started_elsewhere(rank, port, program, tmp_path / str(rank), 3.0, 60) for rank in range(2)]
    ended = waited(lambda: os.waitpid(pids[1 - late], os.WNOHANG)[0] != 0)
    for pid in pids[late : late + 1] if ended else pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    err = (tmp_path / str(1 - late)).read_text()
    assert ended, err
    ends = f"rank {1 - late} ends: no answer for 3 s (--stalled_after) from rank {late} on"
    results = [f"rank {1 - late}: rank {1 - late} saves", *([ends] if sign == signal.SIGSTOP else [])]
    assert [text for text in results if text not in err] == [], err


@pytest.mark.gloo
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="finds the process that keeps the store in /proc")
@pytest.mark.parametrize(
    ("sign", "message"),
    [
        (signal.SIGKILL, ["has failed"]),
        pytest.param(signal.SIGSTOP, ["does not answer", "does not answer (--stalled_after)"], marks=pytest.mark.slow),
    ],
)
def test_without_their_store_ranks_save_and_end_by_themselves(sign, message, tmp_path):
    def program(m):
        heartbeat.set_rescue(lambda *_: f"rank {m.rank} saves", m.rank)
        heartbeat.mark_recoverable(2)
        collectives.psum(torch.ones(1), m, "data")
        if m.rank == 0:
            with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as children:
                os.kill(int(children.read()), sign)
        time.sleep(60)

    port = store_port()
    pids = [started_elsewhere(rank, port, program, tmp_path / str(rank), 3.0, 60) for rank in range(2)]
    assert all(waited(lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0] != 0) for pid in pids)
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert all(f"the process that keeps the run's store {text}" in first for text in message), first
    assert "rank 1: rank 1 saves" in second and "saves" not in first  # its machine may be lost with the store


def test_a_rank_that_ends_before_its_record_is_read_has_not_waited():
    """Its record is read later and may say that it waits, so that the end would be taken for one by --timeout."""
    watch = Watch(None, 2, WaitLimits())
    watch.note_end(1, failed=False)
    assert watch.ended == {1: 0.0}
