"""Programs beside an engine: their requests and ends stand at iterations, in the order of their numbers."""

import asyncio
import functools

import pytest
from test_episode_runs import episode_job
from test_placement_runs import rank_of

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import launch
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import RunEndingError
from funrl.trainer.placement.paced_programs import PacedPrograms


def test_requests_and_ends_wait_for_their_iteration_and_have_an_order():
    calls = []

    async def program(programs, number, pauses):
        await asyncio.sleep(pauses[number])
        await programs.ask(7, number)
        calls.append(("asks", number, programs.tick))
        programs.answered(7, number, delay=2)
        await programs.end(7, number)
        calls.append(("ends", number, programs.tick))

    async def run(pauses):
        programs = PacedPrograms(lambda: None)
        programs.begin(7, 2, delay=1)
        tasks = [asyncio.ensure_future(program(programs, number, pauses)) for number in (1, 0)]
        assert programs.outside == 2 and programs.next_due == 1
        await programs.release()
        assert calls == []  # nothing is due
        while programs.next_due is not None:
            programs.tick = programs.next_due
            while not programs.settled:
                await asyncio.sleep(0.001)
            await programs.release()
        await asyncio.gather(*tasks)
        return programs.ended

    for pauses in ((0.0, 0.0), (0.02, 0.0), (0.0, 0.02)):
        calls.clear()
        assert asyncio.run(run(pauses)) == [7]
        assert calls == [("asks", 0, 1), ("asks", 1, 1), ("ends", 0, 3), ("ends", 1, 3)]


def test_a_program_has_one_request_at_a_time():
    async def run():
        programs = PacedPrograms(lambda: None)
        programs.begin(0, 1, delay=0)
        first = asyncio.ensure_future(programs.ask(0, 0))
        await asyncio.sleep(0)
        with pytest.raises(RunEndingError, match="asks for a reply while it waits for another one"):
            await programs.ask(0, 0)
        await programs.release()
        await first
        with pytest.raises(RunEndingError, match="sample one after the other"):
            await programs.ask(0, 0)

    asyncio.run(run())


def test_a_request_that_is_cancelled_as_it_is_released_does_not_stop_its_program():
    async def run():
        programs = PacedPrograms(lambda: None)
        programs.begin(0, 1, delay=0)
        first = asyncio.ensure_future(programs.ask(0, 0))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(first.cancel)
        await programs.release()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.ensure_future(programs.ask(0, 0))
        await asyncio.sleep(0)
        assert programs.outside == 1
        await programs.release()
        await asyncio.wait_for(again, 5)

    asyncio.run(run())


class Together:
    """An environment that asks for two replies at once."""

    async def run(self, policy, example, seed):
        start = policy.start(example.tokens)
        (_, first), _ = await asyncio.gather(policy.sample(start, max_tokens=2), policy.sample(start, max_tokens=2))
        return Episode([first], {"policy": 0.0})


class Served:
    """An environment with a program behind an endpoint."""

    async def run(self, policy, example, seed):
        await policy.endpoint()
        raise AssertionError("there is no endpoint")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "environment,problem", [(Together(), "sample one after the other"), (Served(), "opens an endpoint for 'policy'")]
)
def test_what_depends_on_time_ends_the_run(environment, problem):
    settings = {"place": "generate:1", "staleness": 1, "clock": "tokens", "minibatches": 1, "batch_prompts": 2}
    job = episode_job(rollout_is, environment, **settings)
    ended = launch(functools.partial(rank_of, job), job.launched, "cpu")
    assert "--clock=tokens" in ended.outcome.error and problem in ended.outcome.error
