"""The report: a page that stands alone, says what the files say, and survives whatever the files lack."""

import html
import json
import re

import pytest
from written_runs import a_run, a_supervised_run, checked

from funrl.data.processors.thumbnails import ShownPicture
from funrl.track.records.run_directory import open_run
from funrl.track.records.samples import Sample
from funrl.track.records.trackers import jsonl
from funrl.track.report import charts
from funrl.track.report.page import render, write_report
from funrl.track.report.run_files import ReportError, RunFiles, newest_evaluation, read_run


def test_what_guards_said_is_on_the_page(tmp_path):
    assert "Noticed" not in checked(render(read_run(a_run(tmp_path / "healthy")))).text
    run = a_run(tmp_path / "ill", keep=lambda key: key != "actor/pg_clipfrac")
    rows = [row | {"actor/pg_clipfrac": 0.7} for row in read_run(run).rows]
    text = checked(render(read_run(run)._replace(rows=rows))).text
    assert "Noticed" in text and "step 4: the ratios of 70% of the tokens are clipped" in text


def test_an_episode_is_a_conversation_with_branches_as_tabs(tmp_path):
    answer = {"role": "tool", "text": "<b>" + "long " * 30}
    turn = {
        "role": "assistant",
        "text": "raw",
        "sampled": True,
        "calls": [["add", "{}"]],
        "content": "well",
        "reward": 0.5,
    }
    last = {"role": "assistant", "text": "six", "sampled": True, "finish": "length"}
    branches = [
        {"agent": "policy", "reward": 1.0, "says": [turn, answer, last]},
        {"agent": "critic", "reward": None, "says": [turn | {"before": True}]},
    ]
    episode = {"branches": branches, "status": "turns", "parts": {"calls": 2.0}}
    run = a_run(tmp_path)
    shown = [Sample(step, "p", "c", 1.0, conversation=episode) for step in (0, 60)]
    page = render(read_run(run)._replace(samples=shown))
    read = checked(page)
    for text in (
        "ended by its limit of turns",
        "calls 2",
        "calls add",
        "well",
        "raw",
        "six",
        "cut off by length",
        "turn 0.5",
        "1 policy 1",
        "2 critic",
        "in an earlier branch too",
        "<b>long long",
    ):
        assert text in read.text, text
    radios = [tag for name, tag in read.tags if name == "input"]
    assert len(radios) == 4 and len({tag["id"] for tag in radios}) == 4 and len({tag["name"] for tag in radios}) == 2
    labels = {tag["for"] for name, tag in read.tags if name == "label"}
    assert labels == {tag["id"] for tag in radios} and sum("checked" in tag for tag in radios) == 2
    assert "<details open" not in page and page.count("<details><summary>calls add") == 4
    failed = [Sample(0, "p", "", None, conversation={"branches": [], "status": "failed", "problem": "no server"})]
    text = checked(render(read_run(run)._replace(samples=failed))).text
    assert "failed: no server" in text and "step 0 failed" in " ".join(text.split())
    forked = {"branches": [*branches[:1], branches[0] | {"reward": None}], "forked": 1}
    shown = [Sample(0, "p", "c", None, conversation=forked)]
    read = checked(render(read_run(run)._replace(samples=shown)))
    assert "step 0 unscored" in " ".join(read.text.split()) and "1 policy before a fork 1" in read.text
    assert ["checked" in tag for name, tag in read.tags if name == "input"] == [False, True]


def test_report_has_every_section_and_the_headline(tmp_path):
    run = a_run(tmp_path)
    assert write_report(tmp_path) == run.report
    page = run.report.read_text()
    text = checked(page).text
    assert "<h1>ppo</h1>" in page and "data addition" in text
    assert "Held-out accuracy rose from 0.25 to 0.95 in 60 steps and 2.0 min." in text
    for part in (
        "dp4,tp2",
        "from scratch",
        "What the policy says",
        "At the start",
        "At the end",
        "Configuration",
        "By phase",
    ):
        assert part in text
    for title in (
        "Reward",
        "Accuracy",
        "KL",
        "Entropy",
        "Clip fraction",
        "Value loss",
        "Response length",
        "Log-prob gap",
        "Gradient norm",
        "Throughput",
    ):
        assert f"<figcaption><b>{title}</b>" in page
    assert "<figcaption><b>Rewards</b>" in page and "digits 0.5" in text and "<b> 1" in text
    assert "not finite at 1 of 61 steps, first at step 7" in text
    assert re.search(r"generate1 s50%.*update_policy0\.5 s25%.*other0\.5 s25%", text)
    assert "<details" in page and "<details open" not in page


@pytest.mark.parametrize("name, pairs", [("sft", False), ("dpo", True), ("reward_model", True)])
def test_supervised_runs_are_reported_as_such(name, pairs, tmp_path):
    a_supervised_run(tmp_path, name, pairs)
    page = write_report(tmp_path).read_text()
    text = checked(page).text
    assert f"<h1>{name}</h1>" in page and "mine.jsonl" in text
    message = "Held-out accuracy rose from 0.05 to 1 in" if pairs else "Held-out loss fell from 3 to 0.15 in"
    assert message in text and "Held-out loss0.15from 3, best 0.15" in text
    assert ("Held-out accuracy1from 0.05, best 1" in text) == pairs
    shown = re.findall("<figcaption><b>(.*?)</b>", page)
    titles = ["Accuracy", "Loss", "Margin", "Scores"] if pairs else ["Loss", "Negative log-likelihood"]
    assert shown == [*titles, "Gradient norm"]


def test_the_newest_evaluation_is_a_table(tmp_path):
    run = a_run(tmp_path)
    assert "Held-out prompts" not in write_report(tmp_path).read_text()
    row = {"source": "a.jsonl, line 1", "prompt": "<b>1+1=", "answer": "2", "tokens": 3, "finished": True}
    rows = [
        row | {"step": step, "sample": sample, "completion": f"{step}.{sample} #### 2", "reward": 1.0, "correct": True}
        for step in (0, 60)
        for sample in (0, 1)
    ]
    rows.append(row | {"step": 60, "sample": 0, "completion": "x" * 500, "reward": 0.0, "finished": False})
    run.eval_samples.write_text("".join(json.dumps(item) + "\n" for item in rows))
    page = write_report(tmp_path).read_text()
    text = checked(page).text
    table = page[page.index("Held-out prompts") : page.index("Configuration")]
    assert "60.0 #### 2" in table and "60.1 #### 2" in table and ">0.0 ####" not in table
    assert "&lt;b&gt;1+1=" in table and "<th>answer</th>" in table and "3, cut off" in text
    assert "x" * 400 in table and "x" * 401 not in table
    many = [{"step": 70, "sample": sample, "prompt": str(n)} for n in range(40) for sample in (0, 1)]
    run.eval_samples.write_text("".join(json.dumps(element) + "\n" for element in many))
    shown = newest_evaluation(run.eval_samples)  # one of each prompt where there are enough, spread over them
    assert [entry["prompt"] for entry in shown] == [str(n) for n in range(0, 32, 2)] and not any(
        o["sample"] for o in shown
    )


def test_the_groups_that_moved_the_policy_most_are_a_table(tmp_path):
    run = a_run(tmp_path)
    assert "moved the policy most" not in write_report(tmp_path).read_text()
    group = {"prompt": "<b>1+1=", "completion": "2", "rewards": [1.0, 0.25], "norm": 3.5, "cosine": 0.5, "share": 0.4}
    rows = [group | {"step": 10, "prompt": "earlier"}, group | {"step": 20}]
    run.groups.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(tmp_path).read_text()
    table = page[page.index("Groups that moved") : page.index("Configuration")]
    assert "Of step 20" in table and "&lt;b&gt;1+1=" in table and "3.5" in table and "0.4" in table
    assert "1 0.25" in table and "earlier" not in table


def test_report_stands_alone(tmp_path):
    a_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "://" not in page and "url(" not in page and "@import" not in page
    tags = checked(page).tags
    assert not {"link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    assert not any({"src", "href", "onload"} & set(attributes) for _, attributes in tags)
    assert [attributes for tag, attributes in tags if tag == "script"] == [{}]
    policies = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none'; img-src data:;")  # nothing else is loaded
    assert "prefers-color-scheme:dark" in page and 'name="viewport"' in page


HOSTILE = "</pre><script>alert(1)</script>\"'> {{ 7 * 7 }} {% raw %} \x00\x1b[2J \u202eesrever\u2066 \ud800 <!--"


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    """Every text that a run writes may come from a model, a file or a user: all of them pass through the templates."""
    flags = {"prompts": HOSTILE, "model": HOSTILE, "steps": 2}
    metrics = {"reward/mean": 0.5, f"reward/{HOSTILE}/mean": 0.5, f"time_s/{HOSTILE}": 1.0, "time_s/step": 1.0}
    rows = [metrics | {"step": step} for step in (1, 2)]
    samples = [Sample(1, HOSTILE, HOSTILE, 0.0, ((HOSTILE, 1.0),))] * 2
    evaluation = [{"prompt": HOSTILE, "completion": HOSTILE, "answer": "4" + HOSTILE, "tokens": HOSTILE}]
    run = RunFiles({"experiment": HOSTILE, "mesh": HOSTILE, "flags": flags}, rows, samples, evaluation)
    page, plain = (render(run._replace(config=config)) for config in (run.config, {}))
    example = checked(page)
    assert [tag for tag, _ in example.tags].count("script") == 1
    assert "<script>alert(1)</script>" in example.text and "{{ 7 * 7 }} {% raw %}" in example.text
    assert r"\x00\x1b[2J \u202eesrever\u2066 \ud800 <!--" in example.text
    assert not set("\x00\x1b\u202e\u2066\ud800") & set(page) and "49" not in example.text
    values = [json.loads(attributes["data-values"]) for _, attributes in example.tags if "data-values" in attributes]
    assert any(HOSTILE in name for figure in values for name in figure["names"])
    structure = [tag for tag, _ in checked(page).tags if tag not in ("li", "b", "tr", "th", "td", "table", "caption")]
    expected = [tag for tag, _ in checked(plain).tags if tag not in ("li", "b", "tr", "th", "td", "table", "caption")]
    assert structure == expected  # no text has opened an element


def pointed_at(page, title):
    """What the figure of a title shows under the pointer: a text for each curve and step."""
    figure = page.split(f"<figcaption><b>{title}</b>")[1].split("</figure>")[0]
    (data,) = re.findall("data-values='([^']*)'", figure)
    return json.loads(html.unescape(data))


def test_values_under_the_pointer_are_in_the_page(tmp_path):
    a_run(tmp_path, steps=60, every=20)
    page = write_report(tmp_path).read_text()
    reward = pointed_at(page, "Entropy")
    assert reward["steps"] == list(range(61)) and reward["names"] == ["actor/entropy"]
    assert reward["values"][0][:3] == ["1", "0.99", "0.98"] and reward["values"][0][60] == "0.4"
    assert reward["places"][0] == 0.0 and reward["places"][30] == 0.5 and reward["places"][60] == 1.0
    accuracy = pointed_at(page, "Accuracy")
    assert (accuracy["steps"], accuracy["values"]) == ([0, 20, 40, 60], [["0.25", "0.483", "0.717", "0.95"]])
    gradient = pointed_at(page, "Gradient norm")  # that of step 7 is not finite
    assert 7 not in gradient["steps"] and len(gradient["steps"]) == len(gradient["values"][0]) == 60
    seconds = pointed_at(page, "By step")
    assert seconds["names"] == ["generate", "update_policy", "other"] and seconds["steps"][:2] == [0, 1]
    assert [values[9] for values in seconds["values"]] == ["1", "0.5", "0.5"]
    script = page.split("<script>")[1]
    for name in ("pointermove", ".area", ".cursor", ".tip", "dataset.values"):
        assert name in script


@pytest.mark.slow
def test_a_page_of_many_steps_is_bounded_and_keeps_what_stands_out():
    rows = [
        {"step": step, "reward/mean": step % 7 / 7, "actor/entropy": 1.0, "time_s/generate": 1.0, "time_s/step": 1.5}
        for step in range(1, 20_001)
    ]
    for index, entropy in ((0, 0.25), (12_345, 9.5), (17_777, -3.5), (-1, 0.75)):
        rows[index]["actor/entropy"] = entropy
    page = render(RunFiles({"flags": {"steps": 20_000}}, rows, [], []))
    assert len(page) < 100_000
    figure = pointed_at(page, "Entropy")
    assert len(figure["steps"]) <= charts.MOST_POINTS
    values = dict(zip(figure["steps"], figure["values"][0], strict=True))
    assert {step: values[step] for step in (1, 12_346, 17_778, 20_000)} == {
        1: "0.25",
        12_346: "9.5",
        17_778: "-3.5",
        20_000: "0.75",
    }


def test_samples_are_escaped_and_carry_their_rewards(tmp_path):
    a_run(tmp_path)
    page = write_report(tmp_path).read_text()
    assert "<i>1+1=" not in page and "<span>&lt;i&gt;1+1=</span>0&amp;" in page
    assert 'pill bad">reward 0<' in page and 'pill good">reward 1<' in page
    start, end = page.index("At the start"), page.index("At the end")
    assert start < page.index("<pre>") < end < page.rindex("<pre>")


@pytest.mark.parametrize("gone", ["eval/", "time_s/", "critic/", "rollout/", "reward/", "actor/"])
def test_missing_keys_leave_their_figures_out(tmp_path, gone):
    a_run(tmp_path, keep=lambda key: not key.startswith(gone))
    page = write_report(tmp_path).read_text()
    checked(page)
    titles = {"eval/": "Accuracy", "time_s/": "By step", "critic/": "Value loss", "rollout/": "Log-prob gap"}
    title = titles.get(gone, {"reward/": "Reward", "actor/": "Entropy"}.get(gone))
    assert f"<b>{title}</b>" not in page and page.count("<figure") >= 4


@pytest.mark.parametrize("steps", [1, 2, 31, 500])
def test_runs_of_any_length(tmp_path, steps):
    a_run(tmp_path, steps=steps, every=max(1, steps // 7))
    page = write_report(tmp_path).read_text()
    checked(page)
    assert all(re.fullmatch(r"[\d MLHh]*", drawn) for drawn in re.findall(r' d="([^"]*)"', page))
    assert len(page) < 300_000  # a long run is drawn with few points


def test_one_step_with_nothing_but_a_number(tmp_path):
    run = open_run(tmp_path, "sft", {})
    run.metrics.write_text('{"step": 0}\n')
    text = checked(write_report(tmp_path).read_text()).text
    assert "The run has taken 0 steps." in text


def test_calls_and_forks_of_episodes_are_figures_by_cause(tmp_path):
    run = open_run(tmp_path, "grpo", {"steps": 3})
    tracker = jsonl(run.metrics)
    for step in range(4):
        forks = {"episodes/forks/thinking": 0.5} if step != 2 else {}
        row = {"reward/mean": 0.1, "episodes/tool_calls": 2.0, "episodes/call_errors": 0.25, "episodes/turns": 3.0}
        tracker.write(step, row | forks | {"episodes/drift/whitespace": 0.75})
    tracker.close()
    page = write_report(run.path).read_text()
    for words in (
        "Calls of tools",
        "episodes/call_errors",
        "Forks by cause",
        "thinking",
        "Drift by cause",
        "whitespace",
    ):
        assert words in page
    assert "Forks by cause" not in write_report(a_run(tmp_path / "other", steps=3).path).read_text()


def test_waiting_and_ages_are_figures_where_a_run_has_them(tmp_path):
    run = a_run(tmp_path)
    plain = read_run(run)
    assert "Who waited" not in checked(render(plain)).text
    waits = {"wait/trainer_s": 1.25, "wait/generator_s": 0.5, "age/mean": 0.75, "age/max": 2.0}
    page = render(plain._replace(rows=[row | waits for row in plain.rows]))
    text = checked(page).text
    assert "Who waited" in text and "Age of rows" in text
    assert "Who waited: wait/trainer_s 1.25, wait/generator_s 0.5" in page
    assert "Age of rows: age/mean 0.75, age/max 2" in page


def test_sources_and_parts_of_rewards_have_figures(tmp_path):
    run = open_run(tmp_path / "run", "grpo", {})
    tracker = jsonl(run.metrics)
    sources = [f"s{n}" for n in range(9)]
    own = {f"source/{name}/{metric}": 0.5 for name in sources for metric in ("reward", "turns", "environment_s")}
    for step in range(1, 4):
        row = {
            "reward/mean": 0.1,
            "reward/form": 0.25,
            "reward/form/mean": 0.5,
            "reward/max": 1.0,
            "episodes/turns": 3.0,
        }
        tracker.write(step, row | own | {"episodes/environment_s": 0.75, "episodes/context_tokens": 9.0})
    tracker.close()
    page = render(read_run(run))
    text = checked(page).text
    assert "Reward by source" in text and "Context by source" not in text
    assert pointed_at(page, "Parts of rewards")["names"] == ["reward/form"]
    assert pointed_at(page, "Turns by source")["names"] == [f"source/{name}/turns" for name in sources[:8]]
    assert "Tokens beside the policy" in text and "Waiting for environments" in text


def test_an_interrupted_run_says_so(tmp_path):
    run = a_run(tmp_path)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(b"".join(lines[:30]) + lines[30][:25])
    assert "in 29 steps and 1.0 min. The run is to take 60 steps." in checked(write_report(tmp_path).read_text()).text


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ReportError, match=r"none: no such directory"):
        write_report(tmp_path / "none")
    with pytest.raises(ReportError, match=r"it has no config\.json"):
        write_report(tmp_path)
    run = open_run(tmp_path, "ppo", {})
    with pytest.raises(ReportError, match=r"it has no metrics\.jsonl"):
        write_report(tmp_path)
    run.metrics.write_text("")
    with pytest.raises(ReportError, match=r"no step has been written"):
        write_report(tmp_path)
    run.metrics.write_text('{"step": 1}\n{broken\n{"step": 2}\n')
    with pytest.raises(ReportError, match=r"metrics\.jsonl, line 2"):
        write_report(tmp_path)
    run.config.write_text("{")
    with pytest.raises(ReportError, match=r"config\.json: not JSON"):
        write_report(tmp_path)


def test_resumed_steps_count_once(tmp_path):
    run = open_run(tmp_path, "ppo", {})
    rows = [{"step": 1, "reward/mean": 0.1}, {"step": 2, "reward/mean": 0.9}, {"step": 2, "reward/mean": 0.4}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Reward rose from 0.1 to 0.4 in 2 steps." in checked(write_report(tmp_path).read_text()).text


def test_the_headline_is_of_held_out_rewards_and_counts_them(tmp_path):
    run = a_run(tmp_path, keep=lambda key: not key.startswith("eval/"))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for row in lines[::20]:
        row |= {"eval/reward": 2.0 + row["step"] / 60, "eval/examples": 12}
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    text = checked(write_report(run.path).read_text()).text
    assert "Held-out reward rose from 2 to 3" in text and "from 2, best 3, n = 12" in text


def test_pictures_of_samples_are_inside_the_page(tmp_path):
    picture = ShownPicture("<cat>.png", "16x8", "0123456789ab", "data:image/png;base64,AAAA")
    episode = {"branches": [{"agent": "policy", "reward": 1.0, "says": [{"role": "user", "text": "[image]how many?"}]}]}
    shown = [Sample(0, "how many?", "2", 1.0, pictures=(picture,))]
    shown += [Sample(60, "how many?", "2", 1.0, conversation=episode, pictures=(picture,))]
    later = picture._replace(name="dog.png", thumbnail=picture.thumbnail + "BBBB")
    says = [{"role": "user", "text": "[image]and this?", "pictures": (later,)}]
    turns = {"branches": [{"agent": "policy", "reward": 1.0, "says": says}]}
    several = [Sample(0, "how many?", "2", 1.0, conversation=turns, pictures=(picture,))]
    files = read_run(a_run(tmp_path))
    for samples, expected in ((shown, [picture, picture]), (several, [later])):
        read = checked(render(files._replace(samples=samples)))
        images = [tag for name, tag in read.tags if name == "img"]
        assert [(tag["src"], tag["alt"]) for tag in images] == [(item.thumbnail, str(item)) for item in expected]
