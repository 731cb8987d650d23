#!/usr/bin/env bash
# trl 1.16.0, transformers 5.24.0: with Qwen3's chat template a content of text parts becomes an empty message.
#
# `"content": [{"type": "text", "text": "hi"}]` is a form of OpenAI's API and of transformers' pages. The
# template that TRL ships as Qwen3's takes a content that is no string for an empty one. transformers renders question and
# answer as empty turns, and SFTTrainer trains the end mark alone, without a warning: such a data set teaches
# the model to say nothing. Qwen2.5's template raises for the same record; Qwen3.5's renders it.
#
# Seen:
#   rendered: '<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n'
#   sft: ['<|im_end|>\n']
#   sft, assistant_only_loss: ['<think>\n\n</think>\n\n<|im_end|>\n']
#   Qwen2.5's: TypeError
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


def trained(tokenizer, record, **options):
    """The stretches of the record that TRL's SFTTrainer trains."""
    args = trl.SFTConfig("out", max_length=None, use_cpu=True, bf16=False, report_to="none", **options)
    data = Dataset.from_list([record])
    row = trl.SFTTrainer(model_of(tokenizer), args, train_dataset=data, processing_class=tokenizer).train_dataset[0]
    parts, before = [], False
    for token, label in zip(row["input_ids"], row["labels"]):
        if label != -100:
            parts = [*parts[:-1], [*parts[-1], token]] if before else [*parts, [token]]
        before = label != -100
    return [tokenizer.decode(part) for part in parts]


chat = tokenizer_of("qwen3", "<|im_end|>", ["<|im_start|>"])
record = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
          "completion": [{"role": "assistant", "content": [{"type": "text", "text": "yo"}]}]}
rendered = chat.apply_chat_template(record["prompt"] + record["completion"], tokenize=False)
sft, only = trained(chat, record), trained(chat, record, assistant_only_loss=True)
try:
    older = trained(tokenizer_of("qwen2_5", "<|im_end|>", ["<|im_start|>"]), record)
except TypeError:
    older = "TypeError"
print("rendered:", repr(rendered), "\nsft:", sft, "\nsft, assistant_only_loss:", only, "\nQwen2.5's:", older)
assert "hi" not in rendered and "yo" not in rendered and older == "TypeError"
assert sft == ["<|im_end|>\n"] and only == ["<think>\n\n</think>\n\n<|im_end|>\n"]
EOF
