"""Prompts and texts of files, as a run takes them."""

import json
import re
from collections import Counter

import pytest

from funrl.data.prompts import prompt_batch
from funrl.data.tokenizer import character_tokenizer
from funrl.models import Config
from funrl.trainer.declaration import SettingsError
from funrl.trainer.job_data import Given, prompts_of, texts_of
from funrl.trainer.settings import Settings

TOKENIZER = character_tokenizer("abcdefgh")


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def reward(prompt, completion, **fields):
    return 1.0


GIVEN = Given(rewards=(reward,))
SMALL = Config(vocab=16, embed=8, layers=1, heads=1, kv_heads=1, head=8, mlp=8, max_positions=32)


def test_fields_name_the_columns_of_prompts_and_texts(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"problem": "ab", "meta": {"right": "c"}}])
    settings = Settings(prompts=path, data=path, fields="prompt:problem,answer:meta.right,completion:meta.right")
    with pytest.raises(SettingsError, match="line 1: a field cannot be called 'completion'"):
        prompts_of(settings, TOKENIZER, GIVEN)
    (text,) = texts_of(settings, "demonstrations", TOKENIZER, SMALL, Given()).examples[0].texts
    assert TOKENIZER.decode(text.tokens) == "abc</s>"
    settings = Settings(prompts=path, fields="prompt:problem,answer:meta.right")
    (prompt,) = prompts_of(settings, TOKENIZER, GIVEN).prompts
    assert (prompt.text, prompt.fields["answer"], prompt.source) == ("ab", "c", f"{path}, line 1")
    records = GIVEN._replace(records=[{"problem": "ab", "meta": {"right": "c"}}])
    assert prompts_of(Settings(fields=settings.fields), TOKENIZER, records).prompts[0].text == "ab"
    with pytest.raises(SettingsError, match=r"rows\.jsonl, line 1: there is no field 'prompt'.*--fields=prompt:COLUMN"):
        prompts_of(Settings(prompts=path), TOKENIZER, GIVEN)
    for made in (lambda s: prompts_of(s, TOKENIZER, Given()), lambda s: texts_of(s, "preferences", 0, SMALL, Given())):
        with pytest.raises(SettingsError, match="--fields=a:b does nothing without --prompts or --data"):
            made(Settings(fields="a:b"))


def test_weights_mix_files_and_a_tenth_of_each_is_held_out(tmp_path):
    for name, count in (("a", 40), ("b", 20)):
        lines(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": n} for n in range(count)])
    text = f"{tmp_path}/a.jsonl@0.75,{tmp_path}/b.jsonl@0.25"
    task = prompts_of(Settings(prompts=text, eval_prompts=8), TOKENIZER, GIVEN)
    assert task.name == "a+b" and Counter(one.text for one in task.heldout) == {"a": 4, "b": 2}
    drawn = prompt_batch(task.prompts, 1000, 0, 0)
    assert Counter(one.text for one in drawn) == {"a": 750, "b": 250}
    assert not {(one.text, one.fields["answer"]) for one in drawn} & {
        (o.text, o.fields["answer"]) for o in task.heldout
    }
    task = prompts_of(Settings(prompts=re.sub(r"@[\d.]+", "", text), eval_prompts=8), TOKENIZER, GIVEN)
    assert len(task.prompts) == 54 and len(task.heldout) == 6


def test_a_prompt_that_the_tokenizer_refuses_is_named_with_its_line(tmp_path):
    chat = [{"role": "user", "content": "a"}]
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": chat}])
    with pytest.raises(SettingsError, match=r"rows\.jsonl, line 2: .*this tokenizer has no chat template"):
        prompts_of(Settings(prompts=path), TOKENIZER, GIVEN)
