"""Records of every format: the same values, lazily where the format allows it, and errors with their place."""

import json
import pickle
import sys

import pytest

from funrl.data.json_lines import DataError
from funrl.data.prompts import PromptError, load_prompts
from funrl.data.records import open_records, read_records
from funrl.data.supervised import load_examples
from funrl.data.text_lengths import check_lengths
from funrl.data.tokenizer import character_tokenizer

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "extra_info": {"index": n}} for n in range(25)]


def write_parquet(path, rows, group=10):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=group)
    return path


def written(path, rows):
    """A file or directory in the format that its name says."""
    if path.suffix == ".parquet":
        return write_parquet(path, rows)
    if path.suffix == ".json":
        path.write_text("\ufeff \n" + json.dumps(rows, indent=2))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        saved(rows).save_to_disk(str(path))
    return path


def saved(rows):
    """A dataset of the library; some of its releases cannot hash a table, so it gets its fingerprint."""
    datasets, arrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    return datasets.Dataset(arrow.Table.from_pylist(rows), fingerprint="rows")


FORMATS = ["rows.jsonl", "rows.json", "rows.parquet", "saved"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_records(tmp_path, name):
    path = written(tmp_path / name, ROWS)
    assert [record for _, record in read_records(path)] == ROWS
    assert [(one.prompt, one.fields["extra_info"]["index"]) for one in load_prompts(path)] == [
        (row["prompt"], n) for n, row in enumerate(ROWS)
    ]
    records = open_records(path, lambda record: None)
    assert len(records) == 25 and [records[n] for n in (24, 3, 17, -1)] == [ROWS[n] for n in (24, 3, 17, -1)]
    copied = pickle.loads(pickle.dumps(records[5:]))
    assert copied[0] == ROWS[5] and copied.where(0) == f"{path}, {'line' if name == 'rows.jsonl' else 'row'} 6"


@pytest.mark.parametrize("name", FORMATS)
def test_a_bad_record_is_named_in_every_format(tmp_path, name):
    path = written(tmp_path / name, [*ROWS[:12], {"prompt": "", "answer": "", "extra_info": {"index": 0}}])
    where = f"{'line' if name == 'rows.jsonl' else 'row'} 13"
    with pytest.raises(PromptError, match=f"{name}, {where}: 'prompt' must be text that is not empty"):
        load_prompts(path)
    with pytest.raises(DataError, match=f"{name}, {'line' if name == 'rows.jsonl' else 'row'} 1: .* 'completion'"):
        load_examples(path, "demonstrations", None)


def test_texts_of_parquet_are_read_by_row_group_and_checked_by_length(tmp_path):
    tokenizer = character_tokenizer("ab")
    rows = [{"prompt": "a", "completion": "b" * (n + 1), "margin": None} for n in range(25)]
    examples = load_examples(write_parquet(tmp_path / "rows.parquet", rows), "demonstrations", tokenizer)
    assert len(examples[:-5][19].texts[0].tokens) == 22 and examples[24].source.endswith("row 25")
    with pytest.raises(DataError, match="row 25: the text has 27 tokens, but the model has 26 positions"):
        check_lengths(examples, 26, tokenizer)
    write_parquet(tmp_path / "rows.parquet", rows[:9])
    with pytest.raises(DataError, match="has been changed since the run began"):
        _ = examples[3]


def test_csv_has_text_in_named_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a,\nb",1\n\nc,2\n')
    assert list(read_records(path)) == [
        (f"{path}, line 2", {"prompt": "a,\nb", "answer": "1"}),
        (f"{path}, line 4", {"prompt": "c", "answer": "2"}),
    ]
    for line, more in (("c,2,3", "more"), ("c", "fewer")):
        path.write_text(f"prompt,answer\na,1\n{line}\n")
        with pytest.raises(PromptError, match=f"line 3: it has {more} cells than the 2 names of the first line"):
            load_prompts(path)
    path.write_bytes(b"prompt\n\xff\n")
    with pytest.raises(PromptError, match="not CSV in UTF-8"):
        load_prompts(path)


def test_pairs_in_csv_may_have_margins(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("prompt,chosen,rejected,margin\na,b,c,1.5\n")
    assert load_examples(path, "preferences", character_tokenizer("abc"))[0].margin == 1.5


def test_json_lines_and_broken_lists_may_be_called_json(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert len(load_prompts(path)) == 25
    path.write_text('[{"prompt": "a"},\n {"prompt" "b"}]')
    with pytest.raises(PromptError, match=r"rows\.json: not valid JSON: .* at line 2, column 12"):
        load_prompts(path)


@pytest.mark.parametrize(("name", "package"), [("rows.parquet", "pyarrow"), ("saved", "datasets")])
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, name, package):
    path = tmp_path / name
    if package == "datasets":
        path.mkdir()
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"PAR1")
    for module in (package, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PromptError, match=rf"needs {package}, which is not installed; pip install 'funrl\[data\]'"):
        load_prompts(path)


def test_of_several_splits_train_is_taken(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "dev"]}')
    with pytest.raises(PromptError, match=f"it has no split 'train'; give one of {tmp_path}/test, {tmp_path}/dev"):
        load_prompts(tmp_path)
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(train=saved(ROWS)).save_to_disk(str(tmp_path / "all"))
    assert len(load_prompts(tmp_path / "all")) == 25


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("prompt")
    with pytest.raises(PromptError, match=r"rows\.parquet: it cannot be read as parquet"):
        load_prompts(tmp_path / "rows.parquet")
