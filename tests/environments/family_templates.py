"""Chat templates of eight families, written after their documentation and shortened, and how each family writes.

They keep what matters to a conversation of several turns: marks of turns, calls and results, where thoughts are kept,
what is trimmed, and what is refused. Real ones are read where trl is installed.
"""

import importlib.util
import json
from pathlib import Path

TOOLS_HEAD = (
    "{% if tools %}{{ '" + "<|im_start|>system\n# Tools' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}"
)
SYSTEM_OF_CHATML = (
    TOOLS_HEAD + "{% if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% endif %}"
)
TOOL_OF_CHATML = (
    "{% elif m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}"
    "{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
USER_OF_CHATML = "{% if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
JSON_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + '
    "'}\n</tool_call>' }}{% endfor %}"
)
OPENING_OF_CHATML = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
LAST_QUESTION = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
SPLIT_THOUGHTS = (
    "{% set t = '' %}{% set content = m.content %}{% if m.reasoning_content is string %}{% set t = m.reasoning_content %}"
    "{% elif '</think>' in content %}{% set t = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)

QWEN2_5 = (
    SYSTEM_OF_CHATML + "{% for m in messages %}" + USER_OF_CHATML + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + m.content }}" + JSON_CALLS + "{{ '<|im_end|>\n' }}" + TOOL_OF_CHATML
    + "{% endif %}{% endfor %}" + OPENING_OF_CHATML
)  # fmt: skip
QWEN3 = (
    SYSTEM_OF_CHATML + LAST_QUESTION + "{% for m in messages %}" + USER_OF_CHATML + "{% elif m.role == 'assistant' %}"
    + SPLIT_THOUGHTS + "{{ '<|im_start|>assistant\n' }}{% if loop.index0 > ns.last and (loop.last or t) %}"
    "{{ '<think>\n' + t.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{% else %}{{ content }}{% endif %}"
    + JSON_CALLS.replace("m.content", "content") + "{{ '<|im_end|>\n' }}" + TOOL_OF_CHATML + "{% endif %}{% endfor %}"
    + OPENING_OF_CHATML
)  # fmt: skip
QWEN3_CODER = (
    SYSTEM_OF_CHATML + "{% for m in messages %}" + USER_OF_CHATML + "{% elif m.role == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + (m.content | trim) }}{% for c in m.tool_calls or [] %}"
    "{{ '\n\n' if loop.first and m.content | trim else ('' if loop.first else '\n') }}"
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}{% for k, v in c.function.arguments | items %}"
    "{{ '<parameter=' + k + '>\n' + (v if v is string else (v | tojson)) + '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}" + TOOL_OF_CHATML + "{% endif %}{% endfor %}"
    + OPENING_OF_CHATML
)  # fmt: skip
HERMES_2_PRO = (
    SYSTEM_OF_CHATML + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + m.content }}"
    + JSON_CALLS + "{{ '<|im_end|>\n' }}{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + OPENING_OF_CHATML
)  # fmt: skip
LLAMA_3_1 = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\n\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('single calls') }}"
    "{% endif %}{% set c = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + (c.arguments | tojson) + '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{% if loop.first and tools %}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{{ (m.content | trim) + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_V3 = (
    "{{ bos_token }}" + LAST_QUESTION + "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + (m.content | tojson) + ', \"call_id\": \"' + m.tool_call_id + '\"}[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    '{{ \'{"name": "\' + c.function.name + \'", "arguments": \' + (c.function.arguments | tojson) + \', "id": "\' + c.id '
    "+ '\"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
HARMONY = (
    "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}{% if tools %}{{ '<|start|>developer<|message|># Tools\n' }}"
    "{% for t in tools %}{{ t.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endif %}{% set ns = namespace(name='') %}"
    "{% for m in messages %}{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set later = namespace(final=false) %}"
    "{% for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}{% set later.final = true %}"
    "{% endif %}{% endfor %}{% if (m.thinking or m.content) and not later.final %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' + (c.arguments | tojson) "
    "+ '<|call|>' }}{% set ns.name = c.name %}{% elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}{% elif m.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% elif m.role == 'tool' %}"
    "{% if not ns.name %}{{ raise_exception('no call') }}{% endif %}{{ '<|start|>functions.' + ns.name + "
    "' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) + '<|end|>' }}{% elif m.role == 'user' %}"
    "{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
GLM_4_5 = (
    "[gMASK]<sop>{% if tools %}{{ '<|system|>\n# Tools' }}{% for t in tools %}{{ '\n' + (t | tojson) }}{% endfor %}{% endif %}"
    + LAST_QUESTION + "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'assistant' %}" + SPLIT_THOUGHTS + "{{ '<|assistant|>' }}"
    "{{ '\n<think>' + (t.strip() if loop.index0 > ns.last else '') + '</think>' }}"
    "{% if content.strip() %}{{ '\n' + content.strip() }}{% endif %}{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>' + c.function.name + '\n' }}{% for k, v in c.function.arguments | items %}"
    "{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' + (v if v is string else (v | tojson)) + '</arg_value>\n' }}{% endfor %}"
    "{{ '</tool_call>' }}{% endfor %}{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)  # fmt: skip

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


# template, form of replies, special tokens, further added tokens, how it writes, (end of a reply, end of one with calls)
IM_END = ("<|im_end|>", "<|im_end|>")
FAMILIES = {
    "qwen2_5": (QWEN2_5, "hermes", CHATML, TAGS[:2], chatml_reply, IM_END),
    "qwen3": (QWEN3, "hermes", CHATML, TAGS, chatml_reply, IM_END),
    "qwen3_coder": (QWEN3_CODER, "qwen_xml", CHATML, TAGS, xml_reply, IM_END),
    "hermes_2_pro": (HERMES_2_PRO, "hermes", CHATML, TAGS[:2], chatml_reply, IM_END),
    "llama_3_1": (
        LLAMA_3_1,
        "llama_json",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        (),
        llama_reply,
        ("<|eot_id|>", "<|eot_id|>"),
    ),
    "mistral_v3": (
        MISTRAL_V3,
        "mistral",
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        (),
        mistral_reply,
        ("</s>", "</s>"),
    ),
    "harmony": (
        HARMONY,
        "harmony",
        (
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "<|endoftext|>",
        ),
        (),
        harmony_reply,
        ("<|return|>", "<|call|>"),
    ),
    "glm_4_5": (
        GLM_4_5,
        "glm",
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
        (*TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        glm_reply,
        ("<|user|>", "<|observation|>"),
    ),
}
OPENED = ("", "qwen_xml", CHATML, TAGS, opened_reply, IM_END)
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


def real_templates():
    """Texts of the chat templates that trl has, where it is installed."""
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {name: (folder / f"{name}.jinja").read_text() for name in REAL if (folder / f"{name}.jinja").is_file()}


def byte_tokenizer(template, special, added):
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
    core.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=special[0],
        eos_token=special[1],
        additional_special_tokens=list(special[2:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer
