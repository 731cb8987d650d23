"""Flags of models: their weights, and the code that computes them."""

from __future__ import annotations

from dataclasses import dataclass

from funrl.trainer.settings.declaration import at_least, flag, one_of

SAVED_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModelSettings:
    """Models."""

    model: str | None = flag(
        None, "Hugging Face directory, or name of a model in its local cache", chosen="a small decoder from scratch"
    )
    model_code: str = flag(
        "auto",
        "code that computes models: native, this package's decoder; hf, that of transformers, data parallel only; "
        "auto: native if it supports the model",
        one_of("auto", "native", "hf"),
        requires="model",
    )
    resize_vocab: bool = flag(
        False,
        "add embedding rows for tokens that only the tokenizer has, initialised to the mean of the others",
        requires="model",
    )
    teacher: str | None = flag(
        None, "Hugging Face directory of the teacher to distil from, with the policy's tokenizer", needs="teacher"
    )
    teacher_top_k: int = flag(
        64,
        "number of the teacher's most likely tokens at each position, for algorithms that read them",
        at_least(1),
        requires="teacher",
        needs="teacher_topk",
    )
    dtype: str = flag(
        "auto",
        "dtype of forward passes (bfloat16 keeps float32 master weights); auto: bfloat16 on CUDA, else float32",
        one_of("auto", "float32", "float64", "bfloat16"),
    )
    save_dtype: str = flag(
        "auto", "dtype of the weights in model/; auto: that of --model", one_of("auto", *SAVED_DTYPES), effect="files"
    )
    compile: str = flag(
        "auto",
        "compile one decoder layer; auto: if it pays off, on CUDA; on with --backend=xla: decode in JAX",
        one_of("on", "off", "auto"),
    )
    backend: str = flag(
        "torch",
        "what computes gradients, updates and scores: torch, or xla, which is JAX on all devices of --mesh",
        one_of("torch", "xla"),
        example="xla",
    )
