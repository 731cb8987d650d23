"""How eight families of models write, and their tokenizers' marks, in tokenizers of bytes.

templates/ has their chat templates, written after their documentation and shortened. They keep what matters to a
conversation of several turns: marks of turns, calls and results, where thoughts are kept, what is trimmed, and what is
refused. Real ones are read where trl is installed.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "templates"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def json_call(name, arguments, chance):
    """A call as Hermes and Qwen write it; seldom with other spaces than the template has."""
    separators = chance.choice([(", ", ": ")] * 4 + [(",", ":")])
    text = json.dumps({"name": name, "arguments": arguments}, separators=separators, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def chatml_reply(content, calls, thoughts, chance):
    texts = [json_call(*call, chance) for call in calls]
    return thought_of(thoughts) + "\n".join([content, *texts] if content else texts)


def thought_of(thoughts):
    return "" if thoughts is None else f"<think>\n{thoughts}\n</think>\n\n"


def xml_reply(content, calls, thoughts, chance):
    texts = []
    for name, arguments in calls:
        values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return thought_of(thoughts) + (content + "\n\n" if content and texts else content) + "\n".join(texts)


def opened_reply(content, calls, thoughts, chance):
    """As `xml_reply`, where the template has opened the thoughts."""
    return f"{thoughts or ''}\n</think>\n\n" + xml_reply(content, calls, None, chance)


def llama_reply(content, calls, thoughts, chance):
    if not calls:
        return content
    name, arguments = calls[0]
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def mistral_reply(content, calls, thoughts, chance):
    if not calls:
        return content
    ids = [f"{chance.randrange(10**9):09}" for _ in calls]
    named = [{"name": n, "arguments": a, "id": i} for (n, a), i in zip(calls, ids, strict=True)]
    return "[TOOL_CALLS]" + json.dumps(named, ensure_ascii=False)


def harmony_reply(content, calls, thoughts, chance):
    head = "" if thoughts is None else f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant"
    if not calls:
        return head + f"<|channel|>final<|message|>{content}"
    name, arguments = calls[0]
    text = json.dumps(arguments, ensure_ascii=False)
    if chance.random() < 0.5:
        return head + f" to=functions.{name}<|channel|>commentary json<|message|>{text}"
    return head + f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}"


def glm_reply(content, calls, thoughts, chance):
    text = f"\n<think>{thoughts or ''}</think>" + (f"\n{content}" if content else "")
    for name, arguments in calls:
        values = {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in arguments.items()}
        pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
        text += f"\n<tool_call>{name}\n{pairs}</tool_call>"
    return text


class Family(NamedTuple):
    """A family of models.

    Attributes:
      form: of its replies.
      special, added: tokens.
      reply: (content, calls, thoughts, chance) -> what it writes.
      ends: token that ends a reply, and one that ends a reply with calls.
    """

    form: str
    special: tuple[str, ...]
    added: tuple[str, ...]
    reply: Callable
    ends: tuple[str, str] = ("<|im_end|>", "<|im_end|>")


LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
HARMONY = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    "<|endoftext|>",
)
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FAMILIES = {
    "qwen2_5": Family("hermes", CHATML, TAGS[:2], chatml_reply),
    "qwen3": Family("hermes", CHATML, TAGS, chatml_reply),
    "qwen3_coder": Family("qwen_xml", CHATML, TAGS, xml_reply),
    "hermes_2_pro": Family("hermes", CHATML, TAGS[:2], chatml_reply),
    "llama_3_1": Family("llama_json", LLAMA, (), llama_reply, ("<|eot_id|>", "<|eot_id|>")),
    "mistral_v3": Family("mistral", MISTRAL, (), mistral_reply, ("</s>", "</s>")),
    "harmony": Family("harmony", HARMONY, (), harmony_reply, ("<|return|>", "<|call|>")),
    "glm_4_5": Family("glm", GLM, (*TAGS, *PAIRS), glm_reply, ("<|user|>", "<|observation|>")),
}
OPENED = Family("qwen_xml", CHATML, TAGS, opened_reply)
REAL = {  # files of trl, and the family that writes like this
    "qwen2_5": FAMILIES["qwen2_5"],
    "qwen3": FAMILIES["qwen3"],
    "qwen3_instruct_2507": FAMILIES["qwen2_5"],
    "qwen3_5_think": OPENED,
    "qwen3_8": OPENED,
    "llama3_1": FAMILIES["llama_3_1"],
    "gptoss": FAMILIES["harmony"],
    "glm4moe": FAMILIES["glm_4_5"],
}


def tokenizer_of(name):
    """A tokenizer of a family with its shortened template."""
    return byte_tokenizer((FOLDER / f"{name}.jinja").read_text(), FAMILIES[name])


def real_templates():
    """Texts of the chat templates that trl has, where it is installed."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        return {}
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return {name: (folder / f"{name}.jinja").read_text() for name in REAL if (folder / f"{name}.jinja").is_file()}


def byte_tokenizer(template, family):
    """A tokenizer of bytes, with the marks of a family."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("<", "|"), ("|", ">"), ("Ġ", "{"), ("Ċ", "Ċ")]
    words = [*letters, *("".join(pair) for pair in merges)]
    core = Tokenizer(BPE({word: i for i, word in enumerate(words)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in family.special])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in family.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.special[0],
        eos_token=family.special[1],
        additional_special_tokens=list(family.special[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer
