"""The dry run of a step against steps that compute, and against closed forms."""

import dataclasses
import functools

import numpy as np
import pytest
from dry_jobs import CPU, H100, plain, settings, small, write_config
from selection import quick

from funrl import trees
from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost.dry_run import left_out
from funrl.cost.tracing.estimate import at_rows, pretended, traced_layers, tracer_of
from funrl.data.packing import pack, packed_sizes
from funrl.mesh.mesh import peers, single
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.tasks import arithmetic
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import compute_dtype
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import scoring_budget, with_flags
from funrl.trainer.steps.micro import SCORE_PARTS

RECIPES = (  # of those whose fields are computed in different ways
    "ppo",
    "grpo",
    "dapo",
    "remax",
    "prime",
    "otb",
    "distillation",
    "gkd",
    "dpo",
    "online_dpo",
    "kto",
    "process_reward_model",
    "m2po",
    "eaft",
    "asft",
    "chord",
)
QUICK = ("ppo", "gkd", "dpo")
TAUGHT = ("distillation", "gkd")


def trace(job, tokens, rows, real=False):
    parts = build(job, single(), lambda _: None)
    return dry_run.trace_step(job, parts, dry_run.full_rows(job, parts, tokens, rows), tracer_of(job, parts, CPU, real))


def assert_alike(result, exact, flops=1e-6):
    assert set(result) == set(exact)
    for name, costs in exact.items():
        assert result[name].total == pytest.approx(costs.total, rel=0.1), name
        assert result[name].flops == pytest.approx(costs.flops, rel=flops), name


def params(job, role):
    return trees.count(job.models[role].shapes)


@pytest.mark.parametrize("name", quick(RECIPES, QUICK))
def test_the_pretended_step_of_every_recipe_holds_what_the_real_one_holds(name, tmp_path):
    config = write_config(tmp_path, vocab_size=300)
    job = small(name, **({"model": config, "teacher": config} if name in TAUGHT else {}))
    flops = 1e-6
    if name == "m2po":  # which tokens it rejects is not known before the run: the pretended step learns from all
        job, flops = dataclasses.replace(job, algorithm=recipe(name)(second_moment=1e6)), 0.1
    fake, real = (trace(job, 8, 8, real) for real in (False, True))
    assert_alike(fake.phases, real.phases, flops)
    assert fake.resting == real.resting and fake.row_bytes == real.row_bytes
    assert {f"update_{role}" for role in job.algorithm.losses} <= set(fake.phases)


def test_so_are_the_likely_tokens_of_a_teacher(tmp_path):
    config = write_config(tmp_path, vocab_size=300)
    few, many = (
        small("distillation", {"kind": "forward"}, model=config, teacher=config, teacher_top_k=k) for k in (8, 32)
    )
    fake, real = (trace(few, 8, 8, real) for real in (False, True))
    assert_alike(fake.phases, real.phases)
    assert fake.row_bytes == real.row_bytes < trace(many, 8, 8).row_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, given",
    [
        ("ppo", {"remat": "full", "optimizer": "muon"}),
        pytest.param("ppo", {"lora_rank": 4, "token_budget": 4096}, marks=pytest.mark.slow),
        ("grpo", {"task": "arithmetic_moe", "router_aux_coef": 0.1, "router_replay": True, "minibatches": 4}),
    ],
)
def test_so_it_does_whatever_the_flags(name, given):
    job = small(name, **given)
    fake, real = (trace(job, 8, 16, real) for real in (False, True))
    assert_alike(fake.phases, real.phases)
    assert fake.resting == real.resting


SWITCHES = {
    "gemma2": {
        "norms": "sandwich",
        "norm_offset": 1.0,
        "activation": "gelu",
        "attention_cap": 5.0,
        "logit_cap": 3.0,
        "embed_scale": 6.0,
        "attention_scale": 0.3,
        "windows": (7, None),
        "local_rope_theta": 100.0,
        "tied": True,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "rotates": (True, False),
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        "kv_heads": 4,
        "head": 12,
        "latent": LatentSizes(24, 16, 8, 4, 6),
        "experts": Experts(8, 2, 32, True, (0,), "sigmoid", True, groups=4, chosen_groups=2, scale=2.5, shared=32),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", SWITCHES)
def test_so_it_does_whatever_the_family(family, tmp_path):
    job = small("grpo", sizes=SWITCHES[family])
    fake, real = (trace(job, 8, 16, real) for real in (False, True))
    assert_alike(fake.phases, real.phases)
    changes = {"head_dim": 8} | ({"sliding_window": 7} if family == "gemma2" else {})
    if family == "deepseek_v3":
        changes = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 32}
        changes |= {"q_lora_rank": 16, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    model = write_config(tmp_path, model_type=family, **changes)
    estimate = dry_run.estimate(plain("grpo", model=model, mesh="dp2,tp2", generate_mesh="dp2,tp2"), 8, CPU)
    assert {"generate", "score_reference", "update_policy", "reshard"} <= set(estimate.phases)


@pytest.mark.slow
def test_layers_without_experts_before_those_with_some_do_not_stand_for_them(monkeypatch):
    """A model with three of them and seven others is on the line through shallower ones."""
    experts = dataclasses.replace(SWITCHES["deepseek_v3"]["experts"], dense=(0, 1, 2))
    job = small("sft", sizes=SWITCHES["deepseek_v3"] | {"layers": 10, "experts": experts})
    few, more = traced_layers(job.model)
    assert few.layers == (0, 1, 2, 3, 4, 5) and [(deep.layers, count) for deep, count in more] == [((*range(7),), 4)]
    phases = dry_run.estimate(job, 8, CPU).phases
    monkeypatch.setattr(dry_run.tracing, "of_all_layers", lambda job, costs: costs(job))
    assert_alike(phases, dry_run.estimate(job, 8, CPU).phases)


def gemma4_e2b(folder):
    """A small model with the layers of Gemma 4 E2B in fewer of its turns: later mlps are twice as wide."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 4
    return write_config(
        folder,
        model_type="gemma4_text",
        architectures=["Gemma4ForCausalLM"],
        num_hidden_layers=20,
        layer_types=kinds,
        num_kv_shared_layers=10,
        use_double_wide_mlp=True,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=16,
        num_attention_heads=2,
        hidden_size=32,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=512,
        sliding_window=4,
    )


@pytest.mark.slow
def test_layers_of_each_kind_are_on_a_line_of_their_own(tmp_path):
    job = plain("sft", model=gemma4_e2b(tmp_path))
    traced = traced_layers(job.model)
    assert len(traced.few.layers) == 12 and [count for _, count in traced.more] == [4]
    phases = dry_run.estimate(job, 8, CPU).phases
    assert_alike(phases, trace(job, 8, 8).phases)


@pytest.mark.slow
@pytest.mark.parametrize("minibatches", [1, 2])
def test_many_micro_batches_and_mini_batches_are_on_the_line(minibatches):
    rows, budget = 64, 256
    job = small("grpo", sizes={"layers": 1}, token_budget=budget, minibatches=minibatches, batch_prompts=32)
    exact = trace(job, 8, rows).phases
    phases = dry_run.estimate(job, 8, CPU).phases
    assert_alike({name: phases[name] for name in exact}, exact)
    for name in ("update_policy", "score_reference"):
        assert phases[name].peak["batch"] == pytest.approx(exact[name].peak["batch"], rel=0.05), name
    if minibatches == 1:
        line = at_rows(lambda n: trace(job, 8, n), rows, budget // 32)
        assert_alike({"update_policy": line["update_policy"]}, {"update_policy": exact["update_policy"]})


@pytest.mark.slow
def test_scoring_and_learning_are_on_lines_of_their_own():
    given = {"sizes": {"layers": 1}, "token_budget": 256, "batch_prompts": 24, "minibatches": 2}
    few, many = (small("grpo", score_token_budget=n, **given) for n in (64, 512))
    result = [dry_run.estimate(job, 8, CPU).phases for job in (few, many)]
    for phases, job in zip(result, (few, many), strict=True):
        exact = trace(job, 8, 48).phases
        assert_alike({name: phases[name] for name in exact}, exact)
    held = [phases["score_policy"].peak["activations"] for phases in result]
    assert held[1] > 5.9 * held[0]
    assert result[0]["update_policy"].peak["activations"] == pytest.approx(
        result[1]["update_policy"].peak["activations"], rel=0.01
    )


@pytest.mark.slow
def test_deep_models_are_on_the_line():
    job = small("grpo", sizes={"layers": 7})
    assert traced_layers(job.model).more
    shallow = dry_run.estimate(job, 8, CPU).phases
    exact = trace(job, 8, 16).phases
    assert_alike({name: shallow[name] for name in exact}, exact)


@pytest.mark.slow
def test_deep_sharded_models_are_on_the_line():
    job = small("sft", sizes={"layers": 7}, mesh="dp4", fsdp=True, remat="full", batch_prompts=16, token_budget=32)
    shallow = dry_run.estimate(job, 32, CPU).phases
    with pretended(job.sizes) as mesh:
        parts = build(job, mesh, lambda _: None)
        exact = dry_run.trace_step(job, parts, dry_run.full_rows(job, parts, 32, 4), tracer_of(job, parts, CPU)).phases
    for kind in ("optimizer", "gradients", "activations", "staging"):
        result, whole = (phases["update_policy"].peak[kind] for phases in (shallow, exact))
        assert result == pytest.approx(whole, rel=0.02), kind


@pytest.mark.slow
def test_a_teacher_has_a_line_of_its_own(tmp_path):
    teacher = write_config(tmp_path, vocab_size=300, num_hidden_layers=8)
    job = small("distillation", sizes={"layers": 7}, teacher=teacher)
    shallow, exact = dry_run.estimate(job, 8, CPU).phases, trace(job, 8, 16).phases
    assert_alike({name: shallow[name] for name in exact}, exact)
    sizes = [4 * params(job, name) for name in ("policy", "teacher")]
    assert shallow["score_teacher"].peak["weights"] == pytest.approx(sum(sizes), rel=1e-3)


def test_states_have_their_closed_forms_in_every_phase():
    job = small()
    phases = dry_run.estimate(job, 8, CPU).phases
    policy, critic = (4 * params(job, name) for name in ("policy", "critic"))
    for name, costs in phases.items():
        assert costs.peak["weights"] == 2 * policy + critic, name  # of policy, reference and critic
        assert costs.peak["optimizer"] == pytest.approx(2 * (policy + critic), rel=1e-2), name


def test_the_reference_has_its_own_table_and_dtype(tmp_path):
    model = write_config(tmp_path)
    flags = {"model": model, "dtype": "bfloat16", "mesh": "dp4", "batch_prompts": 16, "fsdp": True}
    both, policy = (
        dry_run.estimate(plain("grpo", **flags, **more), 8, CPU).phases for more in ({}, {"fsdp_models": "policy"})
    )
    job = plain("grpo", model=model)
    split = params(job, "reference") - 64 * (2 * job.model.config.layers + 1)  # all but norms
    for name in ("generate", "advantage"):
        difference = policy[name].peak["weights"] - both[name].peak["weights"]
        assert difference == pytest.approx(2 * split * 3 / 4)  # bytes that three other ranks held
    gathers = ["all_gather_into_tensor" in {op for op, _ in row["score_reference"].traffic} for row in (both, policy)]
    assert gathers == [True, False]


def test_a_reward_model_is_held_in_its_own_size(tmp_path):
    reward = write_config(tmp_path, num_hidden_layers=5, num_labels=1, architectures=["LlamaForSequenceClassification"])
    given = {"prompts": "prompts.jsonl", "reward_model": reward}
    with_it, without = small("grpo", **given), small("grpo")
    grader = with_it.models["reward_model"]
    assert grader.config.layers == 5 and grader.unembed is None
    held, plain_ = (dry_run.estimate(job, 8, CPU).phases for job in (with_it, without))
    assert set(held) - set(plain_) == {"score_reward_model"}
    for name, costs in plain_.items():
        more = held[name].peak["weights"] - costs.peak["weights"]
        assert more == pytest.approx(4 * params(with_it, "reward_model")), name
    # It reads 33 tokens of each of 16 rows, a text of 32 and one more, and the padding of its micro-batches.
    sizes = packed_sizes(scoring_budget(with_it.settings), 33, 8, SCORE_PARTS)
    size = int(pack(np.full(16, 33), 1, sizes, 16).size.sum())
    layer = sum(x.numel() for name, x in trees.named(grader.shapes) if x.ndim > 1 and "layers/0" in name)
    attention = 16 * 4 * (33 * 34 // 2) * grader.config.attention.heads * grader.config.attention.head
    assert held["score_reward_model"].flops == pytest.approx(5 * (2 * layer * size + attention), rel=0.01)


@pytest.mark.slow
def test_what_is_offloaded_is_away_where_it_is_not_needed():
    job = small()
    here, away = (
        dry_run.estimate(dataclasses.replace(job, settings=with_flags(job.settings, offload=parts)), 8, H100).phases
        for parts in (None, "optimizer,reference,params")
    )
    policy, critic = (4 * params(job, name) for name in ("policy", "critic"))
    without = {name: {k: here[name].peak[k] - away[name].peak[k] for k in ("weights", "optimizer")} for name in here}
    moments = pytest.approx(2 * (policy + critic), rel=1e-2)
    assert without["generate"] == {"weights": policy + critic, "optimizer": moments}  # the engine has the policy's own
    for name in ("score_policy", "score_reference", "score_critic", "advantage"):
        assert without[name] == {"weights": 0, "optimizer": moments}
    for name in ("update_critic", "update_policy", "reshard", "verify"):
        assert without[name] == {"weights": policy, "optimizer": 0}
    offloading = dataclasses.replace(job, settings=with_flags(job.settings, offload="optimizer"))
    assert left_out(offloading, None, CPU)[-1] == "--offload=optimizer: it does nothing on a CPU"


def test_flops_of_training_are_three_times_those_of_scoring():
    phases = dry_run.estimate(small(token_budget=4096, minibatches=2), 8, CPU).phases
    assert phases["update_critic"].flops == pytest.approx(3 * phases["score_critic"].flops, rel=0.05)
    assert phases["update_policy"].flops == pytest.approx(
        3 * phases["score_policy"].flops, rel=0.25
    )  # logits once more


def test_a_single_update_reads_its_own_forward_pass():
    once, often = (dry_run.estimate(small("grpo", minibatches=n), 8, CPU).phases for n in (1, 2))
    assert set(often) - set(once) == {"score_policy"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_holds_states_and_gradients_and_nothing_of_the_forward_pass(optimizer):
    job = small("grpo", optimizer=optimizer)
    peak = trace(job, 8, 16).phases["update_policy"].peaks["optimizer"]
    policy, matrices = 4 * params(job, "policy"), 4 * sum(x.numel() for x in layer_matrices(job))
    moments = 2 * policy if optimizer == "adamw" else 2 * (policy - matrices) + matrices
    assert peak["optimizer"] >= moments and peak.get("activations", 0) + peak.get("logits", 0) < 0.1 * policy
    assert peak["gradients"] >= policy


def layer_matrices(job):
    """The weights that muon makes orthogonal: the layers' matrices."""
    return [x for name, x in trees.named(job.models["policy"].shapes) if name.startswith("layers") and x.ndim > 1]


def test_a_configuration_is_enough_and_must_be_there(tmp_path):
    path = write_config(tmp_path)
    for model in (path, str(tmp_path)):
        assert plain(model=model).model.config.embed == 64
    with pytest.raises(ModelError, match=r"nowhere.*needs only a config\.json"):
        plain(model=str(tmp_path / "nowhere"))
    with pytest.raises(SettingsError, match="teacher"):
        plain("distillation", model=path)
    job = plain(model=path)
    with pytest.raises(SettingsError, match=r"--prompt_tokens=4090 --max_new_tokens=24.* 4096 positions"):
        dry_run.estimate(job, 4090, CPU)


def test_tokens_of_a_prompt_are_the_flags_or_the_embedded_tasks(tmp_path):
    ppo, sft = recipe("ppo")(), recipe("sft")()
    tokens = functools.partial(dry_run.tokens_of, algorithm=ppo)
    path = write_config(tmp_path)  # of a model with 4096 positions
    assert tokens(settings(prompt_tokens=77)) == 77 and tokens(settings(model=path)) == dry_run.PROMPT_TOKENS
    assert (
        tokens(settings(model=path, max_new_tokens=3796)) == 300
        and tokens(settings(model=path, max_new_tokens=5000)) == 1
    )
    assert 4 <= tokens(settings()) <= 16
    assert dry_run.tokens_of(settings(text_tokens=55), sft) == 55
    assert dry_run.tokens_of(settings(model=path), sft) == dry_run.TEXT_TOKENS
    assert dry_run.tokens_of(settings(model=path, max_text_tokens=99), sft) == 99
    positions = arithmetic.model_config().max_positions
    of_texts = functools.partial(dry_run.tokens_of, settings(data="texts.jsonl"))  # of the embedded model
    assert of_texts(sft) == positions < dry_run.TEXT_TOKENS
    assert of_texts(recipe("reward_model")()) == positions - 1  # it reads the end of a text too
    assert dry_run.tokens_of(settings(), sft) > tokens(settings())  # an answer comes after a prompt


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "bfloat16"),
        ({"hardware": "mi300x"}, "bfloat16"),
        ({"hardware": "cpu"}, "float32"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_it_computes_in_the_dtype_of_the_hardware_that_it_assumes(given, dtype):
    assert compute_dtype(settings(dry_run=True, device="cpu", **given)) == dtype
    assert compute_dtype(settings(device="cpu", dtype=given.get("dtype", "auto"))) == given.get("dtype", "float32")


def test_rows_of_experts_are_a_quarter_more_than_the_mean_and_travel_during_products():
    job = small("grpo", sizes={"embed": 64}, task="arithmetic_moe", mesh="ep2", batch_prompts=64, token_budget=512)
    experts = job.model.config.mlp.experts
    costs = dry_run.estimate(job, 8, H100).phases["score_reference"]
    (sent,) = (traffic for (op, _), traffic in costs.traffic.items() if op == "all_to_all_single")
    (early,) = (traffic for (op, _), traffic in costs.early.items() if op == "all_to_all_single")
    layers = job.model.config.layers
    passes = sent.count / layers / 5  # counts; and there and back each half of the tokens
    tokens = sent.nbytes / passes / layers / (2 * 1.25 * experts.per_token * 64 * 4)
    assert passes == 1 and tokens == pytest.approx(64 * 32, rel=1e-3)  # 64 rows of 8 and 24 tokens on each rank
    assert early.nbytes > 0.95 * sent.nbytes


def test_ranks_of_experts_on_two_nodes_send_a_token_once_to_the_other():
    sizes = {"embed": 64, "experts": Experts(count=8, per_token=4, mlp=64)}
    job = small("grpo", sizes=sizes, task="arithmetic_moe", mesh="ep4", batch_prompts=256, token_budget=8192)
    far = {}
    for node in (4, 2):
        estimate = dry_run.estimate(job, 8, H100._replace(node=node))
        traffic = estimate.phases["score_reference"].traffic
        sent = {}
        for (op, group), message in traffic.items():
            if op == "all_to_all_single":
                _, axes, sizes = estimate.axes[group]
                sent[tuple(peers(sizes, axes, 0))] = message.nbytes
        assert set(sent) == ({(0, 1, 2, 3)} if node == 4 else {(0, 2), (0, 1)})
        far[node] = sum(nbytes * sum(rank > 1 for rank in ranks) / len(ranks) for ranks, nbytes in sent.items())
    # Of a token's four experts two are on the other node, in the mean; at least one is there in 15 of 16 cases.
    assert far[2] / far[4] == pytest.approx(15 / 32, rel=0.08)
