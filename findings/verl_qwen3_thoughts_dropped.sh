#!/usr/bin/env bash
# verl 0.9.1 with transformers 5.10.4: SFT on Qwen3's chats stops, and the flag that its error names drops all thoughts.
#
# `MultiTurnSFTDataset` renders each message alone and joins the tokens. Qwen3's template gives the last turn its
# thoughts (or empty ones) only behind a user's message, so that the joined tokens differ from the whole conversation's for
# any chat: one question and one answer raise an AssertionError. It says to set `ignore_input_ids_mismatch=True`.
# With that, `reasoning_content` is in no token of the row, not even in the last turn: the model is trained to answer
# without the thoughts that the data set has. The warning says nothing of it.
#
# Seen:
#   by default: AssertionError: MultiTurnSFTDataset apply_chat_template to each turn separately and concat `input_ids` ...
#   ignore_input_ids_mismatch: ['yo<|im_end|>\n']
#   the template renders: '<|im_start|>assistant\n<think>\nwave back\n</think>\n\nyo<|im_end|>\n'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
# trl has the template. verl's data set imports ray and more, which its own list of packages would replace by others.
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.10.4 tokenizers==0.22.2 pandas==3.1.1 pyarrow==26.0.1 \
  omegaconf==2.4.0 tensordict==0.15.3 ray==2.60.0 pillow==13.0.0 numpy==2.4.6 datasets==5.2.0
"$folder/venv/bin/pip" install -q --no-deps verl==0.9.1 trl==1.16.0
cd "$folder"
"$folder/venv/bin/python" 2>"$folder/log" - <<'EOF' || { tail -20 "$folder/log"; exit 1; }
import importlib.util, pathlib
import pyarrow as pa, pyarrow.parquet as pq
from omegaconf import OmegaConf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
marks = ["<|im_start|>", "<|im_end|>", "<pad>"]
core.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
chat = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<pad>")
home = pathlib.Path(importlib.util.find_spec("trl").submodule_search_locations[0])
chat.chat_template = (home / "chat_templates" / "qwen3.jinja").read_text()
messages = [{"role": "user", "content": "hi"},
            {"role": "assistant", "content": "yo", "reasoning_content": "wave back"}]
pq.write_table(pa.Table.from_pylist([{"messages": messages}]), "chats.parquet")


def trained(**options):
    options = OmegaConf.create({"pad_mode": "no_padding", "max_length": 1000, **options})
    row = MultiTurnSFTDataset("chats.parquet", chat, options)[0]
    return [chat.decode(row["input_ids"][row["loss_mask"].bool()])]


try:
    default = str(trained())
except AssertionError as error:
    default = f"AssertionError: {error}"
ignoring = trained(ignore_input_ids_mismatch=True)
rendered = chat.apply_chat_template(messages, tokenize=False).partition("hi<|im_end|>\n")[2]
print("by default:", default[:100], "...")
print("ignore_input_ids_mismatch:", ignoring)
print("the template renders:", repr(rendered))
assert default.startswith("AssertionError") and "ignore_input_ids_mismatch=True" in default
assert ignoring == ["yo<|im_end|>\n"] and "wave back" in rendered
EOF
