"""Names of TRL's scripts, for data, models and the transformers trainer, and what they mean here.

They are those of its ScriptArguments and ModelConfig, and a few of transformers' TrainingArguments, as they are typed
beside a run's own flags: each points to what to write. The names of its trainers, and of adapters, are in `names_trl`.
"""

from __future__ import annotations

from funrl.flags.foreign.renaming import Convert, DifferentError, Meaning, NameContext, default_only

_QUANTIZED = "weights are not quantized; --lora_rank, --dtype=bfloat16, --remat=full and --offload save memory"


def _elsewhere(text: str) -> Convert:
    """A name whose meaning is a part of something else here."""

    def convert(_: str, context: NameContext) -> Meaning:
        raise DifferentError(text)

    return convert


def _split(ours: str) -> Convert:
    """A split of a dataset, which is part of its name here."""

    def convert(text: str, context: NameContext) -> Meaning:
        flag = ours or ("data" if context.texts else "prompts")
        dataset = context.theirs.get("dataset_name")
        if dataset is None:
            raise DifferentError(f"a split is a part of the dataset's name: --{flag}=NAME:{text}")
        config = context.theirs.get("dataset_config", "")
        return Meaning({flag: ":".join(part for part in (dataset, config, text) if part)})

    return convert


SCRIPTS: dict[str, Convert] = {
    "load_in_4bit": default_only("false", _QUANTIZED),
    "load_in_8bit": default_only("false", _QUANTIZED),
    "dataset_train_split": _split(""),
    "dataset_test_split": _split("eval_data"),
    "dataset_config": _elsewhere("a configuration is a part of the dataset's name: NAME:CONFIG:SPLIT"),
    "dataset_streaming": default_only("false", "data is read from files where it is needed; leave it out"),
    "trust_remote_code": default_only("false", "code of a model's repository is never run; --model_code=hf takes the "
        "classes of transformers"),
    "model_revision": default_only("main", "--model is a directory, or what the local cache has; download the revision "
        "first"),
    "torch_compile": _elsewhere("--compile says what is compiled"),
    "eval_on_start": default_only("true", "the state before the first step is always evaluated"),
    "remove_unused_columns": default_only("false", "every column reaches the reward; leave it out"),
}  # fmt: skip
