"""`funrl bisect RUN --gap`, as one types it after a run that has stopped."""

import shlex

import pytest
from test_replay_command import TINY, said

from funrl.cli.run import main
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.models.decoder import attention, dense

pytestmark = pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
RUN = (*(flag for flag in TINY if not flag.startswith(("--save_rollouts", "--steps"))), "--on_gap=stop")


@pytest.mark.slow
def test_a_run_that_stopped_names_the_operation_and_goes_on(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    assert main("grpo", ["grpo", *RUN, "--steps=1", f"--run_dir={folder}"]) == 0
    assert said(capsys, "bisect", folder, "--gap") == (
        2,
        f"error: {folder}/gap has no row: no gap of this run has been saved\n",
    )
    right = attention.rotate
    with monkeypatch.context() as patch:
        patch.setattr(attention, "rotate", lambda x, rope: right(x, rope) * (1 + 1e-6))
        capsys.readouterr()
        resumed = ["grpo", *RUN, "--steps=3", f"--run_dir={folder}", "--resume"]
        assert main("grpo", resumed) == 1
        message = capsys.readouterr().err
        assert "engine and trainer differ by " in message and ", most at row " in message
        command = message.strip().partition("this command names the operation that differs: ")[2].splitlines()[0]
        status, text = said(capsys, *shlex.split(command)[1:])
        assert (
            status == 1 and text.startswith("step 2, row ") and "\nfirst difference: layer 0, rotation of q: " in text
        )
    status, text = said(capsys, "bisect", folder, "--gap")  # without the fault
    assert status == 0 and "alone the row has the same bits in both: " in text and "in the run the trainer had " in text
    assert main("grpo", resumed) == 0  # from step 1, which the stop has kept


@pytest.mark.slow
def test_the_operation_is_named_on_the_meshes_of_the_run(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    right = dense.gated
    monkeypatch.setattr(dense, "gated", lambda gate, up, activation: right(gate, up, activation) * (1 + 1e-11))
    flags = ["--steps=1", "--mesh=tp2", "--generate_mesh=dp2", "--dtype=float64", f"--run_dir={folder}"]
    assert main("grpo", ["grpo", *RUN, *flags]) == 1
    status, text = said(capsys, "bisect", folder, "--gap")
    assert status == 1 and "\nfirst difference: layer 0, gate: " in text


@pytest.mark.parametrize("argv", [["RUN", "OTHER", "--gap"], ["--gap"], ["RUN"]])
def test_how_it_is_not_called(argv, capsys):
    status, text = said(capsys, "bisect", *argv)
    assert status == 2 and "usage: funrl bisect RUN_DIR OTHER_RUN_DIR | funrl bisect RUN_DIR --gap" in text
