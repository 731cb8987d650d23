"""generation_config.json: read, kept, and saved as transformers reads it."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from funrl.models import ModelError, decoder_config, decoder_model, load_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.generation_config import sampling_defaults, with_generation_config

CONFIG = decoder_config(vocab=31, embed=16, layers=1, heads=2, kv_heads=2, head=8, mlp=24, eos=(2,))
MODEL = decoder_model(CONFIG)
SAYS = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.05,
    "eos_token_id": [5, 2, 7],
    "max_new_tokens": 9,
    "some_field": {"of": "its own"},
}


@pytest.fixture
def saved(tmp_path):
    """A saved model, beside which transformers wrote a generation_config.json."""
    folder = tmp_path / "given"
    hf.save(folder, MODEL, MODEL.init(torch.Generator().manual_seed(0)))
    GenerationConfig(**SAYS).save_pretrained(folder)
    return folder


def test_it_is_read_and_saved_with_the_model(saved, tmp_path):
    given = GenerationConfig.from_pretrained(saved)
    model, params = hf.load(saved)
    assert (
        model.config.special_tokens.eos
        == (2, 5, 7)
        == hf.check_directory(saved).config.special_tokens.eos
        == load_model(saved).config.special_tokens.eos
    )
    assert with_fields(model.config, generation="", eos=(2,)) == CONFIG
    hf.save(tmp_path / "again", model, params)
    again = GenerationConfig.from_pretrained(tmp_path / "again")
    assert again.to_dict() == given.to_dict() and again.to_dict()["some_field"] == SAYS["some_field"]
    files = [json.loads((folder / "generation_config.json").read_text()) for folder in (saved, tmp_path / "again")]
    assert files[0] == files[1]
    assert load_model(tmp_path / "again").config == model.config
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert peer.generation_config.eos_token_id == [5, 2, 7] and peer.config.eos_token_id == [2, 5, 7]


def test_a_model_without_one_is_saved_without_one(saved, tmp_path):
    params = hf.load(saved)[1]
    hf.save(saved, MODEL, params)  # the one there is another model's
    assert sorted(f.name for f in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert load_model(saved).config == CONFIG and sampling_defaults(CONFIG) == {}


def test_a_reward_model_has_none(saved, tmp_path):
    model = with_value_head(load_model(saved))
    hf.save(tmp_path / "reward", model, model.init(torch.Generator().manual_seed(0)))
    assert not (tmp_path / "reward" / "generation_config.json").exists()
    GenerationConfig(**SAYS).save_pretrained(tmp_path / "reward")
    assert load_model(tmp_path / "reward").config.source.generation == ""


@pytest.mark.parametrize(
    ("eos", "expected"), [(None, (2,)), (2, (2,)), (4, (2, 4)), ([4, 2, 4, 3], (2, 4, 3)), ([31, -1, 30], (2, 30))]
)
def test_further_tokens_of_the_vocabulary_end_a_text(eos, expected):
    assert with_generation_config(CONFIG, {"eos_token_id": eos}).special_tokens.eos == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"temperature": 0.7, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),  # do_sample is False where absent
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"do_sample": True, "temperature": 0.7, "top_p": 1}, {"temperature": 0.7, "top_p": 1}),
        (SAYS, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}),
    ],
    ids=str,
)
def test_what_it_says_of_sampling(raw, expected):
    assert sampling_defaults(with_generation_config(CONFIG, raw)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>', it must be a token id or a list of them"),
        ('{"eos_token_id": [2, true]}', r"eos_token_id is \[2, True\]"),
        ('{"top_p": "0.9"}', "top_p is '0.9', it must be a number"),
        ('{"top_k": 2.5}', "top_k is 2.5, it must be a whole number"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(saved, text, message):
    (saved / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=f"generation_config.json.*{message}"):
        hf.check_directory(saved)
