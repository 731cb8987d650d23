"""Token ids beyond the model's vocabulary are refused before the run, where something uses them."""

import pytest

from funrl.data.prompts import Example
from funrl.data.tokenizer import character_tokenizer
from funrl.models import decoder_config, decoder_model
from funrl.trainer.jobs.compatibility import check_token_ids
from funrl.trainer.jobs.job import Task
from funrl.trainer.settings.declaration import SettingsError

SIZES = {"embed": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head": 4, "mlp": 8}


def task_with(*tokens):
    example = Example(list(tokens), "text", {})
    return Task("prompts", [example], [example], (), (), 4)


def test_ids_that_nothing_uses_may_be_beyond():
    check_token_ids(
        task_with(2, 3), character_tokenizer("abcdef"), decoder_model(decoder_config(vocab=6, eos=(1,), **SIZES))
    )


@pytest.mark.parametrize("added", ["pad_token", "eos_token"])
def test_an_added_token_beyond_the_vocabulary_is_named_with_the_way_out(added):
    tokenizer = character_tokenizer("abcd")
    tokenizer.add_special_tokens({added: "[NEW]"})
    with pytest.raises(SettingsError, match=rf"the {added}_id of the tokenizer is 6, but .* below 6 .*--resize_vocab"):
        check_token_ids(task_with(2), tokenizer, decoder_model(decoder_config(vocab=6, eos=(1,), **SIZES)))


def test_an_end_of_the_config_beyond_the_vocabulary():
    with pytest.raises(SettingsError, match=r"the eos_token_id of config.json is 9, but the model has token ids below"):
        check_token_ids(
            task_with(2), character_tokenizer("abcd"), decoder_model(decoder_config(vocab=6, eos=(1, 9), **SIZES))
        )


def test_a_token_of_a_prompt_beyond_the_vocabulary():
    with pytest.raises(SettingsError, match=r"the tokenizer makes token 7 \('f'\) of a text, but"):
        check_token_ids(
            task_with(2, 7), character_tokenizer("abcdef"), decoder_model(decoder_config(vocab=6, eos=(1,), **SIZES))
        )
