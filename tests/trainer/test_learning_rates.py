"""Default learning rates: a power law of the model's size with two bounds; flags come before it."""

import pytest

from funrl import trees
from funrl.algos.recipes import recipe
from funrl.algos.recipes.ppo import ppo
from funrl.flags.parser import help_text
from funrl.models import decoder_config, decoder_model
from funrl.trainer.jobs.learning_rates import (
    HIGHEST,
    LOWEST,
    RATE_OF_ONE,
    SUPERVISED_RATE_OF_ONE,
    learning_rates,
    rate_of_size,
)
from funrl.trainer.settings.settings import settings_flags, settings_of


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [  # 0.2 / sqrt(N): 0.2 / sqrt(2.6e5) = 0.2 / 510 = 3.9e-4
        (1, 1e-3),
        (10_000, 1e-3),
        (100_000, 6.3e-4),
        (260_000, 3.9e-4),
        (494_000_000, 9e-6),
        (7_000_000_000, 2.4e-6),
        (70_000_000_000, 7.6e-7),
        (100_000_000_000, 6.3e-7),
        (1_000_000_000_000, 5e-7),
    ],
)
def test_the_rate_of_a_size(parameters, expected):
    assert rate_of_size(parameters) == expected
    assert rate_of_size(parameters, adapters=True) == pytest.approx(10 * expected, rel=0.06)  # rounded on its own


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [  # 1 / sqrt(N): 1 / sqrt(8e9) = 1 / 89,443 = 1.1e-5
        (260_000, 1e-3),
        (494_000_000, 4.5e-5),
        (8_000_000_000, 1.1e-5),
        (70_000_000_000, 3.8e-6),
        (405_000_000_000, 1.6e-6),
    ],
)
def test_the_rate_of_texts_to_imitate_and_of_reward_models(parameters, expected):
    assert rate_of_size(parameters, supervised=True) == expected


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("sft", 5), ("reward_model", 5), ("process_reward_model", 5), ("dpo", 1), ("kto", 1), ("simpo", 1), ("grpo", 1)],
)
def test_what_learns_by_which_law(name, ratio):
    model = model_of(512)
    (rate,) = set(learning_rates(settings_of(model="DIR"), recipe(name)(), model).values())
    assert rate == pytest.approx(ratio * rate_of_size(trees.count(model.shapes)), rel=0.06)


def test_texts_make_distillation_supervised():
    result = [
        learning_rates(settings_of(model="DIR", data=data), recipe("gkd")(), model_of(512)) for data in (None, "x")
    ]
    assert result[1]["policy"] == pytest.approx(5 * result[0]["policy"], rel=0.06)


def model_of(embed):
    config = decoder_config(vocab=64, embed=embed, layers=2, heads=4, kv_heads=2, head=embed // 4, mlp=2 * embed)
    return decoder_model(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1e-3),
        ({"lora_rank": 4}, 3e-3),  # of an embedded task, whatever the size
        ({"model": "DIR"}, None),
        ({"model": "DIR", "lr": 5e-6}, 5e-6),
        ({"lr": 2e-4}, 2e-4),
        ({"model": "DIR", "lora_rank": 4, "lr": 5e-6}, 5e-6),
    ],
)
def test_rates_of_a_run(settings, expected):
    adapters = "lora_rank" in settings
    rates = [learning_rates(settings_of(**settings), ppo(), model_of(embed), adapters) for embed in (128, 256)]
    assert all(rate["critic"] == 2 * rate["policy"] for rate in rates)
    if expected is not None:
        assert [rate["policy"] for rate in rates] == [expected, expected]
    else:  # about four times the parameters, half the rate
        assert 1.6 < rates[0]["policy"] / rates[1]["policy"] < 2.1
    own = learning_rates(settings_of(**settings, critic_lr=7e-5), ppo(), model_of(128), adapters)
    assert own == {**rates[0], "critic": 7e-5}


def test_the_help_says_the_law():
    text = " ".join(help_text("ppo", "", [settings_flags()["lr"]], None).split())
    laws = f"{RATE_OF_ONE} / sqrt(its parameters), {SUPERVISED_RATE_OF_ONE:g} / sqrt for sft and reward models"
    law = f"with --model {laws}, {LOWEST:.0e} to {HIGHEST:.0e}".replace("e-0", "e-")
    assert law in text and "1e-3 from scratch" in text
