#!/usr/bin/env bash
# trl 1.16.0 with GLM-4.5's chat template: SFT on prompts and completions, and DPO, train no end of a turn.
#
# In this template the mark of the next role ends a turn. For `assistant_only_loss` TRL has a patched template that puts
# `<|user|>` into the turn. SFT on prompt-completion records (its default loss) and DPO use the template as it is, so that
# the trained text ends with the answer's last word: a model trained so does not learn to stop. TRL checks this
# (`is_chat_template_stop_token_trained`) with `assistant_only_loss` alone, and nothing is logged. For texts it adds
# the end-of-text token.
#
# Seen:
#   sft: ['\n<think></think>\nyo']
#   sft, assistant_only_loss: ['\n<think></think>\nyo<|user|>']
#   dpo: ['\n<think></think>\nyo', '\n<think></think>\nno']
#   warnings: []
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


import logging

heard = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger("trl").addHandler(handler)
glm = tokenizer_of("glm4moe", "<|endoftext|>", ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"])
user, yes, no = ([{"role": role, "content": text}] for role, text in
                 [("user", "hi"), ("assistant", "yo"), ("assistant", "no")])
sft = trained(glm, {"prompt": user, "completion": yes})
only = trained(glm, {"prompt": user, "completion": yes}, assistant_only_loss=True)
args = trl.DPOConfig("out", max_length=None, use_cpu=True, bf16=False, report_to="none")
data = Dataset.from_list([{"prompt": user, "chosen": yes, "rejected": no}])
pair = trl.DPOTrainer(model_of(glm), model_of(glm), args, train_dataset=data, processing_class=glm).train_dataset[0]
dpo = [glm.decode(pair["chosen_ids"]), glm.decode(pair["rejected_ids"])]
print("sft:", sft, "\nsft, assistant_only_loss:", only, "\ndpo:", dpo, "\nwarnings:", heard)
assert sft == ["\n<think></think>\nyo"] and only == ["\n<think></think>\nyo<|user|>"] and heard == []
assert dpo == ["\n<think></think>\nyo", "\n<think></think>\nno"]
EOF
