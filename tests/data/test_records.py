"""Records of every format: the same values, lazily where the format allows it, and errors with their place."""

import json
import pickle
import sys

import pytest

from funrl.data.json_lines import DataError
from funrl.data.order import weighted_files
from funrl.data.prompts import PromptError, load_prompts
from funrl.data.records import open_records, read_records, source_problem
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
    assert [(prompt.prompt, prompt.fields["extra_info"]["index"]) for prompt in load_prompts(path)] == [
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


def test_texts_of_parquet_are_checked_by_length_and_a_changed_file_is_read_anew(tmp_path):
    tokenizer = character_tokenizer("ab")
    rows = [{"prompt": "a", "completion": "b" * (n + 1), "margin": None} for n in range(25)]
    examples = load_examples(write_parquet(tmp_path / "rows.parquet", rows), "demonstrations", tokenizer)
    assert len(examples[:-5][19].texts[0].tokens) == 22 and examples[24].source.endswith("row 25")
    with pytest.raises(DataError, match="row 25: the text has 27 tokens, but the model has 26 positions"):
        check_lengths(examples, 26, tokenizer)
    write_parquet(tmp_path / "rows.parquet", rows[:9])
    assert examples[24].source.endswith("row 25")  # what was read is mapped from a copy
    assert len(load_examples(tmp_path / "rows.parquet", "demonstrations", tokenizer)) == 9


def test_csv_has_text_in_named_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('\ufeffprompt,answer\n"a,\nb",007\n\nc,NA\n')
    assert list(read_records(path)) == [
        (f"{path}, row 1", {"prompt": "a,\nb", "answer": "007"}),
        (f"{path}, row 2", {"prompt": "c", "answer": "NA"}),
    ]
    for line, cells in (("c,2,3", 3), ("c", 1)):
        path.write_text(f"prompt,answer\na,1\n{line}\n")
        with pytest.raises(PromptError, match=f"row 2 has {cells} cells, and the first line has 2 names"):
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


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_a_library_that_is_not_installed_is_named(tmp_path, monkeypatch, name):
    path = tmp_path / name
    if name == "saved":
        path.mkdir()
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptError, match=r"needs datasets, which is not installed; pip install 'funrl\[data\]'"):
        load_prompts(path)


def test_values_of_json_lines_are_what_json_says(tmp_path):
    """Columns of mixed types, integers beyond 64 bits and nulls: a table of one type a column would change them."""
    rows = [{"prompt": "a", "x": x} for x in (1, 1.0, "1", None, True, [1, "b", {"c": None}], {"d": 2**200}, {})]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    records = open_records(tmp_path / "a.jsonl", lambda record: None)
    for values in (
        [prompt.fields["x"] for prompt in load_prompts(tmp_path / "a.jsonl")],
        [row["x"] for row in records],
    ):
        assert [(type(x), x) for x in values] == [(type(row["x"]), row["x"]) for row in rows]
    assert records.where(2) == f"{tmp_path}/a.jsonl, line 5"


def test_of_several_splits_train_is_taken(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(dev=saved(ROWS), test=saved(ROWS)).save_to_disk(str(tmp_path / "part"))
    message = f"it has no split 'train'; give one of {tmp_path}/part:dev, {tmp_path}/part:test"
    with pytest.raises(PromptError, match=message):
        load_prompts(tmp_path / "part")
    datasets.DatasetDict(train=saved(ROWS)).save_to_disk(str(tmp_path / "all"))
    assert len(load_prompts(tmp_path / "all")) == 25


def test_a_split_of_a_saved_directory_is_named_after_a_colon(tmp_path):
    datasets, place = pytest.importorskip("datasets"), tmp_path / "chats"
    datasets.DatasetDict(train=saved(ROWS), test=saved(ROWS[:3])).save_to_disk(str(place))
    assert [len(load_prompts(text)) for text in (f"{place}:test", f"{place}:train", place, place / "test")] == [
        3,
        25,
        25,
        3,
    ]
    assert len(list(read_records(f"{place}:test"))) == 3 and source_problem(f"{place}:test") == ""
    assert weighted_files(f"{place}:test@0.5,{place}@0.5")[0].path == f"{place}:test"
    message = f"it has no split 'tset'; give one of {place}:test, {place}:train"
    assert source_problem(f"{place}:tset") == message
    with pytest.raises(PromptError, match=message):
        load_prompts(f"{place}:tset")
    assert source_problem(f"{place / 'test'}:test") == "no such file"


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "rows.parquet").write_text("prompt")
    with pytest.raises(PromptError, match=r"rows\.parquet: datasets cannot read it: .*[Pp]arquet"):
        load_prompts(tmp_path / "rows.parquet")


def test_a_name_that_is_there_twice_is_refused_where_one_value_would_be_lost(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,prompt\n1+1=,2,3+3=\n")
    with pytest.raises(DataError, match=r"a\.csv: two columns have the name 'prompt'"):
        open_records(tmp_path / "a.csv", lambda record: None)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "1+1=", "prompt": "2+2="}\n')
    for read in (lambda: list(read_records(tmp_path / "a.jsonl")), lambda: load_prompts(tmp_path / "a.jsonl")):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the key 'prompt' occurs twice"):
            read()


def test_a_parquet_file_without_rows_is_empty_like_other_files(tmp_path, capfd):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name, columns in (("columns", {"prompt": arrow.array([], arrow.string())}), ("nothing", {})):
        parquet.write_table(arrow.table(columns), tmp_path / f"{name}.parquet")
        with pytest.raises(PromptError, match=f"{name}.parquet: the file is empty; prompts are"):
            load_prompts(tmp_path / f"{name}.parquet")
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
