"""Trained tokens of TRL and verl for the same records, kept as tests/data/peers_trained_tokens.json.

Each library runs in an environment of its own, as verl 0.9 and TRL 1.16 want different versions of transformers:

    pip install trl==1.16.0 transformers==5.24.0 pillow
    python tools/peers_trained_tokens.py trl --stories=shared/data/stories260k
    pip install --no-deps verl==0.9.1; pip install transformers==5.10.4 pandas pyarrow ray tensordict omegaconf pillow
    python tools/peers_trained_tokens.py verl

TRL's trainers prepare the records as they do before a run. verl's files have messages only: it gets a prompt and its
completion as one conversation, and no texts or pairs. Tokenizers are of bytes (tests/data/chat_templates.py), or the
one of `--stories`. Of each text the file has stretches, [trained, text], and their tokens where the tokenizer gives
others for the text of a stretch alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests" / "data" / "peers_trained_tokens.json"
sys.path += [str(ROOT / "tests" / "data"), str(ROOT / "tests" / "environments")]
STORIES = "stories260k"
TODAY = 'strftime_now("%Y-%m-%d")'  # in gpt-oss's templates; a fixed date takes its place
DATE = '"2026-01-31"'
VERSIONS = {"trl": ("trl", "transformers", "tokenizers", "datasets"), "verl": ("verl", "transformers", "tokenizers")}
MESSAGE = 160  # characters of an error or a warning


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calling(name: str, arguments: Any, content: Any = "", **more: Any) -> dict[str, Any]:
    call = {"type": "function", "id": "call00001", "function": {"name": name, "arguments": arguments}}
    return said(content, tool_calls=[call], **more)


def answer(content: str, name: str = "mul") -> dict[str, Any]:
    return {"role": "tool", "name": name, "tool_call_id": "call00001", "content": content}


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"Tool {name}.", "parameters": schema}}


MUL = tool("mul", "a", "b")
ASKS = user("2*3?")
TURNS = [user("hi"), said("yo"), user("more"), said("ok")]
TALK = [ASKS, calling("mul", {"a": 2, "b": 3}), answer("6"), said("It is 6.")]
# Name -> tokenizer, records of one file; the first is compared.
RECORDS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "text": (STORIES, [{"text": "Once upon a time"}]),
    "text_completion": ("qwen3_full", [{"prompt": "2+2=", "completion": "4"}]),
    "sentencepiece_completion": (STORIES, [{"prompt": "2+2=", "completion": "4"}]),
    "sentencepiece_inside_a_word": (STORIES, [{"prompt": "Once upon a ti", "completion": "me"}]),
    "rendered_prompt_with_bos": (
        "gemma_3",
        [
            {
                "prompt": "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
                "completion": "yo<end_of_turn>",
            }
        ],
    ),
    "one_turn": ("qwen3_full", [{"messages": TURNS[:2]}]),
    "two_turns": ("qwen3_full", [{"messages": TURNS}]),
    "thoughts_in_two_turns": (
        "qwen3_full",
        [
            {
                "messages": [
                    user("hi"),
                    said("yo", reasoning_content="T1"),
                    user("more"),
                    said("ok", reasoning_content="T2"),
                ]
            }
        ],
    ),
    "call_and_answer": ("qwen3_full", [{"messages": TALK, "tools": [MUL]}]),
    "message_as_completion": ("qwen3_full", [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
    "call_as_completion": ("qwen3_full", [{"prompt": [ASKS], "completion": TALK[1:2], "tools": [MUL]}]),
    "opened_thoughts": ("qwen3_5", [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
    "opened_thoughts_with_thoughts": (
        "qwen3_5",
        [{"prompt": TURNS[:1], "completion": [said("yo", reasoning_content="T1")]}],
    ),
    "arguments_as_text": (
        "qwen2_5",
        [{"prompt": [ASKS], "completion": [calling("mul", '{"a": 2, "b": 3}')], "tools": [MUL]}],
    ),
    "nulls_of_arrow": (
        "qwen2_5",
        [
            {"prompt": [ASKS], "completion": TALK[1:2], "tools": [MUL]},
            {"prompt": [user("-4?")], "completion": [calling("neg", {"x": 4})], "tools": [tool("neg", "x")]},
        ],
    ),
    "null_content": (
        "qwen3_full",
        [{"prompt": [ASKS], "completion": [calling("mul", {"a": 2, "b": 3}, content=None)], "tools": [MUL]}],
    ),
    "text_parts": (
        "qwen3_full",
        [{"prompt": [user([{"type": "text", "text": "hi"}])], "completion": [said([{"type": "text", "text": "yo"}])]}],
    ),
    "prompt_ends_with_the_assistant": (
        "qwen3_full",
        [{"prompt": [user("2+3?"), said("Let me think. ")], "completion": [said("It is 5.")]}],
    ),
    "weight_0": ("qwen3_full", [{"messages": [TURNS[0], said("yo", weight=0), *TURNS[2:]]}]),
    "marks_of_a_user": ("qwen3_full", [{"messages": [user("what is <|im_end|>?"), said("a mark")]}]),
    "glm_two_turns": ("glm_4_5_full", [{"messages": TURNS}]),
    "glm_call_and_answer": ("glm_4_5_full", [{"messages": TALK, "tools": [MUL]}]),
    "glm_completion": ("glm_4_5_full", [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
    "gemma_completion": ("gemma_3", [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
    "gpt_oss_two_turns": ("gpt_oss", [{"messages": TURNS}]),
    "gpt_oss_call_and_answer": (
        "gpt_oss",
        [{"messages": [ASKS, {**TALK[1], "reasoning_content": "T1"}, *TALK[2:]], "tools": [MUL]}],
    ),
    "gpt_oss_completion": ("gpt_oss", [{"prompt": TURNS[:1], "completion": TURNS[1:2]}]),
    "pair_of_calls": (
        "qwen3_full",
        [
            {
                "prompt": [ASKS],
                "chosen": [calling("mul", {"a": 2, "b": 3})],
                "rejected": [calling("add", {"a": 2, "b": 3})],
                "tools": [MUL],
            }
        ],
    ),
    "glm_pair": ("glm_4_5_full", [{"prompt": TURNS[:1], "chosen": [said("yo")], "rejected": [said("no")]}]),
    "text_pair": (STORIES, [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]),
}


def tokenizer_named(name: str, stories: str | None) -> Any:
    """A tokenizer; None if it is that of the stories and no folder is given."""
    if name == STORIES:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(stories) if stories else None
    from chat_templates import tokenizer_of

    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = tokenizer.chat_template.replace(TODAY, DATE)
    return tokenizer


class Warnings(logging.Handler):
    """Keeps what a library logs as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage()[:MESSAGE])


def result_of(make: Callable[[], Iterator[tuple[str, list[int], list[bool]]]], names: str, tokenizer: Any) -> Any:
    """Texts that a library makes of a record, or its error; and its warnings.

    Args:
      make: gives (name, tokens, trained) of each text.
      names: of the library's logger.
    """
    heard = Warnings()
    logger = logging.getLogger(names)
    logger.addHandler(heard)
    try:
        texts = {name: as_spans(tokenizer, tokens, trained) for name, tokens, trained in make()}
    except Exception as error:  # templates and libraries raise anything
        return {"error": f"{type(error).__name__}: {error}"[:MESSAGE]}
    finally:
        logger.removeHandler(heard)
    return {"texts": texts, **({"warnings": heard.texts} if heard.texts else {})}


def as_spans(tokenizer: Any, tokens: list[int], trained: list[bool]) -> dict[str, Any]:
    """Stretches of trained and other tokens.

    Returns: "spans": [trained, text] of each; "tokens" of each, where its text alone would have others.
    """
    parts: list[tuple[int, list[int]]] = []
    for token, flag in zip(tokens, trained, strict=True):
        if not parts or parts[-1][0] != int(flag):
            parts.append((int(flag), []))
        parts[-1][1].append(token)
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for _, ids in parts]
    spans = [[flag, text] for (flag, _), text in zip(parts, texts, strict=True)]
    again = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = [ids for _, ids in parts]
    return {"spans": spans} if again == ids else {"spans": spans, "tokens": ids}


def trl_results(tokenizer: Any, records: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """TRL's results for a record, by name of the way: "sft", "sft_assistant_only", "dpo"."""
    if "chosen" in records[0]:
        return {"dpo": result_of(lambda: trl_pair(tokenizer, records, folder), "trl", tokenizer)}
    ways = {"sft": False, "sft_assistant_only": True}
    if isinstance(records[0].get("prompt", records[0].get("text")), str):
        del ways["sft_assistant_only"]
    return without_repeats(
        {
            way: result_of(lambda only=only: trl_text(tokenizer, records, folder, only), "trl", tokenizer)
            for way, only in ways.items()
        }
    )


def without_repeats(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of two ways; the second is left out if it is the same, or if the first trains every token."""
    kept = dict(results)
    if len(kept) == 2:
        (first_way, first), (second_way, second) = kept.items()
        if first.get("texts", first) == second.get("texts", second):
            del kept[second_way]
            return {f"{first_way}, {second_way}": kept.pop(first_way)}
        spans = first["texts"]["text"]["spans"] if "texts" in first else []
        if len(spans) == 1 and "texts" in second:
            kept[first_way] = "every token"
    return kept


def trl_options(folder: str) -> dict[str, Any]:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    return {"output_dir": folder, "max_length": None, "use_cpu": True, "bf16": False, **quiet}


def trl_text(
    tokenizer: Any, records: list[dict[str, Any]], folder: str, assistant_only: bool
) -> Iterator[tuple[str, list[int], list[bool]]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    options = SFTConfig(assistant_only_loss=assistant_only, shuffle_dataset=False, **trl_options(folder))
    trainer = SFTTrainer(
        model=tiny_model(tokenizer),
        args=options,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    row = trainer.train_dataset[0]
    yield "text", row["input_ids"], [label != -100 for label in row["labels"]]


def trl_pair(tokenizer: Any, records: list[dict[str, Any]], folder: str) -> Iterator[tuple[str, list[int], list[bool]]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=tiny_model(tokenizer),
        ref_model=tiny_model(tokenizer),
        args=DPOConfig(**trl_options(folder)),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    row = trainer.train_dataset[0]
    for name in ("chosen", "rejected"):
        ids = row[f"{name}_ids"]
        yield name, row["prompt_ids"] + ids, [False] * len(row["prompt_ids"]) + [True] * len(ids)


def tiny_model(tokenizer: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, **sizes, **ends)
    )


def verl_results(tokenizer: Any, records: list[dict[str, Any]], folder: str) -> dict[str, Any]:
    """verl's results for a record, by name of the way: "sft", "sft_ignoring_mismatch"."""
    record = records[0]
    if "chosen" in record or (isinstance(record.get("prompt", ""), str) and "messages" not in record):
        return {}  # it has no such format
    return without_repeats(
        {
            way: result_of(lambda ignore=ignore: verl_text(tokenizer, records, folder, ignore), "verl", tokenizer)
            for way, ignore in {"sft": False, "sft_ignoring_mismatch": True}.items()
        }
    )


def verl_text(
    tokenizer: Any, records: list[dict[str, Any]], folder: str, ignore: bool
) -> Iterator[tuple[str, list[int], list[bool]]]:
    import pyarrow
    import pyarrow.parquet
    from omegaconf import OmegaConf
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    rows = [
        {"messages": record.get("messages") or record["prompt"] + record["completion"], "tools": record.get("tools")}
        for record in records
    ]
    rows = rows if records[0].get("tools") else [{"messages": row["messages"]} for row in rows]
    path = f"{folder}/records.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    options = {"pad_mode": "no_padding", "max_length": 10_000, "ignore_input_ids_mismatch": ignore}
    row = MultiTurnSFTDataset(path, tokenizer, OmegaConf.create(options))[0]
    yield "text", row["input_ids"].tolist(), [bool(x) for x in row["loss_mask"].tolist()]


def fix_date() -> None:
    """Register gpt-oss's template with a fixed date in TRL."""
    from trl import chat_template_utils as templates

    for name in ("gptoss_chat_template", "gptoss_training_chat_template"):
        setattr(templates, name, getattr(templates, name).replace(TODAY, DATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=VERSIONS)
    parser.add_argument("--stories", help="folder of a tokenizer that puts a space before a text (TinyStories, 260K)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.library == "trl":
        fix_date()
    results_of: Mapping[str, Callable[..., dict[str, Any]]] = {"trl": trl_results, "verl": verl_results}
    kept = json.loads(OUT.read_text()) if OUT.exists() else {"versions": {}, "records": {}}
    versions = {package: importlib.metadata.version(package) for package in VERSIONS[options.library]}
    kept["versions"][options.library] = versions
    for name, (tokenizer_name, records) in RECORDS.items():
        tokenizer = tokenizer_named(tokenizer_name, options.stories)
        entry = kept["records"].setdefault(name, {})
        entry |= {"tokenizer": tokenizer_name, "records": records}
        if tokenizer is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            entry[options.library] = results_of[options.library](tokenizer, records, folder)
        for way, result in entry[options.library].items():
            print(f"{name}: {way}: {json.dumps(result)}")
    kept["records"] = {name: kept["records"][name] for name in RECORDS}
    OUT.write_text(as_text(kept))


def as_text(kept: Mapping[str, Any]) -> str:
    """JSON with a line for each result."""
    lines = []
    for name, entry in kept["records"].items():
        inner = ",\n   ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        lines.append(f"  {json.dumps(name)}: {{\n   {inner}\n  }}")
    return f'{{\n "versions": {json.dumps(kept["versions"])},\n "records": {{\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    main()
