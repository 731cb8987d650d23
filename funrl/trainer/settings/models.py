"""Flags of models: which they are and what computes them."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.trainer.settings.declaration import (
    at_least,
    flag,
    one_of,
)


@dataclass(frozen=True)
class ModelSettings:
    """Models."""

    model: str | None = flag(
        None,
        "Hugging Face directory, or name of a model in its local cache",
        chosen="a small decoder from scratch",
    )
    model_code: str = flag(
        "auto",
        "whose code computes models: native, this package's decoder; hf, transformers' own, data parallel "
        "only; auto: native where it can",
        one_of("auto", "native", "hf"),
        requires="model",
    )
    resize_vocab: bool = flag(
        False,
        "give the model rows for tokens that only its tokenizer has, each the mean of the others",
        requires="model",
    )
    teacher: str | None = flag(
        None,
        "Hugging Face directory of a model to distil from, with the policy's tokenizer",
        needs="teacher",
    )
    teacher_top_k: int = flag(
        64,
        "most likely tokens of the teacher in each place, for algorithms that read them",
        at_least(1),
        requires="teacher",
        needs="teacher_topk",
    )
    dtype: str = flag(
        "auto",
        "dtype of forward passes (bfloat16 keeps float32 master weights); auto: bfloat16 on CUDA, else float32",
        one_of("auto", "float32", "float64", "bfloat16"),
    )
    compile: str = flag(
        "auto",
        "compile one decoder layer; auto: where it pays, on CUDA",
        one_of("on", "off", "auto"),
    )
