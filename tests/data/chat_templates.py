"""Chat templates of families of models, and tokenizers of bytes in which their marks are tokens.

| names | files |
|---|---|
| the eight of `family_templates`, gemma_3 | written for the tests after the families' documentation, shortened |
| gpt_oss, glm_4_5_full, ministral_3, deepseek_v3_1, qwen3_full, qwen3_5 | published: templates/, see README.md |
| llama_3_1_full, gemma_3_full, deepseek_r1 | trl's, where it is installed: not under Apache-2.0 or MIT, or unclear |
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import family_templates as families

FOLDER = Path(__file__).parent / "templates"
PAD = "<pad>"  # where a family has none of its own


class Marks(NamedTuple):
    """Marks of a family's tokenizer.

    Attributes:
      bos, eos, pad: as published with the model.
      special: further special tokens.
      added: further tokens that are not special.
    """

    bos: str | None
    eos: str
    pad: str = PAD
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


class ChatTemplate(NamedTuple):
    """A chat template with the marks of its family.

    Attributes:
      file: without .jinja.
      marks: of the tokenizer.
      ends: token that ends a reply, and one that ends a reply with calls.
      refuses: names of what the template raises for or cannot say, as `drawn_conversations` takes them.
      drops: what the rendering of a conversation that ends with a turn lacks of that turn and what was before it:
        "system"; "tools", their schemas; "ids" of calls; "thoughts"; "call_content", content beside calls;
        "more_calls", those after the first; "space" around contents.
      rewrites: whether some turn is rendered otherwise, or a tool shown elsewhere, once a user speaks again.
      folder: of the file; None: trl's.
    """

    file: str
    marks: Marks
    ends: tuple[str, ...]
    refuses: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    rewrites: bool = False
    folder: Path | None = FOLDER


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _short(name: str, bos: str | None, eos: str, pad: str = PAD) -> tuple[str, Marks, tuple[str, ...]]:
    """File, marks and ends of one of the eight of `family_templates`."""
    family = families.FAMILIES[name]
    special = tuple(word for word in family.special if word not in (bos, eos, pad))
    return name, Marks(bos, eos, pad, special, family.added), family.ends


def _fullwidth(words: str) -> tuple[str, ...]:
    """DeepSeek's marks, which have other bars and blanks than ASCII's."""
    return tuple(f"<\uff5c{word}\uff5c>".replace("_", "\u2581") for word in words.split())


_CHATML = (None, "<|im_end|>", "<|endoftext|>")
_QWEN = Marks(*_CHATML, ("<|im_start|>",), families.TAGS)
_GLM = _short("glm_4_5", None, "<|endoftext|>", "<|endoftext|>")
_GPT_OSS_SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>")
_GPT_OSS = Marks("<|startoftext|>", "<|return|>", "<|endoftext|>", _GPT_OSS_SPECIAL)
_GEMMA = Marks("<bos>", "<eos>", "<pad>", ("<start_of_turn>", "<end_of_turn>"))
_MINISTRAL_SPECIAL = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[IMG]", "[THINK]", "[/THINK]"),
)
_DEEPSEEK_ADDED = (
    *_fullwidth("User Assistant tool_calls_begin tool_calls_end tool_call_begin tool_call_end tool_sep"),
    *_fullwidth("tool_outputs_begin tool_outputs_end tool_output_begin tool_output_end"),
)
_BEGIN, _END, _PADDING = _fullwidth("begin_of_sentence end_of_sentence _pad_")
_DEEPSEEK = Marks(_BEGIN, _END, _PADDING, added=(*_DEEPSEEK_ADDED, "<think>", "</think>"))

_LLAMA = ChatTemplate(
    *_short("llama_3_1", "<|begin_of_text|>", "<|eot_id|>"),
    refuses=_names("parallel"),
    drops=_names("thoughts call_content ids space"),
)
_GEMMA_3 = ChatTemplate(
    *("gemma_3", _GEMMA, ("<end_of_turn>",) * 2), refuses=_names("tools in_a_row"), drops=_names("thoughts space")
)
_DEEPSEEK_V3_1 = ChatTemplate("deepseek_v3_1", _DEEPSEEK, (_DEEPSEEK.eos,) * 2, drops=_names("thoughts ids tools"))
_SHORT = {
    "qwen2_5": ChatTemplate(*_short("qwen2_5", *_CHATML), drops=_names("thoughts ids")),
    "qwen3": ChatTemplate(*_short("qwen3", *_CHATML), drops=_names("ids"), rewrites=True),
    "qwen3_coder": ChatTemplate(*_short("qwen3_coder", *_CHATML), drops=_names("thoughts ids space")),
    "hermes_2_pro": ChatTemplate(*_short("hermes_2_pro", *_CHATML), drops=_names("thoughts ids")),
    "llama_3_1": _LLAMA,
    "mistral_v3": ChatTemplate(
        *_short("mistral_v3", "<s>", "</s>"), drops=_names("system thoughts call_content"), rewrites=True
    ),
    "harmony": ChatTemplate(
        *_short("harmony", None, "<|return|>", "<|endoftext|>"),
        refuses=_names("all_beside_calls"),
        drops=_names("system more_calls ids"),
        rewrites=True,
    ),
    "glm_4_5": ChatTemplate(*_GLM, drops=_names("system ids space"), rewrites=True),
}
TEMPLATES = {
    **{name: form._replace(folder=families.FOLDER) for name, form in _SHORT.items()},
    "gemma_3": _GEMMA_3,
    "gpt_oss": ChatTemplate(
        *("gpt_oss", _GPT_OSS, ("<|return|>", "<|call|>")),
        refuses=_names("all_beside_calls"),
        drops=_names("more_calls ids"),
        rewrites=True,
    ),
    "glm_4_5_full": ChatTemplate("glm_4_5_full", *_GLM[1:], drops=_names("ids space"), rewrites=True),
    "ministral_3": ChatTemplate(
        *("ministral_3", Marks("<s>", "</s>", PAD, _MINISTRAL_SPECIAL), ("</s>", "</s>")),
        refuses=_names("in_a_row"),
        drops=_names("thoughts ids"),
    ),
    "deepseek_v3_1": _DEEPSEEK_V3_1,
    "qwen3_full": ChatTemplate("qwen3_full", _QWEN, ("<|im_end|>",) * 2, drops=_names("ids"), rewrites=True),
    "qwen3_5": ChatTemplate("qwen3_5", _QWEN, ("<|im_end|>",) * 2, drops=_names("ids space"), rewrites=True),
    "llama_3_1_full": _LLAMA._replace(file="llama3_1", folder=None),
    "gemma_3_full": _GEMMA_3._replace(file="gemma3", folder=None),
    # It adds arguments to a text, so that they must be JSON text. It opens thoughts which it does not render.
    "deepseek_r1": _DEEPSEEK_V3_1._replace(
        file="deepseekv3", folder=None, refuses=_names("tools"), drops=_names("thoughts")
    ),
}


def tokenizer_of(name: str):
    """A tokenizer of bytes with a template; it puts BOS before a text where the template does.

    Skips the test if the template is trl's and trl is not installed.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    marks = TEMPLATES[name].marks
    text = template_text(name)
    ends = dict.fromkeys(word for word in marks[:3] if word)
    core = families.byte_tokenizer(
        text, families.Family("", (*ends, *marks.special), marks.added, str)
    ).backend_tokenizer
    if marks.bos and "bos_token" in text:
        core.post_processor = processors.TemplateProcessing(
            single=f"{marks.bos} $A", special_tokens=[(marks.bos, core.token_to_id(marks.bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=marks.bos,
        eos_token=marks.eos,
        pad_token=marks.pad,
        additional_special_tokens=list(marks.special),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = text
    return tokenizer


def template_text(name: str) -> str:
    """Text of a template; skips the test if it is trl's and trl is not installed."""
    form = TEMPLATES[name]
    folder = form.folder
    if folder is None:
        spec = importlib.util.find_spec("trl")
        if spec is None or not spec.submodule_search_locations:
            import pytest  # here, as programs that compare other libraries read this file too

            pytest.skip(f"trl is not installed, which has the template {form.file}: pip install trl")
        folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / f"{form.file}.jinja").read_text(encoding="utf-8")
