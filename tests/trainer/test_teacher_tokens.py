"""Teachers with tokenizers of their own, beside loops over tokens and spans, on several meshes."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from selection import quick
from small_runs import SIZES, assert_same, begin, gradients, run_steps, scored_batch, small_job
from test_placement_runs import assert_same_runs, run
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.iw_opd import iw_opd
from funrl.algos.recipes.mopd import mopd
from funrl.algos.recipes.sdpo import sdpo
from funrl.batch import Batch
from funrl.data.prompts import Example
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.rewards.call import RewardError
from funrl.tasks.embedded import embedded_task
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources.teacher_tokens import TeacherReader, TeacherTokens

FUNCTIONS = Path(__file__).with_name("functions_of_flags.py")
ALPHABET = "0123456789+-*="
MERGES = [(a, b) for a in ALPHABET for b in "02468+"]


def merging_tokenizer(alphabet=ALPHABET, merges=MERGES, eos: str | None = "<end>"):
    """Tokens of one or two characters."""
    pairs = [a + b for a, b in merges]
    words = [*([] if eos is None else [eos]), *alphabet, *pairs]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, clean_up_tokenization_spaces=False)


def byte_tokenizer(words=("th", "e ", "the ", "\u00c3\u00a9")):
    """Tokens of bytes and of some runs of bytes, as GPT-2 has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in words:
        letters = word.replace(" ", "\u0120")
        merges += [(letters[:n], letters[n]) for n in range(1, len(letters)) if (letters[:n], letters[n]) not in merges]
    vocabulary = {"<end>": 0} | {letter: 1 + n for n, letter in enumerate(alphabet)}
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False)


def save_teacher(folder, tokenizer, seed=1, **sizes):
    config = with_fields(embedded_task("arithmetic").model_config(1), **{**SIZES, "layers": 1, **sizes})
    config = with_fields(config, vocab=len(tokenizer) + 8 - len(tokenizer) % 8, eos=(tokenizer.eos_token_id or 0,))
    model = decoder_model(config)
    hf.save(folder, model, model.init(torch.Generator().manual_seed(seed), torch.float64), tokenizer)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("own") / "teacher", merging_tokenizer())


def teacher_sums(run, batch, row, name="teacher"):
    """Place of a span's last token -> (places of its tokens, the teacher's log-probability), by cuts of the text."""
    job = run.job
    own, other = job.tokenizer, job.tokenizers[name]
    here = batch.mask[row].nonzero()[:, 0].tolist()
    ids = batch.tokens[row].tolist()
    prompt = own.decode(ids[: here[0]])
    stopped = ids[here[-1]] == own.eos_token_id
    written = [t for t in here if ids[t] not in own.all_special_ids]
    first = other.encode(prompt)
    read = other.encode("".join(own.decode([ids[t]]) for t in written))
    whole = torch.tensor([[*first, *read, *[other.eos_token_id] * stopped]])
    alone = Batch(tokens=whole, mask=torch.arange(whole.shape[1])[None] >= len(first))
    role = run.parts.roles[name]
    logp = role.placed.token_scores(run.frozen[name], alone).read("logp")[0, len(first) :].tolist()
    sums = {}
    at = used = 0
    for end in range(1, len(written) + 1):
        text = "".join(own.decode([ids[t]]) for t in written[:end])
        for count in range(used + 1, len(read) + 1):
            if "".join(other.decode([token]) for token in read[:count]) == text:
                sums[written[end - 1]] = (written[at:end], math.fsum(logp[used:count]))
                at, used = end, count
                break
    assert used == len(read)
    if stopped:
        sums[here[-1]] = ([here[-1]], logp[-1])
    return sums


def test_the_advantage_of_a_span_is_that_of_a_loop(teacher):
    run, state = begin(small_job(distillation, teacher=teacher, max_new_tokens=9), single())
    rows, _, _ = scored_batch(run, state)
    batch = rows.batch
    several = 0
    for row in range(len(batch.tokens)):
        expected = torch.zeros_like(batch.advantage[row])
        for end, (places, teacher_sum) in teacher_sums(run, batch, row).items():
            assert batch.teacher_span[row, places].tolist() == [end] * len(places)
            assert batch.teacher_logp[row, end].item() == pytest.approx(teacher_sum, abs=1e-10)
            expected[places] = teacher_sum - math.fsum(batch.old_logp[row, places].tolist())
            several += len(places) > 1
        assert torch.allclose(batch.advantage[row], expected, atol=1e-9, rtol=0)
    assert several > 5


def test_the_gradient_is_that_of_spans_as_actions(teacher):
    """Of -mean over tokens of A(span) log pi(span), each span once."""
    run, state = begin(small_job(distillation, teacher=teacher, max_new_tokens=9), single())
    rows, _, _ = scored_batch(run, state)
    batch = rows.batch
    loss = gradients(run, state, rows)["policy"].loss
    total = 0.0
    for row in range(len(batch.tokens)):
        for places, teacher_sum in teacher_sums(run, batch, row).values():
            total -= (teacher_sum - math.fsum(batch.old_logp[row, places].tolist())) * len(places)  # ratios are 1
    assert float(loss) == pytest.approx(total / int(batch.mask.sum()), abs=1e-9)


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,sp2", "dp2,tp2"], ["dp2,tp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh, teacher):
    given = {"compose": distillation, "teacher": teacher, "max_new_tokens": 7}
    assert_same(run_steps(2, **given), run_steps(2, mesh=mesh, **given), 1e-9)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_teacher_on_ranks_of_its_own_writes_the_same(teacher):
    given = {"teacher": teacher, "max_new_tokens": 7}
    assert_same_runs(run(distillation, place="generate:1 teacher:1", **given), run(distillation, **given), 1e-9)


@pytest.mark.parametrize("compose", [mopd, sdpo, iw_opd, functools.partial(distillation, kind="k3")])
def test_every_recipe_of_a_teachers_advantage_has_spans(compose, teacher):
    run, state = begin(small_job(compose, teacher=teacher), single())
    rows, _, _ = scored_batch(run, state)
    assert rows.batch.advantage.isfinite().all() and rows.batch.advantage.any()


def test_teachers_of_sources_may_have_different_tokenizers(teacher, tmp_path):
    records = [{"prompt": f"{n}+{n % 7}=", "data_source": "hard" if n % 3 else "easy"} for n in range(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    same = save_teacher(tmp_path / "same", embedded_task("arithmetic").tokenizer(), seed=2)
    given = {"prompts": str(tmp_path / "prompts.jsonl"), "reward": f"{FUNCTIONS}:digits", "batch_prompts": 6}
    job = small_job(mopd, eval_prompts=2, teacher=f"{same}@easy,{teacher}@hard", **given)
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    batch = rows.batch
    for row in range(len(batch.tokens)):
        places = batch.mask[row].nonzero()[:, 0]
        if batch.data_source[row] == 0:
            assert torch.equal(batch.teacher_span[row, places], places)
            assert (batch.teacher_logp[row, places] < 0).all()
        else:
            sums = teacher_sums(run, batch, row, "teacher_hard")
            for end, (_, teacher_sum) in sums.items():
                assert batch.teacher_logp[row, end].item() == pytest.approx(teacher_sum, abs=1e-10)


@pytest.mark.parametrize(("own", "other"), [("byte", "pairs"), ("byte", "byte"), ("pairs", "byte")])
def test_texts_of_byte_tokens(own, other):
    """Also of characters whose bytes are in several tokens."""
    made = {
        "byte": byte_tokenizer(),
        "pairs": merging_tokenizer("the \u00e9q!", [("t", "h"), ("th", "e"), (" ", "\u00e9")]),
    }
    mine, theirs = made[own], byte_tokenizer(("he", " \u00c3")) if other == "byte" else made[other]
    reader = TeacherReader("teacher", theirs, 64)
    read = TeacherTokens(lambda example: reader, mine, lambda example: (), {})
    prompt = "the "
    example = Example(mine.encode(prompt), prompt, {}, source="p.jsonl, line 1")
    text = "q the \u00e9!the"
    row = read.row(example, mine.encode(text), stopped=True)
    begin = len(example.tokens)
    assert theirs.decode(row.ids[: len(row.ids) - 1]) == prompt + text and row.ids[-1] == theirs.eos_token_id
    assert row.places[-1] == row.spans[-1] == begin + len(mine.encode(text))
    ends = sorted({place for place in row.places if place >= 0})[:-1]
    own_text, other_text = "", ""
    for end in ends:
        own_text = mine.decode(mine.encode(text)[: end - begin + 1])
        other_text = theirs.decode([i for i, p in zip(row.ids, row.places, strict=True) if 0 <= p <= end])
        assert own_text == other_text
    assert own_text == text
    assert all(spans in (-1, *ends, row.spans[-1]) for spans in row.spans[begin:])


def test_special_tokens_and_unfinished_characters_are_in_no_span():
    mine, theirs = byte_tokenizer(), byte_tokenizer(("he",))
    read = TeacherTokens(lambda example: TeacherReader("teacher", theirs, 64), mine, lambda example: (), {})
    example = Example(mine.encode("q"), "q", {})
    accent = mine.convert_tokens_to_ids(["\u00c3"])  # the first of two bytes
    completion = [*mine.encode("the "), mine.eos_token_id, *mine.encode("q"), *accent]
    row = read.row(example, completion, stopped=False)
    assert row.spans == [0, 2, 2, -1, 4, -1]  # th|e  and t|he|  end together
    assert theirs.decode(row.ids) == "qthe q"


def test_a_text_that_the_teacher_changes_ends_the_run():
    theirs = merging_tokenizer("the q!", [])
    theirs.backend_tokenizer.normalizer = normalizers.Replace(Regex("q"), "t")
    mine = byte_tokenizer()
    read = TeacherTokens(lambda example: TeacherReader("teacher", theirs, 9), mine, lambda example: (), {})
    example = Example(mine.encode("t"), "t", {}, source="p.jsonl, line 3")
    with pytest.raises(RewardError, match=r"p.jsonl, line 3: the teacher's tokenizer: ValueError: 'q' reads 't'"):
        read.row(example, mine.encode("q"), stopped=True)
    with pytest.raises(RewardError, match="12 tokens of a prompt and its completion, and it has 9 positions"):
        read.row(example, mine.encode("the the he"), stopped=True)


@pytest.mark.parametrize(
    ("recipe", "given", "text"),
    [
        (functools.partial(distillation, kind="forward"), {}, "reads the teacher's tokens one by one"),
        (functools.partial(distillation, direct=True), {}, "reads the teacher's tokens one by one"),
        (gkd, {}, "the teacher's tokens one by one|vocabulary has"),
        (distillation, {"env": "calculator"}, "run in an environment"),
        (distillation, {"teacher_context": "answer"}, "--teacher_context, whose prompts"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(recipe, given, text, teacher):
    with pytest.raises((SettingsError, ValueError), match=text):
        small_job(recipe, teacher=teacher, **given)


def test_teachers_whose_tokenizers_lack_something_are_refused(tmp_path):
    changing = merging_tokenizer()
    changing.backend_tokenizer.normalizer = normalizers.Replace(Regex("7"), "2")
    for name, tokenizer, text in (
        ("changing", changing, "reads .* as .*, so spans of both cannot be compared"),
        ("endless", merging_tokenizer(eos=None), "no end-of-text token"),
    ):
        with pytest.raises(SettingsError, match=text):
            small_job(distillation, teacher=save_teacher(tmp_path / name, tokenizer))
