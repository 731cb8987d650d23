#!/usr/bin/env bash
# trl 1.16.0: SFTTrainer closes an answer that the prompt has begun, where `trl.apply_chat_template` continues it.
#
# A prompt may end with the first words of the assistant. `trl.apply_chat_template` renders it with
# `continue_final_message`, as it should. SFTTrainer renders it with `add_generation_prompt=True` whatever the last role is:
# the words become a turn of their own, the completion a second turn in a row. By default the prompt's words are trained
# too, with an end mark after them (TRL logs that prompt and completion do not fit, once). With `assistant_only_loss` the
# completion alone is trained, as the begin of a new turn.
#
# Seen:
#   apply_chat_template: prompt ends with '<|im_start|>assistant\n<think>\n\n</think>\n\nLet me think.'
#   sft: ['Let me think.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n It is 5.<|im_end|>\n']
#   sft, assistant_only_loss: ['<think>\n\n</think>\n\n It is 5.<|im_end|>\n']
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
prompt = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "Let me think."}]
record = {"prompt": prompt, "completion": [{"role": "assistant", "content": " It is 5."}]}
begun = trl.apply_chat_template({"prompt": prompt}, chat)["prompt"]
sft, only = trained(chat, record), trained(chat, record, assistant_only_loss=True)
print("apply_chat_template: prompt ends with", repr(begun.partition("<|im_end|>\n")[2]))
print("sft:", sft, "\nsft, assistant_only_loss:", only)
assert begun.endswith("Let me think.")
assert len(sft) == 1 and sft[0].startswith("Let me think.<|im_end|>\n<|im_start|>assistant\n")
assert "Let me think." not in only[-1] and only[-1].startswith("<think>")
EOF
