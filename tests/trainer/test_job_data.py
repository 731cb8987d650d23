"""Prompts and texts of files, as a run takes them."""

import json
import re
from collections import Counter

import pytest
from tokenizers import processors

from funrl.data.prompts import prompt_batch
from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_config
from funrl.tasks.arithmetic import ALPHABET
from funrl.tasks.embedded import embedded_task
from funrl.trainer.jobs.datasets import TEXTS, embedded_prompts, embedded_texts, prompts_of, texts_of
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import Settings, settings_of

TOKENIZER = character_tokenizer("abcdefgh")


def lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def reward(prompt, completion, **fields):
    return 1.0


GIVEN = Given(rewards=(reward,))
SMALL = decoder_config(vocab=16, embed=8, layers=1, heads=1, kv_heads=1, head=8, mlp=8, max_positions=32)


def test_fields_name_the_columns_of_prompts_and_texts(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"problem": "ab", "meta": {"right": "c"}}])
    settings = settings_of(prompts=path, data=path, fields="prompt:problem,answer:meta.right,completion:meta.right")
    with pytest.raises(SettingsError, match="line 1: a field cannot be called 'completion'"):
        prompts_of(settings, TOKENIZER, GIVEN)
    (text,) = texts_of(settings, "demonstrations", TOKENIZER, SMALL, Given()).examples[0].texts
    assert TOKENIZER.decode(text.tokens) == "abc</s>"
    settings = settings_of(prompts=path, fields="prompt:problem,answer:meta.right")
    (prompt,) = prompts_of(settings, TOKENIZER, GIVEN).prompts
    assert (prompt.text, prompt.fields["answer"], prompt.source) == ("ab", "c", f"{path}, line 1")
    records = GIVEN._replace(records=[{"problem": "ab", "meta": {"right": "c"}}])
    assert prompts_of(settings_of(fields=settings.examples.fields), TOKENIZER, records).prompts[0].text == "ab"
    with pytest.raises(SettingsError, match=r"rows\.jsonl, line 1: there is no field 'prompt'.*--fields=prompt:COLUMN"):
        prompts_of(settings_of(prompts=path), TOKENIZER, GIVEN)
    for made in (lambda s: prompts_of(s, TOKENIZER, Given()), lambda s: texts_of(s, "preferences", 0, SMALL, Given())):
        with pytest.raises(SettingsError, match="--fields=a:b does nothing without --prompts or --data"):
            made(settings_of(fields="a:b"))


def test_weights_mix_files_and_a_tenth_of_each_is_held_out(tmp_path):
    for name, count in (("a", 40), ("b", 20)):
        lines(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": n} for n in range(count)])
    text = f"{tmp_path}/a.jsonl@0.75,{tmp_path}/b.jsonl@0.25"
    task = prompts_of(settings_of(prompts=text, eval_prompts=8), TOKENIZER, GIVEN)
    assert task.name == "a+b" and Counter(element.text for element in task.heldout) == {"a": 4, "b": 2}
    drawn = prompt_batch(task.prompts, 1000, 0, 0)
    assert Counter(example.text for example in drawn) == {"a": 750, "b": 250}
    assert not {(item.text, item.fields["answer"]) for item in drawn} & {
        (o.text, o.fields["answer"]) for o in task.heldout
    }
    task = prompts_of(settings_of(prompts=re.sub(r"@[\d.]+", "", text), eval_prompts=8), TOKENIZER, GIVEN)
    assert len(task.prompts) == 54 and len(task.heldout) == 6


def test_a_prompt_that_the_tokenizer_refuses_is_named_with_its_line(tmp_path):
    chat = [{"role": "user", "content": "a"}]
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": chat}])
    with pytest.raises(SettingsError, match=r"rows\.jsonl, line 2: .*this tokenizer has no chat template"):
        prompts_of(settings_of(prompts=path), TOKENIZER, GIVEN)


def test_texts_that_are_too_long_are_refused_dropped_or_shortened(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [{"prompt": "ab" * n, "completion": "c"} for n in (1, 9, 2)])

    def made(kind="demonstrations", given=GIVEN, **flags):
        return texts_of(settings_of(data=path, **flags), kind, TOKENIZER, SMALL, given)

    with pytest.raises(
        ValueError, match=r"line 2: the text has 20 tokens, but --max_text_tokens is 8; --long_prompts="
    ):
        made(max_text_tokens=8)
    texts = made(max_text_tokens=8, long_prompts="drop")
    assert [len(example.texts[0].tokens) for example in texts.examples] == [4, 6]
    message = f"as --max_text_tokens is 8: {path}, line 2"
    assert texts.remarks[:-1] == (f"texts: 1 of 3 are left out, {message}",) and texts.most == 8
    assert texts.remarks[-1].startswith("2 of the 2 held-out prompts are trained on too")
    texts = made(max_text_tokens=8, long_prompts="truncate", eval_data=path)
    assert TOKENIZER.decode(texts.examples[1].texts[0].tokens) == "abababc</s>"
    shortened = f"1 of 3 are shortened to 8 tokens, {message}"
    assert texts.remarks[:-1] == (f"texts: {shortened}", f"held-out texts: {shortened}")
    assert len(made(long_prompts="drop").remarks) == 1 and made().most == 32
    assert made(max_text_tokens=99).remarks[0].startswith("--max_text_tokens=99 changes nothing: the model has 32 ")


def test_kto_takes_pairs_and_holds_out_both_texts_of_one(tmp_path):
    rows = [{"prompt": "ab"[n % 2] * (n + 1), "chosen": "c", "rejected": "d"} for n in range(20)]
    path = lines(tmp_path / "rows.jsonl", rows)
    texts = texts_of(settings_of(data=path), "ratings", TOKENIZER, SMALL, GIVEN)
    assert texts.remarks == ("20 pairs are 40 texts, the chosen ones labelled good and the rejected ones bad",)
    assert len(texts.examples) == 36 and [element.labels for element in texts.heldout] == [(1.0,), (0.0,)] * 2
    sources = [item.source for item in texts.heldout]
    assert sources[0] == sources[1] and sources[2] == sources[3]
    assert not set(sources) & {entry.source for entry in texts.examples}
    some = lines(tmp_path / "some.jsonl", [{"prompt": "a", "completion": "b", "label": True}] * 20)
    both = texts_of(settings_of(data=f"{some},{path}"), "ratings", TOKENIZER, SMALL, GIVEN)
    assert len(both.examples) + len(both.heldout) == 60 and 5 <= len(both.heldout) <= 6
    given = GIVEN._replace(records=rows)
    assert [example.labels for example in texts_of(Settings(), "ratings", TOKENIZER, SMALL, given).examples[:2]] == [
        (1.0,),
        (0.0,),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "demonstrations"])
def test_the_embedded_task_is_in_the_tokens_of_the_tokenizer_that_is_given(kind):
    own, other, marking = (character_tokenizer(alphabet) for alphabet in (ALPHABET, ALPHABET[::-1], ALPHABET))
    marking.backend_tokenizer.post_processor = processors.TemplateProcessing("- $A", special_tokens=[("-", 13)])
    task = embedded_task("arithmetic")
    for tokenizer in (own, other, own, marking, other):
        if kind is None:
            examples = embedded_prompts(settings_of(), tokenizer).prompts
            prompts = [prompt.prompt for prompt in task.training_prompts(0)]
        else:
            examples = [row.texts[0] for row in embedded_texts(settings_of(), kind, tokenizer).examples]
            prompts = [row[0] for row in task.texts[kind](0, TEXTS, split="train")]
        for example, prompt in zip(examples[:9], prompts, strict=False):
            expected = tokenizer.encode(prompt)
            assert example.tokens[: len(expected)] == expected
