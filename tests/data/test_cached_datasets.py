"""Datasets of the local Hugging Face cache open by their names, as files do."""

import json

import pytest

from funrl.data.cached_datasets import cached_name
from funrl.data.prompts import PromptError, load_prompts
from funrl.data.records import open_records, source_problem

ROWS = {
    "train": [{"question": f"{n}?", "answer": str(n)} for n in range(12)],
    "test": [{"question": "!", "answer": "0"}],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache with a dataset that was prepared, in two configurations, and one that was only downloaded."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("cache")
    raw = folder / "hub" / "datasets--me--raw" / "snapshots" / "abc"
    source = folder / "gsmSmall"
    for place in (raw, source / "main", source / "socratic"):
        place.mkdir(parents=True)
        for split, rows in ROWS.items():
            (place / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (raw.parents[1] / "refs").mkdir()
    (raw.parents[1] / "refs" / "main").write_text("abc")
    configs = "".join(
        f"- config_name: {name}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {name}/{s}.jsonl\n" for s in ROWS)
        for name in ("main", "socratic")
    )
    (source / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for config in ("main", "socratic"):  # the library writes its own layout
        datasets.load_dataset(str(source), config, cache_dir=str(folder / "datasets"))
    (made,) = (folder / "datasets").glob("gsm_small")
    made.rename(made.with_name("me___gsm_small"))
    return folder


@pytest.fixture(autouse=True)
def home(cache, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(cache))


@pytest.mark.slow
def test_names_are_looked_up_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cached_name("me/gsmSmall:main:test") == ("me/gsmSmall", "main", "test")
    assert cached_name("me/raw") == ("me/raw", None, "train")
    for text in ("you/gsmSmall", "gsmSmall", "me/other", "/me/raw", "me/raw:a:b:c", "rows.jsonl"):
        assert cached_name(text) is None
    assert source_problem("me/raw:test") == ""
    assert source_problem("me/other") == "no such file, and no such dataset in the local cache"
    (tmp_path / "me").mkdir()
    (tmp_path / "me" / "raw").write_text("{}")
    assert cached_name("me/raw") is None and source_problem("me/raw") == ""  # a file of this name comes first


def test_a_prepared_dataset_is_mapped_and_its_rows_are_named():
    prompts = load_prompts("me/gsmSmall:main:train")
    assert [prompt.prompt for prompt in prompts] == [row["question"] for row in ROWS["train"]]
    assert prompts[3].source == "me/gsmSmall:main:train, row 4" and prompts[3].fields == {"answer": "3"}
    records = open_records("me/gsmSmall:socratic:test", lambda record: None)
    assert records[0] == ROWS["test"][0] and records.where(0) == "me/gsmSmall:socratic:test, row 1"


def test_a_downloaded_dataset_is_prepared_first(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    assert [prompt.prompt for prompt in load_prompts("me/raw:test")] == ["!"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("me/gsmSmall:test", "multiple 'me/gsmSmall' configurations.*write NAME:SPLIT or NAME:CONFIGURATION:SPLIT"),
        ("me/gsmSmall:other:test", "for config 'other' Available configs in the cache: .*'main'"),
        ("me/gsmSmall:main:dev", r"""Unknown split "dev". Should be one of \['train', 'test'\]"""),
        ("me/raw:dev", r"""Unknown split "dev". Should be one of"""),
    ],
)
def test_what_is_not_there_is_named(text, message):
    with pytest.raises(PromptError, match=f"{text}: datasets cannot read it: .*{message}"):
        load_prompts(text)


def test_a_cache_that_was_cut_short_is_named(cache):
    (info,) = (cache / "datasets" / "me___gsm_small" / "main").glob("*/*/dataset_info.json")
    whole = info.read_text()
    record = json.loads(whole)
    record["splits"]["train"]["num_examples"] += 1
    info.write_text(json.dumps(record))
    try:
        with pytest.raises(PromptError, match="12 of 13 rows are there"):
            load_prompts("me/gsmSmall:main:train")
    finally:
        info.write_text(whole)
