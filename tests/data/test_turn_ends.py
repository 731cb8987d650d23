"""Marks that end a turn, by template, and a run that stops at them."""

import pytest
from chat_templates import TEMPLATES, tokenizer_of

from funrl.data.conversations import ChatTemplate
from funrl.models import decoder_config, decoder_model
from funrl.trainer.jobs.prepare import with_turn_ends


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_mark_of_the_next_turn_ends_a_reply_where_the_template_has_no_other(name):
    tokenizer = tokenizer_of(name)
    marks = ChatTemplate(tokenizer).next_marks()
    assert marks == ({"user": "<|user|>", "tool": "<|observation|>"} if name.startswith("glm") else {})
    closing, end = ChatTemplate(tokenizer).closing()
    assert bool(end) != bool(marks) and closing is not None and closing.startswith(end)
    assert not end or end in TEMPLATES[name].ends


@pytest.mark.parametrize("name", ["glm_4_5_full", "qwen3_full"])
def test_a_run_stops_at_marks_of_the_next_turn(name):
    tokenizer = tokenizer_of(name)
    sizes = {"embed": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head": 8, "mlp": 16, "max_positions": 64}
    model = decoder_model(decoder_config(vocab=len(tokenizer), **sizes))
    before = model.config.special_tokens.eos
    ends = ["<|user|>", "<|observation|>"] if name.startswith("glm") else []
    added = with_turn_ends(model, tokenizer).config.special_tokens.eos
    assert added == (*before, *map(tokenizer.convert_tokens_to_ids, ends))
    tokenizer.chat_template = None
    assert with_turn_ends(model, tokenizer) is model
