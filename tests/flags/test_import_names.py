"""Every name of TRL and verl that `funrl import` knows has the meaning that is declared here, or stops the import.

Losses are compared with their formulas in tests/algos/test_imported_losses.py; a name of a loss stands here too.
"""

import json
import re

import pytest
from names_of_trl import OF_TRL
from names_of_verl import CRITIC, GROUPS, OF_VERL, STOPS, A, M, R

from funrl.cli import main as cli
from funrl.cli.import_config import imported
from funrl.flags.foreign.files import shell_expanded
from funrl.flags.foreign.trl import TRAINERS, TRL
from funrl.flags.foreign.verl import VERL

LENGTH = {"max_steps": 12}


def translate(tmp_path, config, trainer=None, records=None):
    (tmp_path / "theirs.json").write_text(json.dumps(config))
    return imported(str(tmp_path / "theirs.json"), trainer, 1, records)


def check(tmp_path, name, base, given, expected, trainer=None):
    """A configuration with a name beside one without: what the name changes, or that it stops."""
    plain = translate(tmp_path, base, trainer)
    whole = translate(tmp_path, base | given, trainer)
    if expected == STOPS:
        assert any(re.search(rf"(^|, ){re.escape(name)}=", row.theirs) for row in whole.lost), whole.lost
    elif expected:
        assert {flag: whole.flags.get(flag) for flag in expected} == expected
    else:
        assert whole.flags == plain.flags
        assert not any(re.search(rf"(^|, ){re.escape(name)}=", row.theirs) for row in whole.lost), whole.lost


@pytest.mark.parametrize("name", OF_TRL)
def test_the_meaning_of_a_name_of_trl(name, tmp_path):
    trainer, given, expected = OF_TRL[name]
    check(tmp_path, name, LENGTH, given, expected, trainer if trainer in TRAINERS else "grpo")


@pytest.mark.parametrize("name", OF_VERL)
def test_the_meaning_of_a_name_of_verl(name, tmp_path):
    base, given, expected = OF_VERL[name]
    check(tmp_path, name, base, given, expected)


def test_no_meaning_is_declared_of_a_name_that_is_not_known():
    idle = {name for name, rows in TRL.rows.items() if rows[0].reason.startswith("it decides no number")}
    assert set(TRL.rows) - idle <= set(OF_TRL) <= set(TRL.rows)
    assert set(VERL.rows) <= set(OF_VERL)
    assert all(VERL.idle.fullmatch(name) for name in set(OF_VERL) - set(VERL.rows))


REFUSED = [  # trainer, configuration, what the list names and says
    ("grpo", {"loss_type": "cispo"}, "epsilon=0.2", "bounds every ratio by 0.2, below 1"),
    ("grpo", {"delta": 1.1}, "delta=1.1", "a bound up to 1 + epsilon_high"),
    ("grpo", {"steps_per_generation": 2}, "loss_type=dapo", "divides each mini-batch by their mean number"),
    ("grpo", {"importance_sampling_level": "sequence"}, "loss_type=dapo", "TRL's loss_type=grpo, not dapo"),
    ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1}, "beta=0.1", "gspo does not"),
    ("grpo", {"loss_type": "bnpo", "gradient_accumulation_steps": 2}, "loss_type=bnpo", "the means of micro-batches"),
    ("grpo", {"loss_type": "dr_grpo"}, "scale_rewards=group", "this is dr_grpo"),
    (
        "dpo",
        {"loss_type": ["ipo", "sigmoid"]},
        "loss_type=ipo,sigmoid",
        "of several losses give --loss=",
    ),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 0.5]}, "loss_weights", "of sft --likelihood_coef"),
    ("dpo", {"loss_type": "exo_pair"}, "loss_type=exo_pair", "exo_pair needs label_smoothing"),
    ("dpo", {"loss_type": ["aot"], "gradient_accumulation_steps": 2}, "loss_type", "of each micro-batch"),
    ("dpo", {"f_divergence_type": "js_divergence", "loss_type": "bco_pair"}, "f_divergence", "ratios of all losses"),
    ("dpo", {"f_divergence_type": "alpha_divergence"}, "f_div", "--divergence has forward_kl, js and alpha"),
    ("dpo", {"use_weighting": True, "loss_type": ["aot"]}, "loss_type=aot", "of each micro-batch"),
    ("kto", {"gradient_accumulation_steps": 2}, "loss_type=kto", "reference point of every micro-batch"),
    ("cpo", {"loss_type": "simpo"}, "cpo_alpha=1.0", "no likelihood beside its contrast"),
    ("cpo", {"loss_type": "hinge"}, "loss_type=hinge", "cpo has no hinge"),
    ("cpo", {"gradient_accumulation_steps": 2}, "cpo_alpha=1.0", "mean of the means"),
    ("orpo", {"beta": 0.2}, "beta=0.2", "of the prompt too"),
    ("gkd", {}, "lmbda=0.5", "its own samples alone"),
    ("sft", {"unheard_of": 3}, "unheard_of=3", "unknown"),
    (None, CRITIC | {f"{M}.path": "m", "critic.model.path": "n"}, "critic.model.path=n", "begins as the policy, m"),
    (None, GROUPS | {f"{R}.n": 1}, "algorithm.adv_estimator=grpo", "only completion"),
    (None, GROUPS | {f"{A}.policy_loss.loss_mode": "geo_mean"}, "algorithm.adv_estimator", "number of micro-batches"),
    (None, GROUPS | {f"{A}.policy_loss.loss_mode": "gspo"}, "loss_agg_mode=token-mean", "gspo reduces its loss in"),
    (
        None,
        GROUPS | {"algorithm.norm_adv_by_std_in_grpo": False, f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"},
        "loss_agg_mode",
        "width of the padded batch",
    ),
    (None, GROUPS | {f"{A}.grad_clip": 0.5, f"{A}.optim.clip_grad": 1.0}, "clip_grad=1.0", "0.5 by another name"),
    (None, GROUPS | {"actor_rollout_ref.unheard.of": 1}, "unheard.of=1", "unknown"),
]


@pytest.mark.parametrize(("trainer", "config", "name", "reason"), REFUSED, ids=str)
def test_what_has_no_equal_stops_with_a_list_and_is_left_out_on_request(
    trainer, config, name, reason, tmp_path, capsys
):
    (tmp_path / "t.json").write_text(json.dumps(config if trainer is None else LENGTH | config))
    line = ["funrl", "import", str(tmp_path / "t.json"), *([f"--recipe={trainer}"] if trainer else [])]
    assert cli.main([*line, f"--to={tmp_path / 'ours.yaml'}"]) == 2
    listed = capsys.readouterr().err.splitlines()
    assert "no equivalent here; --partial writes the rest" in listed[0] and not (tmp_path / "ours.yaml").exists()
    assert any(name in entry and reason in entry for entry in listed[1:]), listed
    assert cli.main([*line, "--partial", f"--to={tmp_path / 'ours.yaml'}"]) == 0
    assert "differs from their run" in (tmp_path / "ours.yaml").read_text()


def test_gspo_of_verl_is_imported_with_its_gradient(tmp_path):
    losses = {f"{A}.policy_loss.loss_mode": "gspo", f"{A}.loss_agg_mode": "seq-mean-token-mean"}
    whole = translate(tmp_path, GROUPS | losses)
    assert (whole.flags["experiment"], whole.flags["per_token"]) == ("gspo", "true")


def test_with_partial_the_nearest_is_taken(tmp_path):
    whole = translate(tmp_path, LENGTH | {"steps_per_generation": 2, "num_generations": 8})
    assert whole.lost and whole.flags["per_sequence"] == "false" and whole.flags["minibatches"] == "2"


@pytest.mark.parametrize(
    ("config", "trainer", "records", "steps"),
    [
        ({"num_generations": 8, "per_device_train_batch_size": 64}, None, 83, "30"),  # 3 x floor(83 / 8)
        ({"num_train_epochs": 2, "max_length": 99}, "sft", 81, "22"),  # 2 x ceil(81 / 8)
        ({"algorithm.adv_estimator": "grpo", f"{R}.n": 4, "trainer.total_epochs": 2}, None, 2100, "4"),
    ],
)
def test_epochs_become_steps_where_the_number_of_records_is_known(config, trainer, records, steps, tmp_path):
    assert translate(tmp_path, config, trainer).lost
    known = translate(tmp_path, config, trainer, records)
    assert known.lost == [] and known.flags["steps"] == steps


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"num_generations": 2, "loss_type": "cispo"}, "GRPOConfig"),
        ({"lmbda": 1.0}, "GKDConfig"),
        ({"desirable_weight": 1.0, "beta": 0.1}, "KTOConfig"),
        ({"cpo_alpha": 0.0, "beta": 0.1}, "CPOConfig"),
        ({"normalize_advantages": True, "num_generations": 2}, "RLOOConfig"),
        ({"loss_type": "robust"}, "DPOConfig"),
        ({"center_rewards_coefficient": 0.1}, "RewardConfig"),
        ({"packing": False}, "SFTConfig"),
        ({"beta": 0.1}, None),
        ({"learning_rate": 1e-5}, None),
        ({"loss_type": "sigmoid"}, None),
    ],
)
def test_a_trainer_is_known_by_what_it_alone_has_or_asked_for(config, trainer, tmp_path):
    if trainer is None:
        with pytest.raises(ValueError, match="several of TRL's trainers have these names; give --recipe="):
            translate(tmp_path, LENGTH | config)
    else:
        assert trainer in translate(tmp_path, LENGTH | config).source


SCRIPT = """
set -x
export MODEL=${MODEL_PATH:-Qwen/Qwen3-8B}
SIZE=$((1024 * 2))
N=${UNSET:-4}
if [ $N -gt 2 ]; then
    CLIP=0.3
fi
DATA=(
    data.train_files="$HOME/train.parquet"
    data.max_prompt_length=$((SIZE / 2))
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" algorithm.adv_estimator=grpo trainer.total_training_steps=5 \\
    actor_rollout_ref.model.path="$MODEL" data.max_response_length=${SIZE} actor_rollout_ref.rollout.n=$N \\
    actor_rollout_ref.actor.clip_ratio_low=$CLIP trainer.experiment_name=run_$(date +%s) data.train_batch_size=$B "$@"
"""


def test_a_script_s_own_variables_are_filled_in_and_others_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("B", "64")  # of this shell, not of the script
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "run.sh").write_text(SCRIPT)
    whole = imported(str(tmp_path / "run.sh"))
    wanted = {
        "model": "Qwen/Qwen3-8B",
        "max_new_tokens": "2048",
        "max_prompt_tokens": "1024",
        "samples_per_prompt": "4",
        "prompts": "/home/me/train.parquet",
    }
    assert {name: whole.flags[name] for name in wanted} == wanted
    assert "batch_prompts" not in whole.flags
    listed = " ".join(row.theirs for row in whole.lost)
    assert "data.train_batch_size=$B" in listed and "clip_ratio_low" in listed and "experiment_name" not in listed


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$A/${A}", "2/2"),
        ("${B:-$A}", "2"),
        ("${B-x}", "x"),
        ("$((A ** 3))", "$((A ** 3))"),
        ("$((-A + 7 % 4))", "1"),
        ("$B", "$B"),
        ("$(pwd)", "$(pwd)"),
        ("$((B + 1))", "$((B + 1))"),
        ("$((9 / 2))", "4"),
        ("${B:-}", ""),
    ],
)
def test_a_shell_s_expansions(text, value):
    assert shell_expanded(text, {"A": "2"}) == value


def test_arguments_of_a_launcher_are_not_the_trainer_s(tmp_path):
    (tmp_path / "run.sh").write_text(
        "accelerate launch --num_processes 8 trl/scripts/orpo.py --beta 0.2 --max_steps 5 --learning_rate $LR"
    )
    whole = imported(str(tmp_path / "run.sh"))
    assert whole.flags["experiment"] == "orpo" and whole.flags["beta"] == "0.2"
    listed = " ".join(row.theirs for row in whole.lost)
    assert "learning_rate=$LR" in listed and "num_processes" not in listed


def test_references_inside_a_value_and_names_that_are_not_set(tmp_path):
    config = GROUPS | {
        "trainer.project_name": "p",
        "trainer.default_local_dir": "runs/${trainer.project_name}",
        "reward_model.enable": None,
        "actor_rollout_ref.unheard.of": None,
    }
    nested: dict = {}
    for name, value in config.items():
        *parts, last = name.split(".")
        inner = nested
        for part in parts:
            inner = inner.setdefault(part, {})
        inner[last] = value
    whole = translate(tmp_path, nested)
    assert whole.lost == [] and whole.flags["run_dir"] == "runs/p"


def test_the_last_line_says_which_flags_are_still_needed(tmp_path, capsys):
    (tmp_path / "t.json").write_text(json.dumps(LENGTH | {"num_generations": 8}))
    assert cli.main(["funrl", "import", str(tmp_path / "t.json"), f"--to={tmp_path / 'o.yaml'}"]) == 0
    assert "with --model, --prompts or data" in capsys.readouterr().out
