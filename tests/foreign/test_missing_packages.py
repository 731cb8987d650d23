"""What a framework that is not installed asks for."""

import sys

import pytest
from env_skyrl import skyrl_environment

from funrl.foreign.load import named_environment
from funrl.loading import LoadError


@pytest.mark.parametrize(
    "name,module,command",
    [
        ("verifiers:gsm8k", "verifiers.v1", "pip install 'verifiers>=0.4'"),
        ("gymnasium:CartPole-v1", "gymnasium", "pip install gymnasium"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, name, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LoadError) as refused:
        named_environment(name)
    assert command in str(refused.value) and str(refused.value).count("--env=") == 1


def test_skyrl_gym_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with pytest.raises(LoadError, match="pip install skyrl-gym"):
        skyrl_environment("gsm8k")
