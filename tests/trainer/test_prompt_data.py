"""Prompts of files as a run takes them: held out by seed, fitted to the model, in a format."""

import json

import numpy as np
import pytest
from small_runs import GRPO, Quiet, begin, small_job

from funrl.data.json_lines import DataError
from funrl.data.order import Mixture
from funrl.data.prompts import Example
from funrl.data.supervised import TextFile
from funrl.data.text_lengths import fit_examples
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import decoder_config, flat_fields
from funrl.trainer.jobs.datasets import fields_of_texts, prompts_of, split, texts_of, with_chat_template
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import Settings, settings_of

TOKENIZER = character_tokenizer("abcdefgh:;? \n")
SMALL = decoder_config(vocab=16, embed=8, layers=1, heads=1, kv_heads=1, head=8, mlp=8, max_positions=32)
REWARD = Given(rewards=(lambda prompt, completion, **fields: 1.0,))
TEMPLATE = "{% for m in messages %}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_shuffled_tenth_is_held_out_by_seed_and_both_parts_keep_their_order(parts):
    items = list(range(60))
    examples = items if parts == 1 else Mixture([items[:5], items[5:31], items[31:]], None)
    (train, held), (again, same), (_, other) = (split(examples, 256, seed) for seed in (0, 0, 1))
    assert list(held) == list(same) and list(train) == list(again)
    assert list(held) != list(other) and list(held) != items[-6:]
    assert len(held) == 6 and sorted([*train, *held]) == items
    assert list(train) == sorted(train) and list(held) == sorted(held)
    few, all_of_them = split(items[:9], 4, 0)
    assert few == items[:9] and all_of_them == items[:4]


def test_texts_of_several_files_are_read_where_they_are(tmp_path):
    rows = [{"prompt": "a", "chosen": "b" * (n % 4 + 1), "rejected": "c", "margin": n} for n in range(30)]
    first, second = lines(tmp_path / "a.jsonl", rows), lines(tmp_path / "b.jsonl", rows[:10])
    lines(tmp_path / "c.jsonl", [{k: v for k, v in row.items() if k != "margin"} for row in rows])
    texts = texts_of(settings_of(data=f"{first},{second}"), "preferences", TOKENIZER, SMALL, Given())
    assert texts.name == "a+b" and len(texts.examples) == 36 and len(texts.heldout) == 4
    assert isinstance(texts.examples, Mixture) and all(isinstance(part, TextFile) for part in texts.examples.parts)
    sources = {item.source for item in (*texts.examples, *texts.heldout)}
    assert sources == {f"{first}, line {n}" for n in range(1, 31)} | {f"{second}, line {n}" for n in range(1, 11)}
    assert "margin" in fields_of_texts(texts)
    weighted = texts_of(settings_of(data=f"{first}@3,{tmp_path}/c.jsonl@1"), "preferences", TOKENIZER, SMALL, Given())
    assert weighted.examples.shares == (750, 250) and "margin" not in fields_of_texts(weighted)
    assert all(example.margin is None for example in weighted.examples)
    held = texts_of(settings_of(data=first, eval_data=f"{tmp_path}/c.jsonl"), "preferences", TOKENIZER, SMALL, Given())
    assert "margin" not in fields_of_texts(held), "held-out texts have none"
    given = texts_of(
        settings_of(data=first, eval_data=second, eval_prompts=4), "preferences", TOKENIZER, SMALL, Given()
    )
    assert len(given.examples) == 30 and len(given.heldout) == 4
    assert {element.source.split(",")[0] for element in given.heldout} == {second}
    with pytest.raises(ValueError, match=r"b\.jsonl, line 3: the prompt with 'chosen' has 5 tokens.*of 40 examples"):
        texts_of(
            settings_of(data=f"{second},{first}"),
            "preferences",
            TOKENIZER,
            decoder_config(**flat_fields(SMALL) | {"max_positions": 4}),
            Given(),
        )


def test_eval_data_is_held_out_instead_of_a_tenth(tmp_path):
    train = lines(tmp_path / "a.jsonl", [{"prompt": "a", "n": n} for n in range(20)])
    held = lines(tmp_path / "b.jsonl", [{"prompt": "b", "n": n} for n in range(9)])
    task = prompts_of(settings_of(prompts=train, eval_data=held), TOKENIZER, REWARD)
    assert len(task.prompts) == 20 and [item.fields["n"] for item in task.heldout] == list(range(9))
    some = [
        prompts_of(settings_of(prompts=train, eval_data=held, eval_prompts=4, seed=seed), TOKENIZER, REWARD)
        for seed in (0, 0, 1)
    ]
    numbers = [[example.fields["n"] for example in task.heldout] for task in some]
    assert numbers[0] == numbers[1] != numbers[2] and len(numbers[0]) == 4
    records = REWARD._replace(records=[{"prompt": "a"}], eval_records=[{"prompt": "b"}])
    task = prompts_of(Settings(), TOKENIZER, records)
    assert (len(task.prompts), task.heldout[0].text) == (1, "b")
    with pytest.raises(SettingsError, match="--eval_data=x does nothing without --prompts or --data"):
        prompts_of(settings_of(eval_data="x"), TOKENIZER, Given())


def test_prompts_have_the_format_of_the_flags_and_no_solved_example_is_trained_on(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"question": letter, "answer": letter} for letter in "abcdefgh"])
    task = prompts_of(settings_of(prompts=path, few_shot=f"{path}:2", prompt_template="? {prompt} "), TOKENIZER, REWARD)
    assert len(task.prompts) == 6 and task.prompts[0].text == "? a a\n\n? b b\n\n? c "
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    settings = settings_of(prompts=path, chat_template=f"{tmp_path}/t.jinja", system_prompt="be")
    tokenizer = with_chat_template(TOKENIZER, settings)
    assert TOKENIZER.chat_template is None and tokenizer.chat_template == TEMPLATE
    assert prompts_of(settings, tokenizer, REWARD).prompts[3].text == "be;d;a:"
    with pytest.raises(SettingsError, match="--chat_template=own does nothing without a chat template"):
        with_chat_template(TOKENIZER, settings_of(chat_template="own"))
    for flag, value, item in (
        ("few_shot", "x.jsonl:2", "--few_shot: x.jsonl: no such file"),
        ("tools", "x.json", "--tools: x.json: it cannot be read"),
        ("template_arguments", "think", "--template_arguments: think: write NAME:VALUE"),
        ("system_prompt", "x.txt", "--system_prompt: x.txt: it cannot be read"),
        ("few_shot", f"{path}:8", "all of its prompts are examples of --few_shot"),
    ):
        with pytest.raises(SettingsError, match=item):
            prompts_of(settings_of(prompts=path, **{flag: value}), TOKENIZER, REWARD)


LONG = [Example([1] * n, "x" * n, {}, f"p.jsonl, line {n}") for n in (3, 9, 4, 7, *range(20, 31))]


def test_prompts_that_are_too_long_are_named_with_their_lines():
    assert fit_examples(LONG, 30, "error", "why", TOKENIZER) == (LONG, "")
    message = r"p\.jsonl, line 9: the prompt has 9 tokens, but why; --long_prompts=drop leaves such examples out"
    with pytest.raises(DataError, match=message + r".*; 2 of 4 examples are too long: p\.jsonl, line 9, 7 \(it begins"):
        fit_examples(LONG[:4], 5, "error", "why", TOKENIZER)
    left, remark = fit_examples(LONG, 5, "drop", "why", TOKENIZER)
    assert [len(example.tokens) for example in left] == [3, 4]
    assert remark == ("13 of 15 are left out, as why: p.jsonl, line 9, 7, 20, 21, 22, 23, 24, 25, 26, 27 and 3 more")
    numbered = [Example(list(range(9)), "text", {}), Example([1] * 6, "", {}, "q.csv, row 4")]
    kept, remark = fit_examples(numbered, 4, "truncate", "why", TOKENIZER)
    assert kept[0] == Example([5, 6, 7, 8], "text", {})
    assert remark == "2 of 2 are shortened to 4 tokens, as why: example 1; q.csv, row 4"
    mixed = Mixture([LONG[:2], LONG[2:]], (500, 500))
    left, _ = fit_examples(mixed, 5, "drop", "why", TOKENIZER)
    assert isinstance(left, Mixture) and [len(part) for part in left.parts] == [1, 1] and left.shares == (500, 500)
    with pytest.raises(DataError, match="--long_prompts=drop: no example of a file is left"):
        fit_examples(Mixture([LONG[:1], LONG[4:]], None), 5, "drop", "why", TOKENIZER)
    assert np.all([len(example.tokens) <= 5 for example in left])


def test_long_prompts_are_refused_dropped_or_cut_before_the_run(tmp_path):
    path = lines(tmp_path / "p.jsonl", [{"prompt": "1+1="}, {"prompt": "1" * 61 + "="}, {"prompt": "12+3="}])
    (tmp_path / "own.py").write_text("def score(prompt, completion, **fields):\n    return float(len(prompt) > 60)\n")
    files = {"prompts": path, "reward": f"{tmp_path}/own.py:score", "eval_data": path}

    def prepared(**flags):
        return small_job(GRPO, sizes=None, **files | flags)

    with pytest.raises(
        DataError,
        match=r"p\.jsonl, line 2: the prompt has 62 tokens, but --max_new_tokens "
        "is 4 and the model has 64 positions",
    ):
        prepared()
    job = prepared(long_prompts="drop", max_prompt_tokens=4)
    assert [prompt.text for prompt in job.task.prompts] == ["1+1="] == [example.text for example in job.task.heldout]
    begin(job, single(), show := Quiet())
    message = f"2 of 3 are left out, as --max_prompt_tokens is 4: {path}, line 2, 3"
    assert [note for note in show.notes if "left out" in note] == [
        f"prompts: {message}",
        f"held-out prompts: {message}",
    ]
    (repeated,) = (note for note in show.notes if "batch" in note)
    assert repeated.endswith(": there is 1 prompt to train on, so a step has some more than once")
    job = prepared(long_prompts="truncate")
    assert [len(completion.tokens) for completion in job.task.prompts] == [4, 60, 5] and job.task.prompts[
        1
    ].text == "1" * 61 + "="
    with pytest.raises(SettingsError, match="--max_new_tokens is 64 and the model has 64 positions, which leaves none"):
        prepared(max_new_tokens=64)


def test_every_flag_of_the_format_changes_a_prompt(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"question": letter, "answer": letter} for letter in "abc"])
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (tmp_path / "tools.json").write_text('[{"name": "b"}]')
    tokenizer = with_chat_template(TOKENIZER, settings_of(chat_template=f"{tmp_path}/t.jinja"))
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ mark or '' }}" + (
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    flags = {
        "prompt_template": "?{prompt}",
        "system_prompt": "e",
        "few_shot": f"{path}:1",
        "chat_template": "own",
        "tools": f"{tmp_path}/tools.json",
        "template_arguments": "mark:c",
    }
    texts = {
        name: prompts_of(settings_of(prompts=path, **{name: value}), tokenizer, REWARD).prompts[-1].text
        for name, value in flags.items()
    }
    assert texts == {
        "prompt_template": "?c",
        "system_prompt": "ec",
        "few_shot": "aa\n\nc",
        "chat_template": "c",
        "tools": "bc",
        "template_arguments": "cc",
    }
