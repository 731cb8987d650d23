"""Default learning rates: a power law of the model's size with two bounds; flags come before it."""

import pytest

from funrl.algos.recipes.ppo import ppo
from funrl.experiments.flags import help_text
from funrl.models import Config, decoder_model
from funrl.trainer.learning_rates import HIGHEST, LOWEST, RATE_OF_ONE, learning_rates, rate_of_size
from funrl.trainer.settings import Settings, settings_flags


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [  # 0.2 / sqrt(N): 0.2 / sqrt(2.6e5) = 0.2 / 510 = 3.9e-4
        (1, 1e-3), (10_000, 1e-3), (100_000, 6.3e-4), (260_000, 3.9e-4), (494_000_000, 9e-6), (7_000_000_000, 2.4e-6),
        (70_000_000_000, 7.6e-7), (100_000_000_000, 6.3e-7), (1_000_000_000_000, 5e-7),
    ],
)  # fmt: skip
def test_the_rate_of_a_size(parameters, expected):
    assert rate_of_size(parameters) == expected
    assert rate_of_size(parameters, adapters=True) == pytest.approx(10 * expected, rel=0.06)  # rounded on its own


def model_of(embed):
    config = Config(vocab=64, embed=embed, layers=2, heads=4, kv_heads=2, head=embed // 4, mlp=2 * embed)
    return decoder_model(config)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1e-3), ({"lora_rank": 4}, 3e-3),  # of an embedded task, whatever the size
        ({"model": "DIR"}, None), ({"model": "DIR", "lr": 5e-6}, 5e-6), ({"lr": 2e-4}, 2e-4),
        ({"model": "DIR", "lora_rank": 4, "lr": 5e-6}, 5e-6),
    ],
)  # fmt: skip
def test_rates_of_a_run(settings, expected):
    rates = [learning_rates(Settings(**settings), ppo(), model_of(embed)) for embed in (128, 256)]
    assert all(rate["critic"] == 2 * rate["policy"] for rate in rates)
    if expected is not None:
        assert [rate["policy"] for rate in rates] == [expected, expected]
    else:  # about four times the parameters, half the rate
        assert 1.6 < rates[0]["policy"] / rates[1]["policy"] < 2.1
    own = learning_rates(Settings(**settings, critic_lr=7e-5), ppo(), model_of(128))
    assert own == {**rates[0], "critic": 7e-5}


def test_the_help_says_the_law():
    text = " ".join(help_text("ppo", "", [settings_flags()["lr"]], None).split())
    law = f"with --model {RATE_OF_ONE} / sqrt(its parameters), {LOWEST:.0e} to {HIGHEST:.0e}".replace("e-0", "e-")
    assert law in text and "1e-3 from scratch" in text
