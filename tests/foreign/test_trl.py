"""Tools, factories of environments and rollout functions of TRL."""

import asyncio
import math

import pytest
from env_trl import trl_environment
from foreign_runs import LIMITS, call_text, heard, run
from small_chats import SETUP, engine_of, text

from funrl.testing import check_environment

LINES = """
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the first.
        b: the second.
    '''
    return a + b


def length(completions, completion_ids, answer, **kwargs):
    assert len(completions) == len(completion_ids) == 1
    kwargs["log_metric"]("turns", len(completions[0]))
    return [float(completions[0][-1]["content"] == answer[0])]


TOOLS = [add]
"""


class Counter:
    """An environment as TRL's documentation has them."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.total = 0

    def reset(self, prompt, start, **kwargs) -> str | None:
        assert prompt == [{"role": "user", "content": "go"}] and "environment" not in kwargs
        self.total = start
        return f" from {start}"

    def increment(self, step: int) -> str:
        """Increment the counter.

        Args:
            step: by how much.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        self.total += step
        return f"it is {self.total}"

    async def look(self) -> int:
        """Look at the counter."""
        await asyncio.sleep(0)
        return self.total

    def _hidden(self) -> None: ...


class Rewarded(Counter):
    async def get_reward(self):
        return None if self.total == 13 else self.total / 10


def total(environments, **kwargs):
    return [float(environment.total) for environment in environments]


def test_methods_of_an_environment_are_tools_and_it_is_reused_after_a_reset():
    made = Counter.made
    environment = trl_environment(Counter, total)
    replies = [call_text("increment", step=2) + call_text("look"), call_text("increment", step=-1), "done"]
    for _ in range(2):
        episode = run(environment, *replies, start=5)
        assert (episode.status, episode.rewards) == ("done", {"policy": 7.0})
        assert heard(episode) == ["it is 7", "7", "{'error': 'step must not be negative'}"]
        assert text(episode.ends[0].token_ids()).startswith("[increment][look]u>go from 5</s>")
        assert episode.parts == {"tool_calls": 3.0, "failed_tool_calls": 1.0, "total": 7.0}
    assert Counter.made == made + 1


def test_an_environment_may_own_its_reward_and_have_none():
    environment = trl_environment(Rewarded)
    assert run(environment, call_text("increment", step=3), "done", start=2).rewards == {"policy": 0.5}
    assert run(environment, "done", start=13).rewards == {"policy": None}
    both = trl_environment(Rewarded, [total, total], weights=[2, 0.5])
    assert run(both, "done", start=4).rewards == {"policy": 10.4}


def test_a_field_of_the_record_chooses_among_several_environments():
    class Other(Rewarded):
        def other(self) -> str:
            """Do something else."""
            return "other"

    environment = trl_environment({"a": Rewarded, "b": Other})
    episode = run(environment, call_text("other"), "done", start=1, environment="b")
    assert heard(episode) == ["other"] and len(episode.ends[0].tools) == 3
    assert len(run(environment, "done", start=1, environment="a").ends[0].tools) == 2
    episode = run(environment, "done", start=1, environment="c")
    assert episode.status == "failed" and "environment='c'; there are a, b" in episode.problem


def test_a_list_of_tools_of_a_file_with_a_reward_of_it(tmp_path):
    (tmp_path / "tools.py").write_text(LINES)
    environment = trl_environment(f"{tmp_path}/tools.py:TOOLS", f"{tmp_path}/tools.py:length")
    episode = run(environment, call_text("add", a=1, b=2), "3", prompt=[{"role": "user", "content": "1+2"}], answer="3")
    assert episode.rewards == {"policy": 1.0} and heard(episode) == ["3"]
    assert episode.parts["turns"] == 3.0 and episode.parts["length"] == 1.0
    episode = run(environment, "<tool_call>what", "4", prompt=[{"role": "user", "content": "1+2"}], answer="3")
    assert episode.rewards == {"policy": 0.0} and heard(episode)[0].startswith("{'error': \"a call has no </tool_call>")


def test_limits_end_an_episode_with_the_rewards_so_far():
    episode = run(
        trl_environment(Counter, total), call_text("increment", step=1), limits=LIMITS._replace(turns=3), start=0
    )
    assert (episode.status, episode.rewards) == ("turns", {"policy": 3.0})


def test_a_reward_that_is_nan_or_none_is_left_out():
    def nothing(prompts, completions):
        return [None]

    def undefined(prompts, completions):
        return [math.nan]

    assert run(trl_environment(Counter, [nothing, undefined]), "done", start=0).rewards == {"policy": None}
    assert run(trl_environment(Counter, [nothing, total]), "done", start=2).rewards == {"policy": 2.0}


def rollout(prompts, trainer):
    """Two turns with two tokens of the environment between them."""
    tokenizer = trainer.processing_class
    (prompt,) = prompts
    prompt_ids = tokenizer.encode(prompt if isinstance(prompt, str) else prompt[-1]["content"])
    between = tokenizer.encode("!?")
    _, (first,), (logp,), _ = trainer.vllm_generation.generate([prompt_ids], None, 1)
    assert len(logp) == len(first) and trainer.args.num_generations == 1
    _, (second,), _, _ = trainer.vllm_generation.generate([[*prompt_ids, *first, *between]], None, 1)
    return {
        "prompt_ids": [prompt_ids],
        "completion_ids": [[*first, *between, *second]],
        "logprobs": [[0.0] * len([*first, *between, *second])],
        "env_mask": [[1] * len(first) + [0] * len(between) + [1] * len(second)],
        "seen": [len(first)],
    }


def seen_reward(completion_ids, seen, **kwargs):
    return [float(len(completion_ids[0]) + seen[0])]


def test_a_rollout_function_samples_by_the_policy_whose_tokens_are_the_record():
    engine = engine_of()
    episode = run(trl_environment(rollout, seen_reward), engine=engine, setup=SETUP)
    nodes = list(episode.ends[0].nodes())
    assert [node.sampled for node in nodes] == [False, True, False, True]
    assert text(nodes[0].tokens) == "go" and text(nodes[2].tokens) == "!?"
    lengths = [len(node.tokens) for node in nodes]
    assert episode.rewards == {"policy": float(sum(lengths[1:]) + lengths[1])}
    for node in nodes:
        assert not node.sampled or len(node.raw_logp) == len(node.sampling_logp) == len(node.tokens)


@pytest.mark.parametrize(
    "change,problem",
    [
        (lambda output: output["completion_ids"][0].__setitem__(0, 9), "its token 2 of"),
        (lambda output: output["env_mask"][0].__setitem__(-1, 0), "which was sampled"),
        (lambda output: output.pop("logprobs"), "returned no logprobs"),
        (lambda output: output["env_mask"][0].pop(), "entries for"),
    ],
)
def test_a_record_that_is_not_what_was_sampled_fails(change, problem):
    def changed(prompts, trainer):
        output = rollout(prompts, trainer)
        change(output)
        return output

    episode = run(trl_environment(changed, seen_reward), "yes", "no")
    assert episode.status == "failed" and problem in episode.problem


def test_a_limit_ends_a_rollout_function_unscored():
    episode = run(trl_environment(rollout, seen_reward), "yes", limits=LIMITS._replace(turns=1))
    assert (episode.status, episode.rewards) == ("turns", {"policy": None})
    assert sum(node.sampled for node in episode.ends[0].nodes()) == 1


@pytest.mark.parametrize(
    "given,problem",
    [
        ([], "tools of TRL needs reward functions; give --env_args=rewards:FILE.py:function"),
        (Counter, "an environment without get_reward of TRL needs reward functions"),
        (rollout, "a rollout function of TRL needs reward functions"),
        (lambda value: value, "needs one; a factory needs nothing, a rollout function two"),
        (type("Bare", (), {}), "Bare, of Bare, has no reset"),
        (3, "3 is neither a list of tools"),
    ],
)
def test_what_is_none_of_these_is_refused(given, problem):
    with pytest.raises((TypeError, ValueError), match=problem.replace("(", r"\(")):
        trl_environment(given)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["environment", "rollout"])
def test_properties_of_environments(which):
    environment = trl_environment(*((Rewarded,) if which == "environment" else (rollout, seen_reward)))
    replies = [call_text("increment", step=1), call_text("increment", step=-1), call_text("look")]
    check_environment(environment, examples=[("go", {"start": 1})], replies=replies)
