"""Flags as they are declared: values, texts, bounds, help, and the lists that they share with other modules."""

import dataclasses
import pickle
import re
from pathlib import Path
from typing import Literal

import pytest

from funrl.flags import parser as flags
from funrl.trainer.settings.declaration import (
    Flag,
    SettingsError,
    above,
    at_least,
    at_most,
    one_of,
    some_of,
    value_type,
)
from funrl.trainer.settings.scorers import resolved
from funrl.trainer.settings.settings import (
    Settings,
    check_values,
    flag_groups,
    for_kind,
    settings_flags,
    settings_of,
)

FLAGS = settings_flags()


@pytest.mark.parametrize("flag", FLAGS.values(), ids=FLAGS)
def test_a_default_is_a_good_value_and_its_text_means_it(flag):
    assert flag.problem(flag.default) == flag.problem(flag.without) == ""
    if not flag.keeps_none:
        assert flag.parse("none" if flag.default is None else str(flag.default)) == flag.default
    assert flag.group in flag_groups() and flag.text
    assert not flag.requires or FLAGS[flag.requires].default in (False, None)


def test_a_field_of_settings_is_a_flag_of_the_annotated_type():
    records = [record.default_factory for record in dataclasses.fields(Settings)]
    assert list(FLAGS) == [field.name for record in records for field in dataclasses.fields(record)]
    assert all(len(dataclasses.fields(record)) <= 12 for record in records)
    assert (FLAGS["lr"].type, FLAGS["lr"].optional) == (float, True)
    assert (FLAGS["mesh"].type, FLAGS["mesh"].optional) == (str, False)
    assert {FLAGS[name].type for name in ("steps", "seed", "max_new_tokens")} == {int}
    assert FLAGS["resume"].type is bool


PARSED = [  # type, optional, text, value
    (int, False, "3", 3),
    (int, False, "-3", -3),
    (float, False, "3", 3.0),
    (float, True, "1e-5", 1e-5),
    (bool, False, "true", True),
    (bool, False, "False", False),
    (bool, False, "0", False),
    (str, False, "none", "none"),
    (str, True, "none", None),
    (float, True, "none", None),
    (str, False, "3", "3"),
]


@pytest.mark.parametrize(("kind", "optional", "text", "value"), PARSED)
def test_text_means_a_value_of_the_flags_type(kind, optional, text, value):
    parsed = Flag("x", None, kind, optional, "").parse(text)
    assert parsed == value and type(parsed) is type(value)


REFUSED = [  # type, optional, bounds, text, why
    (int, False, (), "3.5", "a whole number is needed"),
    (int, False, (), "", "a whole number is needed"),
    (float, False, (), "fast", "a number is needed"),
    (float, False, (), "nan", "a finite number is needed"),
    (float, True, (), "-inf", "a finite number is needed"),
    (bool, False, (), "maybe", "true or false is needed"),
    (int, False, (at_least(1),), "0", "it must be at least 1"),
    (float, False, (above(0), at_most(1)), "1.5", "it must be above 0 and at most 1"),
    (float, False, (above(0), at_most(1)), "0", "it must be above 0 and at most 1"),
    (str, False, (one_of("on", "off"),), "of", "it must be one of on, off"),
    (str, False, (some_of("a", "b"),), "a,c", "it must be some of a,b"),
    (str, False, (some_of("a", "b"),), "a,a", "it must be some of a,b"),
    (str, False, (some_of("a", "b"),), "", "text is needed; leave --x out for its default"),
    (float, False, (), "", "a number is needed; leave --x out for its default"),
    (float, True, (), "", "a number is needed; leave --x out for its default, or write --x=none"),
]


@pytest.mark.parametrize(("kind", "optional", "bounds", "text", "why"), REFUSED)
def test_a_value_outside_of_type_or_bounds_is_refused(kind, optional, bounds, text, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        Flag("x", None, kind, optional, "", bounds=bounds).parse(text)


def test_values_at_the_bounds_are_good():
    assert Flag("x", 1, int, False, "", bounds=(at_least(1),)).parse("1") == 1
    assert Flag("x", 1, float, False, "", bounds=(above(0), at_most(1))).parse("1") == 1.0
    assert Flag("x", "a", str, False, "", bounds=(some_of("a", "b"),)).parse("b, a") == "b, a"
    assert FLAGS["seed"].parse(str(2**63 - 1)) == 2**63 - 1


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"steps": "3"}, "--steps=3: a whole number is needed"),
        ({"steps": True}, "--steps=True: a whole number is needed"),
        ({"steps": None}, "--steps=None: a whole number is needed"),
        ({"temperature": float("nan")}, "--temperature=nan: a finite number is needed"),
        ({"fsdp": 1}, "--fsdp=1: true or false is needed"),
        ({"dtype": "half"}, "--dtype=half: it must be one of auto, float32, float64, bfloat16"),
        ({"generate_mesh": "xx2"}, "--generate_mesh=xx2: 'xx2' is not an axis"),
    ],
)
def test_settings_made_in_python_are_checked_too(values, why):
    with pytest.raises(SettingsError, match=re.escape(why)):
        check_values(settings_of(**values))


def test_a_whole_number_is_a_number():
    check_values(settings_of(lr=1, temperature=2))


def test_help_has_text_bounds_and_what_the_run_chooses():
    flag = FLAGS["max_new_tokens"]
    chosen = "the task's; with --prompts 64, 32 without --model"
    assert flag.help() == f"maximum tokens of a completion; at least 1; default: {chosen}"


@pytest.mark.parametrize(
    ("hint", "type_", "optional", "choices"),
    [
        (int, int, False, ()),
        (float | None, float, True, ()),
        (Literal["k1", "k3"], str, False, ("k1", "k3")),
        (Literal["k1"] | None, str, True, ("k1",)),
    ],
)
def test_an_annotation_gives_the_type(hint, type_, optional, choices):
    assert value_type(hint) == (type_, optional, choices)


@pytest.mark.parametrize("hint", [list[int], int | str, dict, None, Literal["a", 1], type(None)])
def test_an_annotation_that_no_flag_can_have_is_refused(hint):
    with pytest.raises(TypeError, match="a flag must be"):
        value_type(hint)


def test_flags_without_a_meaning_have_the_value_that_changes_nothing():
    settings = settings_of(minibatches=4, epochs=3, temperature=0.5, critic_warmup_steps=2, batch_prompts=7)
    supervised = for_kind(settings, "supervised")
    assert (supervised.updates.minibatches, supervised.updates.epochs, supervised.sampling.temperature) == (1, 1, 1.0)
    assert supervised.optimization.critic_warmup_steps == 0 and supervised.run.batch_prompts == 7
    assert for_kind(settings, "rl") == settings


def test_the_number_of_new_tokens_is_the_tasks():
    assert resolved(Settings()).sampling.max_new_tokens == 6
    assert resolved(settings_of(prompts="p", reward="r.py:f", model="m")).sampling.max_new_tokens == 64
    assert resolved(settings_of(prompts="p", reward="r.py:f")).sampling.max_new_tokens == 32
    assert resolved(Settings(), given=True).sampling.max_new_tokens == 32
    assert resolved(settings_of(max_new_tokens=9)).sampling.max_new_tokens == 9


def test_settings_travel_to_other_processes():
    settings = settings_of(steps=3)
    assert pickle.loads(pickle.dumps(settings)) == settings


def choices(name):
    (bound,) = FLAGS[name].bounds
    return tuple(re.split(", ?", bound.text.split(" of ", 1)[1]))


def test_choices_are_those_of_the_modules_that_act_on_them():
    from funrl.cost.tracing.hardware import HARDWARE
    from funrl.models import remat
    from funrl.models.weight_dtypes import TORCH_DTYPES
    from funrl.rewards.call import LARGEST
    from funrl.role_kinds import ROLES
    from funrl.trainer import offload
    from funrl.trainer.settings import checks

    assert choices("hardware") == tuple(HARDWARE)
    assert choices("remat") == remat.MODES
    assert set(choices("offload")) == set(offload.PARTS)
    assert choices("dtype") == ("auto", *TORCH_DTYPES)
    assert FLAGS["fsdp_models"].bounds[0].text == f"names such as {','.join(ROLES)}"
    assert checks.LARGEST == LARGEST


def test_the_page_of_flags_is_the_one_that_the_declarations_make():
    """`funrl flags > docs/flags.md` writes it anew."""
    page = Path(__file__).parents[2] / "docs" / "flags.md"
    assert page.read_text() == flags.page() + "\n"
    assert all(page.read_text().count(f"| `--{name}` |") == 1 for name in FLAGS)
