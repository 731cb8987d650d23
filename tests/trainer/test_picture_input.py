"""Pictures that cannot be used, given on the command line: one line before any work."""

import json
import struct
import zlib

import pytest
from picture_runs import save_seeing_model
from PIL import Image

from funrl.cli.main import main


def png_of(width, height):
    """A file whose head names this size, and which has few pixels."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("input")
    save_seeing_model(path / "model")
    (path / "reward.py").write_text("def score(prompt, completion, images):\n    return 0.0\n")
    (path / "broken.png").write_bytes(png_of(64, 64))
    (path / "huge.png").write_bytes(png_of(60000, 60000))
    (path / "large.png").write_bytes(png_of(12000, 12000))
    (path / "text.png").write_text("no picture")
    Image.new("RGB", (1, 4000)).save(path / "long.png")
    return path


BAD = {
    "absent.png": "the picture {} is not there",
    "broken.png": "the picture {} cannot be read: ",
    "text.png": "the picture {} cannot be read: cannot identify image file",
    "huge.png": "the picture {} has more than 134217728 pixels; resize it",
    "large.png": "the picture {} has 12000 x 12000 pixels; resize it",
    "long.png": "a picture of 1 x 4000 pixels: one side is more than 200 times the other",
    "": "a picture is a path, bytes, base64 or an object with one of these, not an empty text",
}
COMMANDS = {
    "grpo": ("--prompts", lambda folder: [f"--model={folder}/model", f"--reward={folder}/reward.py:score"]),
    "sft": ("--data", lambda folder: [f"--model={folder}/model"]),
    "evaluate": ("--data", lambda folder: [f"{folder}/model", f"--reward={folder}/reward.py:score"]),
    "generate": ("--prompts", lambda folder: [f"{folder}/model"]),
}


@pytest.mark.parametrize("command,name", [("grpo", name) for name in BAD] + [(x, "broken.png") for x in COMMANDS][1:])
def test_a_picture_that_cannot_be_used_is_one_line_before_work(folder, tmp_path, capsys, command, name):
    flag, others = COMMANDS[command]
    file = str(folder / name) if name else ""
    record = {"prompt": "a cab ?", "images": [file]} | ({"completion": "b"} if command == "sft" else {})
    (tmp_path / "records.jsonl").write_text(json.dumps({**record, "images": []}) + "\n" + json.dumps(record) + "\n")
    run = [f"--run_dir={tmp_path}/run"] if command in ("grpo", "sft") else []
    with pytest.raises(SystemExit) as ended:
        status = main(["funrl", command, *others(folder), f"{flag}={tmp_path}/records.jsonl", *run])
        raise SystemExit(status)
    output = "".join(capsys.readouterr())
    assert ended.value.code == 2 and len(output.splitlines()) == 1
    assert f"records.jsonl, line 2: {BAD[name].format(file)}" in output
    assert not (tmp_path / "run").exists()
