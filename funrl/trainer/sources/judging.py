"""Verdicts: a frozen model writes a text about every completion, and a regular expression finds the score in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funrl.data.conversations import encode_prompt
from funrl.data.prompts import Example
from funrl.data.tokenizer import load_tokenizer
from funrl.mesh.mesh import Mesh
from funrl.mesh.rows import gather_table
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.models.model import Layer
from funrl.rewards.call import RewardError
from funrl.rewards.verifiers import PatternError, compile_pattern, matches_in
from funrl.rollout.engine import complete, onload_engine
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.settings.declaration import SettingsError, refusing
from funrl.trainer.settings.records import JudgeSettings
from funrl.trainer.sources.completion_scores import with_column
from funrl.trainer.sources.generation import generating_ranks
from funrl.trainer.sources.own_texts import Decode, own_completions, written_texts
from funrl.trainer.steps.parts import Judge, JudgeJob
from funrl.trainer.steps.step_rows import Rows, moved

PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
TEMPLATE = """\
Judge how well the answer solves the task.

Task:
{{prompt}}

Answer:
{{completion}}

Give a short reason, then a number from 0 (wrong) to 10 (right) in double brackets, such as [[5]]."""


def judge_job(
    directory: str,
    code: str,
    settings: JudgeSettings,
    sizes_of: Callable[[Model], dict[str, int]],
    prompts: Sequence[Example],
) -> JudgeJob:
    """Read a judge's configuration and tokenizer, and check them against the prompts.

    Args:
      directory: of the model.
      code: whose code computes the model, as in `hf.load_model`.
      settings: its template, pattern and length.
      sizes_of: model -> sizes of the mesh to generate on.
      prompts: whose fields fill the template.

    Raises:
      SettingsError, ModelError: naming what cannot work.
    """
    model = hf.check_directory(directory, code)
    tokenizer = load_tokenizer(directory)
    check_writes(directory, model)
    template = settings.judge_template
    pattern = settings.judge_pattern
    max_new_tokens = settings.judge_max_new_tokens
    text = TEMPLATE if template is None else read_template(template)
    check_template(text, template, prompts)
    with refusing(f"--judge_pattern={pattern}: ", PatternError):
        compiled = compile_pattern(pattern)
    if max_new_tokens >= model.config.max_positions:
        raise SettingsError(
            f"--judge_max_new_tokens={max_new_tokens}: the judge has {model.config.max_positions} positions"
        )
    stop = tuple(sorted({*model.config.special_tokens.eos, *({tokenizer.eos_token_id} - {None})}))
    sampling = Sampling(greedy=True, max_new_tokens=max_new_tokens, stop=stop)
    return JudgeJob(
        directory, model, tokenizer, template=text, pattern=compiled, sampling=sampling, sizes=sizes_of(model)
    )


def check_writes(directory: str, model: Model) -> None:
    """Refuse a judge that has no unembedding. Raises: SettingsError."""
    if not model.generates:
        raise SettingsError(f"--judge={directory}: it has a value head and cannot write; give it as --reward_model")


def read_template(file: str) -> str:
    """The text of a template's file. Raises: SettingsError."""
    with refusing(f"--judge_template={file}: it cannot be read: ", OSError, UnicodeDecodeError):
        return Path(file).read_text()


def check_template(text: str, file: str | None, prompts: Sequence[Example]) -> None:
    """Raise SettingsError if a template lacks {{completion}} or has a placeholder that a prompt cannot fill."""
    named = dict.fromkeys(PLACEHOLDER.findall(text))
    if "completion" not in named:
        raise SettingsError(f"--judge_template={file}: it has no {{{{completion}}}}")
    for example in prompts:
        missing = [name for name in named if name not in ("prompt", "completion", *example.fields)]
        if missing:
            where = f"{example.source}: " if example.source else ""
            raise SettingsError(
                f"--judge_template={file}: {where}there is no field {missing[0]!r} for {{{{{missing[0]}}}}}; the "
                f"fields are {['prompt', 'completion', *sorted(example.fields)]}"
            )


def fill_template(template: str, example: Example, completion: str) -> str:
    """Fill a template with a prompt, its completion and its fields."""
    values: Mapping[str, object] = {**example.fields, "prompt": shown_prompt(example), "completion": completion}
    return PLACEHOLDER.sub(lambda match: str(values[match[1]]), template)


def shown_prompt(example: Example) -> str:
    """A prompt as a reader sees it. A chat of several messages shows their roles."""
    if example.messages is None:
        return example.text
    messages = example.messages
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def score_in(verdict: str, pattern: Any) -> float:
    """The number in the last match in a verdict (in its first group, if it has groups); NaN without a number.

    Args:
      pattern: compiled by `compile_pattern`.

    Raises:
      PatternError: the search took too long.
    """
    matches = list(matches_in(pattern, verdict))
    if not matches:
        return float("nan")
    match = matches[-1]
    try:
        number = float(match[1] if pattern.groups else match[0])
    except (TypeError, ValueError):  # the group is not in the match, or holds something else
        return float("nan")
    return number if abs(number) < float("inf") else float("nan")


def open_judge(
    job: JudgeJob,
    mesh: Mesh,
    dtype: torch.dtype,
    max_rows: int,
    layer: Layer,
    note: Callable[[str], None],
) -> Judge:
    """Load a judge. Every rank of the mesh calls this.

    Args:
      job: the judge.
      mesh: of the sizes `job.sizes`.
      dtype: of its weights.
      max_rows: bound on the verdicts that are decoded together.
      layer: a replacement of the model's layer, such as a compiled one.
      note: receives remarks of the engine.
    """
    if job.model.pages:
        engine = native_engine(job.model, mesh, dtype, options=NativeOptions(max_rows=max_rows), layer=layer, note=note)
    else:
        engine = hf_engine(job.model, mesh, dtype)
    _, params = hf.load(job.directory, dtype, mesh, layouts=engine.weights.layouts, model=job.model)
    engine.load(engine.weights.named(params))
    engine.pause()
    return Judge(job, engine, mesh)


def with_verdicts(
    rows: Rows, examples: Sequence[Example], judge: Judge, weight: float, decode: Decode, note: Callable[[str], None]
) -> Rows:
    """Add a judge's scores: a last column of `scores`, and its weighted share of every score. NaN: no number was found.

    The rows of a prompt go to one rank, which computes the shared prefix of their verdicts' prompts once.

    Args:
      rows: completions, with their scores so far.
      examples: prompts, each with the same number of rows.
      judge: the judge.
      weight: of its score in the reward.
      decode: token ids of the policy without the stop token -> text.
      note: receives the first verdict.

    Raises:
      RewardError: a text is too long for the judge; raised on every rank.
    """
    job = judge.job
    mesh = judge.mesh
    owner = generating_ranks(len(examples), len(rows.owner) // len(examples), mesh.size(mesh.row_axes))
    rows = moved(rows, owner, mesh)
    written = own_completions(rows, examples)
    prompts = []
    for completion, completed in zip(written, written_texts(written, decode), strict=True):
        text = fill_template(job.template, completion.example, completed)
        prompt = text if job.tokenizer.chat_template is None else [{"role": "user", "content": text}]
        prompts.append(encode_prompt(job.tokenizer, prompt)[0])
    lengths = torch.tensor([len(ids) for ids in prompts], dtype=torch.int64, device=mesh.device)
    _check_lengths(gather_table({"length": lengths}, rows.owner, mesh, axes=mesh.row_axes)["length"], job, examples)
    requests = [Request(n, ids, job.sampling, seed=n) for n, ids in zip(rows.own.tolist(), prompts, strict=True)]
    with onload_engine(judge.engine):
        done = complete(judge.engine, requests)
    verdicts = [job.tokenizer.decode(completion.written, skip_special_tokens=True) for completion in done]
    own = torch.tensor([score_in(verdict, job.pattern) for verdict in verdicts], dtype=torch.float64)
    if verdicts and rows.own[0] == 0:
        read = "which has no number" if own[0].isnan() else f"which scores {own[0]:g}"
        note(f"the judge's first verdict is {verdicts[0]!r}, {read}")
    score_B = gather_table({"score": own.to(mesh.device)}, rows.owner, mesh, axes=mesh.row_axes)["score"]
    return with_column(rows, score_B, weight)


def _check_lengths(lengths_B: torch.Tensor, job: JudgeJob, examples: Sequence[Example]) -> None:
    worst = int(np.argmax(lengths_B.cpu().numpy()))
    most = int(lengths_B[worst])
    positions = job.model.config.max_positions
    if most + job.sampling.max_new_tokens > positions:
        example = examples[worst * len(examples) // len(lengths_B)]
        raise RewardError(
            f"the judge reads {most} tokens on a completion of the prompt {example.text!r} and may write "
            f"{job.sampling.max_new_tokens}, but it has {positions} positions; give smaller --max_new_tokens or "
            "--judge_max_new_tokens"
        )
