#!/usr/bin/env bash
# trl 1.16.0 with datasets 5.2.0: nulls that Arrow adds to calls are trained, and SFTTrainer refuses TRL's remedy.
#
# Two records call tools with different parameters. Each call gets the other's parameters as null, and
# `SFTTrainer` trains `{"a": 2, "b": 3, "x": null}`, without a warning. `trl.trainer.utils.remove_none_values` is there
# for this, and its documentation applies it with `dataset.with_transform`. SFTTrainer raises a ValueError for any data set
# with a transform. `dataset.map` with the same function is of no use: Arrow adds the nulls again.
#
# Seen:
#   as it is: ['<think>\n\n</think>\n\n<tool_call>\n{"name": "mul", "arguments": {"a": 2, "b": 3, "x": null}}\n</tool_call><|im_end|>\n']
#   with_transform: ValueError: SFTTrainer cannot prepare a dataset that uses `Dataset.with_transform()`. ...
#   map: ['<think>\n\n</think>\n\n<tool_call>\n{"name": "mul", "arguments": {"a": 2, "b": 3, "x": null}}\n</tool_call><|im_end|>\n']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 trl==1.16.0 transformers==5.24.0 tokenizers==0.23.3 datasets==5.2.0
cd "$folder"
"$folder/venv/bin/python" 2>"$folder/log" - <<'EOF' || { tail -20 "$folder/log"; exit 1; }
import pathlib, trl
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def tokenizer_of(name, end, marks):
    """A tokenizer of bytes with one of TRL's copies of published chat templates."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in [*marks, end, "<pad>"]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token="<pad>")
    tokenizer.chat_template = (pathlib.Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    return tokenizer


def model_of(tokenizer):
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))


from trl.trainer.utils import remove_none_values


def call(name, arguments):
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"prompt": [{"role": "user", "content": "go"}],
            "completion": [{"role": "assistant", "content": "", "tool_calls": calls}]}


def trained(data):
    args = trl.SFTConfig("out", max_length=None, use_cpu=True, bf16=False, report_to="none")
    row = trl.SFTTrainer(model_of(chat), args, train_dataset=data, processing_class=chat).train_dataset[0]
    return [chat.decode([t for t, label in zip(row["input_ids"], row["labels"]) if label != -100])]


chat = tokenizer_of("qwen3", "<|im_end|>", ["<|im_start|>"])
data = Dataset.from_list([call("mul", {"a": 2, "b": 3}), call("neg", {"x": 4})])
as_it_is = trained(data)
try:
    transformed = str(trained(data.with_transform(remove_none_values)))
except ValueError as error:
    transformed = f"ValueError: {error}"
mapped = trained(data.map(remove_none_values))
print("as it is:", as_it_is)
print("with_transform:", transformed[:90], "...")
print("map:", mapped)
assert '"x": null' in as_it_is[0] and mapped == as_it_is
assert transformed.startswith("ValueError: SFTTrainer cannot prepare a dataset that uses `Dataset.with_transform()`")
EOF
