"""The dry run of episodes of several turns; tests/trainer/test_episode_dry_run.py has a real run beside it."""

import dataclasses
import json
import math

import pytest
from dry_jobs import CPU, plain, small

from funrl import trees
from funrl.cost import decoding, dry_run
from funrl.cost.decoding import episode_cost
from funrl.cost.tracing.estimate import Turns, turns_of
from funrl.cost.tracing.tool_trace import EpisodeWaits, read_trace
from funrl.mesh.mesh import single
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs import build as trainer_build
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of, with_flags


def test_the_calculator_assumes_the_longest_of_its_conversations():
    task = embedded_task("calculator")
    tokenizer = task.tokenizer()
    replies, context = task.turns
    for seed in range(3):
        for record in task.demonstrations(seed, 40):
            texts = [tokenizer.apply_chat_template(record["messages"][:n], tokenize=False) for n in (2, 3)]
            if len(record["messages"]) == 4:
                prompted = tokenizer.apply_chat_template(
                    record["messages"][:3], tokenize=False, add_generation_prompt=True
                )
                answered = tokenizer(prompted[len(texts[0]) :], add_special_tokens=False).input_ids
                assert len(answered) <= context and replies == 2
    assert len(answered) in (context, context - 1)


def work_of(job, turns, room=1e9):
    parts = trainer_build.build(job, single(), lambda _: None)
    return decoding.EngineWork(
        job, parts.generator, parts.generator, prompt_tokens=8, room=room, hardware=CPU, turns=turns
    )


@pytest.mark.slow
def test_later_turns_read_their_context_and_lengthen_the_cache():
    first, three = (
        dry_run.estimate(
            small("grpo", task="calculator", dry_run=True, assume_turns=turns, assume_turn_tokens=8, max_new_tokens=8),
            8,
            CPU,
        )
        for turns in (1, 3)
    )
    page = 16
    row = lambda tokens: trees.nbytes(  # noqa: E731
        first.job.model.init_cache(single(), -(-tokens // page), page, first.job.dtype)
    )
    results = [estimate.phases["generate"] for estimate in (first, three)]
    assert [costs.peak["cache"] for costs in results] == [16 * row(16), 16 * row(8 + 3 * 8 + 2 * 8)]
    # Three times the decoding iterations, and a pass over 16 tokens more a row.
    assert 3 < results[1].flops / results[0].flops < 6
    assert first.episodes is None and three.episodes.read == 16 * 2 * 8
    assert three.phases["update_policy"].flops > 2.5 * first.phases["update_policy"].flops


def test_waiting_is_overlapped_by_other_episodes_up_to_what_may_be_unfinished():
    """64 episodes, 8 at a time, take 8 s of generation: each 1 s. They wait 3 times 1 s."""
    job = small("grpo", task="calculator", batch_prompts=32, decode_rows=8, max_new_tokens=4)
    turns = Turns(4, 2, 1.0)
    free = episode_cost(work_of(job, turns), 8.0)
    assert (free.running, free.open) == (8, 32)  # three wait for each that generates
    assert free.waited == 0 and free.overlapped == 2 * 3.0  # two rounds of 32 episodes, 4 s each
    few = dataclasses.replace(job, settings=with_flags(job.settings, max_waiting=16))
    bound = episode_cost(work_of(few, turns), 8.0)
    assert (bound.running, bound.open) == (8, 16)
    assert bound.waited == 4 * 4.0 - 8.0 and bound.overlapped == 4 * 3.0 - 8.0
    assert episode_cost(work_of(job, Turns(4, 2, 0.0)), 8.0)[-2:] == (0.0, 0.0)


def test_episodes_of_a_trace_wait_as_long_as_they_did():
    """As many alike are one number of seconds; a long one at the end is waited for alone."""
    job = small("grpo", task="calculator", batch_prompts=32, decode_rows=8, max_new_tokens=4)
    alike = episode_cost(work_of(job, Turns(4, 2, 1.0)), 8.0)
    assert episode_cost(work_of(job, Turns(4, 2, 1.0, waits=(3.0,) * 5)), 8.0)._replace(turns=alike.turns) == alike
    few = dataclasses.replace(job, settings=with_flags(job.settings, max_waiting=16))
    tail = episode_cost(work_of(few, Turns(4, 2, 1.0, waits=(1.0,) * 63 + (200.0,))), 8.0)
    assert 200 - 8 < tail.waited < 200 + 4 * 2.0  # 16 places, of four episodes each


def line_of_spans(*spans):
    keys = ("name", "spanId", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano")
    spans = [dict(zip(keys, span, strict=True)) | {"traceId": "t"} for span in spans]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})


def test_a_trace_has_waits_or_spans(tmp_path):
    file = tmp_path / "trace.jsonl"
    seconds = lambda *times: [str(int(x * 1e9)) for x in times]  # noqa: E731
    spans = line_of_spans(
        ("turn", "1", "e", *seconds(11, 12)),
        ("turn", "2", "e", *seconds(11.5, 13)),  # of another agent at the same time
        ("turn", "3", "e", *seconds(14, 15)),
    )
    other = line_of_spans(("episode", "e", "g", *seconds(10, 17)), ("generate", "p", "", *seconds(0, 20)))
    file.write_text(f'{{"waits": [0.5, 1]}}\n\n{{"waits": []}}\n{spans}\n{other}\n')
    assert read_trace(file) == [EpisodeWaits(3, 1.5), EpisodeWaits(1, 0.0), EpisodeWaits(3, 4.0)]
    turns = turns_of(settings_of(task="calculator", dry_run=True, tool_trace=str(file), episode_turns=8))
    assert (turns.replies, turns.waits) == (3, (0.0, 1.5, 4.0)) and turns.seconds == 5.5 / 3 / 2
    with pytest.raises(
        SettingsError, match=f"--tool_trace={file}: an episode of 3 replies, more than --episode_turns=2"
    ):
        turns_of(settings_of(task="calculator", dry_run=True, tool_trace=str(file), episode_turns=2))
    file.write_text("\n")
    with pytest.raises(SettingsError, match=f"--tool_trace={file}: it has no episode with turns"):
        read_trace(file)


@pytest.mark.parametrize(
    "text",
    [
        '{"waits": [-1]}',
        '{"waits": [1e308, 1e308]}',
        '{"waits": [NaN]}',
        '{"waits": [1' + "0" * 400 + "]}",
        '{"waits": "12"}',
        '{"waits": [true]}',
        '{"seconds": 3}',
        "3",
        line_of_spans(("turn", "1", "e", "0", "1e9")),
        line_of_spans(("episode", "1", "", "0", "1" + "0" * 400)),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path, text):
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{{"waits": [1]}}\n\n{text}\n')
    with pytest.raises(SettingsError, match=f"--tool_trace={file}:3: each line has to be"):
        read_trace(file)


def test_completions_of_a_prompt_share_its_whole_pages():
    job = small("grpo", batch_prompts=4, samples_per_prompt=4, max_new_tokens=8)
    page = decoding.hardware_page_tokens(CPU)
    work = work_of(job, Turns())._replace(prompt_tokens=3 * page + 1)
    sizes = decoding.wave_sizes(work, job.sampling, 16)
    own = -(-(3 * page + 9) // page) - 3
    assert own >= 1 and sizes.row_pages == 3 + own and sizes.pages == 4 * 3 + 16 * own
    page_bytes = job.model.page_bytes(work.whole.whole.weights.mesh, page, job.dtype)
    rows, row_bytes = decoding.rows_in_cache(work, job.sampling)
    assert 16 * row_bytes == sizes.pages * page_bytes and rows == 1e9 // row_bytes
    alone = dataclasses.replace(job.sampling, samples=1)
    assert decoding.rows_in_cache(work, alone)[1] == sizes.row_pages * page_bytes


def test_fewer_rows_than_a_prompt_has_completions_hold_its_pages_too():
    """Room for 40 pages, of which the prompt takes 30 and each row 2 of its own."""
    page = decoding.hardware_page_tokens(CPU)
    job = small("grpo", batch_prompts=4, samples_per_prompt=16, max_new_tokens=2 * page)
    work = work_of(job, Turns())._replace(prompt_tokens=30 * page)
    page_bytes = job.model.page_bytes(work.whole.whole.weights.mesh, page, job.dtype)
    rows = {n: decoding.rows_in_cache(work._replace(room=n * page_bytes), job.sampling)[0] for n in (40, 62, 29, 124)}
    assert rows == {40: 5, 62: 16, 29: 0, 124: 32}
    work.whole.whole.control = object()  # a row that is scored once more has all of its 32 pages
    assert decoding.rows_in_cache(work._replace(room=72 * page_bytes), job.sampling)[0] == 5
    assert decoding._control_bytes(work, job.sampling) == 32 * page_bytes


def test_pages_of_waiting_episodes_are_held_while_there_is_room():
    job = small("grpo", task="calculator", batch_prompts=32, decode_rows=8, max_new_tokens=4)
    turns = Turns(4, 2, 1.0)
    _, row = decoding.rows_in_cache(work_of(job, turns), job.sampling)
    assert episode_cost(work_of(job, turns), 8.0).cache == 24 * row
    tight = episode_cost(work_of(job, turns, room=14 * row), 8.0)
    assert tight.cache == 6 * row  # 14 rows fit, of which 8 generate
    lengths = [8 + 4, 8 + 4 + 6, 8 + 4 + 2 * 6]  # of the path when an episode waits
    assert tight.recomputed == round(64 * 18 / 32 * sum(lengths))


@pytest.mark.slow
def test_seconds_of_tools_lengthen_generation():
    flags = {"task": "calculator", "dry_run": True, "max_new_tokens": 8}
    quick, slow = (
        dry_run.estimate(small("grpo", assume_tool_seconds=seconds, **flags), 8, CPU) for seconds in (0.0, 7.0)
    )
    more = slow.phases["generate"].seconds - quick.phases["generate"].seconds
    assert more == pytest.approx(slow.episodes.waited) and math.isclose(more, 7.0)


@pytest.mark.slow
def test_a_chain_that_reads_turns_is_estimated(tmp_path):
    from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, reduce, sequence_mean, to_turns

    job = plain("grpo", task="calculator", dry_run=True)
    advantage = chain(group_center(), to_turns(0.9))
    algorithm = Algorithm(advantage, {"policy": reduce(clipped_surrogate(), sequence_mean())})
    estimate = dry_run.estimate(dataclasses.replace(job, algorithm=algorithm), 8, CPU)
    assert estimate.phases["advantage"].seconds > 0
