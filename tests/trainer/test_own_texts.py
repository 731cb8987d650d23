"""Completions in the tokens of other models: chats, steps, and the place of the policy's token that ends a step."""

import dataclasses
import json
import re

import pytest
import torch
from small_runs import SIZES, assert_same, begin, run_steps, scored_batch, small_job
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.data.prompt_format import PLAIN_PROMPTS
from funrl.data.prompts import Example
from funrl.data.supervised import text_batch, text_example
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import Inputs, decoder_model, place, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.rewards.call import RewardError
from funrl.tasks import arithmetic
from funrl.trainer.settings.settings import SettingsError
from funrl.trainer.sources.own_texts import (
    SolutionStep,
    WrittenRow,
    reads_tokens,
    steps_of,
    text_after,
    token_texts,
    whole_tokens,
)

DECODER = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"layers": 1}))
OTHER = arithmetic.ALPHABET[::-1]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
PIECES = [b"ab", b".\n", b"\n", b"c \xc3", b"\xa9\n", b" \n", b"d", b"x"]


def decode(ids):
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize(
    "separator, steps",
    [
        ("\n\n", [SolutionStep("ab.", 2), SolutionStep("c \xe9\n \nd", 6)]),
        ("\n", [SolutionStep("ab.", 1), SolutionStep("c \xe9", 4), SolutionStep("d", 6)]),
        (" \n", [SolutionStep("ab.\n\nc \xe9\n", 5), SolutionStep("d", 6)]),
        ("", list(map(SolutionStep, ("ab", ".\n", "\n", "\xe9\n", " \n", "d"), (0, 1, 2, 4, 5, 6)))),
    ],
)
def test_steps_end_with_the_token_that_completes_their_separator(separator, steps):
    written = WrittenRow(Example([7], "x", {}), list(range(7)), True)
    result = steps_of(written, separator, decode)
    if not separator:  # what a token adds of a character that it does not complete is the next one's
        result = [step._replace(text=step.text.removeprefix("c ")) for step in result]
    assert result == steps
    assert steps_of(written._replace(tokens=[]), separator, decode) == []


def test_characters_of_bytes_side_by_side_are_read_by_a_decoder_of_runs():
    """Which reads each byte of a run as U+FFFD where the run as a whole is no text, as those of Llama 2 do."""
    tokenizer = Tokenizer(BPE({f"<0x{n:02X}>": n for n in range(256)} | {"a": 256}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    first, second = ([*text.encode()] for text in ("\u4e2d", "\U0001f600"))
    tokens = [*first, *second, 256]
    assert list(token_texts(tokens, first[-1], tokenizer.decode)) == ["", "", "\u4e2d", "", "", "", "\U0001f600", "a"]
    assert text_after(tokenizer.decode(first[-1:]), first[-1], tokens, tokenizer.decode) == "\u4e2d\U0001f600a"
    assert list(token_texts([0xFF] * 5 + [256, 0xFF], 256, tokenizer.decode)) == [
        "",
        "",
        "",
        "",
        "",
        "\ufffd" * 5 + "a",
        "\ufffd",
    ]


def test_a_chat_goes_through_the_models_own_template():
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;! ")
    chat = Example([3], "anything", {}, messages=[{"role": "user", "content": "hi"}])
    plain = Example([3], "ab", {})
    other = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;! ")
    assert reads_tokens(tokenizer, other, [chat, plain])
    tokenizer.chat_template = TEMPLATE
    assert not reads_tokens(tokenizer, other, [chat]) and reads_tokens(tokenizer, other, [plain])
    assert tokenizer.decode(whole_tokens(WrittenRow(chat, [1], True), "ho", tokenizer)) == "u:hi;a:ho;"
    begun = chat._replace(messages=[*(chat.messages or ()), {"role": "assistant", "content": "h"}])
    assert tokenizer.decode(whole_tokens(WrittenRow(begun, [1], True), "o", tokenizer)) == "u:hi;a:ho;"
    for finished, end in ((True, "</s>"), (False, "")):
        assert tokenizer.decode(whole_tokens(WrittenRow(plain, [1], finished), "ho", tokenizer)) == "abho" + end


def valued(labels=1, seed=3):
    """A model with a value head and random weights."""
    model = with_value_head(DECODER, labels, labels > 1)
    generator = torch.Generator().manual_seed(seed)
    params = model.init(generator, torch.float64)
    heads = {name: x for name, x in params.items() if name != "decoder"}
    return model, params | {
        name: torch.randn(x.shape, generator=generator, dtype=torch.float64) / 2 for name, x in heads.items()
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models that score: with the policy's tokenizer, and the same reward model with another one."""
    root, tokenizer, other = tmp_path_factory.mktemp("models"), arithmetic.tokenizer(), character_tokenizer(OTHER)
    model, params = valued()
    hf.save(root / "reward", model, params, tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(other.convert_ids_to_tokens(i)) for i in range(DECODER.config.vocab)]
    decoder = params["decoder"]
    hf.save(root / "other", model, {**params, "decoder": {**decoder, "embed": decoder["embed"][ids]}}, other)
    hf.save(root / "steps", *valued(labels=2), tokenizer)
    hf.save(root / "judge", DECODER, DECODER.init(torch.Generator().manual_seed(5)), tokenizer)
    (root / "template.txt").write_text("{{prompt}}{{ completion }}")
    return root


def with_judge(folders, **more):
    flags = {"judge": f"{folders}/judge", "judge_template": f"{folders}/template.txt", "judge_pattern": "[2-7]"}
    return flags | {"judge_max_new_tokens": 8} | more


def scored(recipe, **settings):
    run, state = begin(small_job(recipe, **settings), single())
    rows, _, metrics = scored_batch(run, state)
    return run, rows.batch, metrics


def test_a_reward_model_of_another_tokenizer_reads_the_same_texts(folders):
    _, batch, _ = scored(grpo, reward_model=f"{folders}/reward", batch_prompts=8)
    _, other, _ = scored(grpo, reward_model=f"{folders}/other@-2", batch_prompts=8)
    plain = (batch.tokens * batch.mask != 0).sum(1) == batch.mask.sum(1)  # no padding token was sampled: it has no text
    assert plain.sum() > 8 and batch.scores[:, 1].std() > 0.1
    torch.testing.assert_close(other.scores[plain, 1], batch.scores[plain, 1], rtol=0, atol=1e-12)
    torch.testing.assert_close(other.score, other.scores @ torch.tensor([1.0, -2.0], dtype=torch.float64))


def test_every_step_is_a_reward_of_the_token_that_ends_it(folders):
    run, batch, metrics = scored(ppo, process_reward_model=f"{folders}/steps@0.5", batch_prompts=8)
    model, params = hf.load(folders / "steps", torch.float64)
    means = []
    for tokens, mask, given in zip(batch.tokens, batch.mask, batch.token_reward, strict=True):
        at = [t for t in mask.nonzero().flatten().tolist() if tokens[t] > 1]  # the tokens that have a text
        text = [*tokens[~mask][: int(mask.nonzero()[0])].tolist(), *tokens[at].tolist()]
        value = model.value(params, model.apply(params, Inputs(torch.tensor([text]))).hidden)[0, -len(at) :]
        wanted = torch.zeros_like(given)
        wanted[at] = 0.5 * value.sigmoid()[: len(at)]
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)
        means.append(value.sigmoid().mean() if at else torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(batch.scores[:, 1], torch.stack(means), rtol=0, atol=1e-12)
    assert torch.equal(batch.score, batch.scores[:, 0]) and batch.token_reward.std() > 0.01
    assert "score_process_reward_model" in run.clock.seconds and metrics["critic/returns/mean"] != 0
    _, least, _ = scored(grpo, process_reward_model=f"{folders}/steps@0.5", batch_prompts=8)
    assert "token_reward" not in least.names() and (least.scores[:, 1] <= batch.scores[:, 1] + 1e-12).all()
    torch.testing.assert_close(least.score, least.scores @ torch.tensor([1.0, 0.5], dtype=torch.float64))
    _, last, _ = scored(grpo, process_reward_model=f"{folders}/steps", process_reward="last", batch_prompts=8)
    assert (last.scores[:, 1] >= least.scores[:, 1]).all() and (last.scores[:, 1] > least.scores[:, 1]).any()


def test_rewards_of_steps_are_explained_as_rewards_of_tokens(folders):
    flags = {"process_reward_model": f"{folders}/steps@0.5", "explain_every": 1}
    for recipe, weights, given in (
        (ppo, [1.0, None], {}),
        (ppo, [1.0, 0.5], {"process_reward": "min"}),
        (grpo, [1.0, 0.5], {}),
    ):
        run, batch, _ = scored(recipe, **flags, **given)
        assert run.explainer.weights == weights and list(run.explainer.parts)[1] == "process_reward_model"
        assert batch.reward_parts[..., 1].std() > 1e-3


def test_a_separator_of_ones_own(folders):
    """The steps of a completion, with the separator behind each, are what the model reads."""
    _, batch, _ = scored(ppo, process_reward_model=f"{folders}/steps", step_separator="1", batch_prompts=8)
    model, params = hf.load(folders / "steps", torch.float64)
    tokenizer, several = arithmetic.tokenizer(), 0
    for tokens, mask, given in zip(batch.tokens, batch.mask, batch.token_reward, strict=True):
        prompt, results = tokens[: int(mask.nonzero()[0])].tolist(), [t for t in tokens[mask].tolist() if t > 1]
        steps = [step for step in tokenizer.decode(results).split("1") if step]
        several += len(steps) > 1
        wanted, text = [], prompt
        for step in steps:
            text = [*text, *tokenizer.encode(step + "1")]
            wanted.append(
                model.value(params, model.apply(params, Inputs(torch.tensor([text]))).hidden)[0, -1].sigmoid()
            )
        assert sorted(given[given != 0].tolist()) == pytest.approx(sorted(float(x) for x in wanted), abs=1e-12)
    assert several


def test_a_judge_reads_the_completion_and_its_verdict_is_the_score(folders):
    run, batch, _ = scored(grpo, **with_judge(folders, reward_weights="1,0.25"), batch_prompts=8)
    model, params = hf.load(folders / "judge", torch.float64)
    read = 0
    for tokens, mask, score in zip(batch.tokens, batch.mask, batch.scores[:, 1], strict=True):
        end = int(mask.nonzero().max()) + 1
        text = [t for t in tokens[:end].tolist() if t > 1]
        verdict = []
        while len(verdict) < 8 and (not verdict or verdict[-1] != 1):
            hidden = model.apply(params, Inputs(torch.tensor([[*text, *verdict]]))).hidden[0, -1]
            verdict.append(int((model.unembed(params) @ hidden).argmax()))
        matches = re.findall("[2-7]", arithmetic.tokenizer().decode(verdict))
        assert (score == float(matches[-1])) if matches else score.isnan()
        read += bool(matches)
    assert read > 0 and batch.scores[:, 1].nan_to_num(0).unique().numel() > 1
    torch.testing.assert_close(batch.score, batch.scores[:, 0] + 0.25 * batch.scores[:, 1].nan_to_num(0))
    assert "score_judge" in run.clock.seconds


@pytest.mark.gloo
@pytest.mark.slow
def test_models_that_score_give_the_same_on_a_mesh(folders):
    settings = with_judge(folders) | {
        "compose": ppo,
        "reward_model": f"{folders}/other",
        "process_reward_model": f"{folders}/steps",
        "token_budget": 64,
        "reward_weights": "1,1,0.5,0.1",
    }
    steps = run_steps(1, **settings)
    assert steps["batches"][0].scores.shape == (8, 4)
    assert_same(run_steps(1, mesh="dp2", fsdp=True, **settings), steps, 1e-9)


def test_a_text_that_is_too_long_for_a_model_ends_the_run(folders, tmp_path):
    short = decoder_model(dataclasses.replace(DECODER.config, max_positions=10))
    model = with_value_head(short)
    hf.save(tmp_path / "reward", model, model.init(torch.Generator().manual_seed(1)), character_tokenizer(OTHER))
    with pytest.raises(RewardError, match=r"the reward model reads .* as 1\d tokens, but it has 10 positions"):
        scored(grpo, reward_model=str(tmp_path / "reward"))
    hf.save(tmp_path / "judge", short, short.init(torch.Generator().manual_seed(1)), arithmetic.tokenizer())
    with pytest.raises(RewardError, match=r"the judge reads \d+ tokens .* and may write 8, but it has 10 positions"):
        scored(grpo, **with_judge(folders, judge=str(tmp_path / "judge")))


def test_what_cannot_be_judged_or_read_is_refused(folders, tmp_path):
    prompts = tmp_path / "chats.jsonl"
    prompts.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    (tmp_path / "odd.txt").write_text("{{completion}} {{gold}}")
    (tmp_path / "none.txt").write_text("{{prompt}}")
    for settings, item in (
        (
            with_judge(folders, judge_template=f"{tmp_path}/odd.txt"),
            r"odd.txt: there is no field 'gold' for {{gold}}; .*",
        ),
        (with_judge(folders, judge_template=f"{tmp_path}/none.txt"), "it has no {{completion}}"),
        (with_judge(folders, judge_template=f"{tmp_path}/not.txt"), "not.txt: it cannot be read"),
        (with_judge(folders, judge_pattern="("), r"--judge_pattern=\(: '\(' is not a regular expression: missing \)"),
        (with_judge(folders, judge=f"{folders}/reward"), "it has a value head and cannot write"),
        (with_judge(folders, judge_max_new_tokens=64), "--judge_max_new_tokens=64: the judge has 64 positions"),
        ({"process_reward_model": f"{folders}/steps", "process_reward": "each"}, "reads no rewards of tokens"),
        ({"step_separator": "x"}, "--step_separator=x does nothing without --process_reward_model"),
        ({"reward_model": f"{folders}/reward@0.5", "reward_weights": "1,1"}, "reward@0.5 gives weights too; give them"),
    ):
        with pytest.raises(SettingsError, match=item):
            small_job(grpo, **settings)


def test_a_trained_process_model_opens_as_a_token_classifier(tmp_path):
    from transformers import AutoModelForTokenClassification

    model, params = valued(labels=2)
    hf.save(tmp_path, model, params, arithmetic.tokenizer())
    peer = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float64)
    assert peer.config.id2label == {0: "wrong", 1: "right"}
    record = {"prompt": "12+3=", "completions": ["5", "11"], "labels": [True, False]}
    first = text_example(record, "steps", arithmetic.tokenizer(), PLAIN_PROMPTS._replace(step_separator="="))
    batch = text_batch([first], 0, reader=True, steps=True)
    value = place(model, dtype=torch.float64).values(params, batch)
    with torch.no_grad():
        logits = peer(torch.tensor([first.texts[0].tokens])).logits[0]
    ends = torch.tensor(first.texts[0].trained)
    torch.testing.assert_close(value[batch.mask], (logits[:, 1] - logits[:, 0])[ends], rtol=0, atol=1e-6)
    assert arithmetic.tokenizer().decode(batch.tokens[0][:10]) == "12+3=5=11="
    assert batch.label[batch.mask].tolist() == [1.0, 0.0]
