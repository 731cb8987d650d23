"""Pictures of saved rows that the run has read from files: digest and path are saved, and a replay reads them again.

    rollouts/step-7/pictures-3.json    for each row that rank 3 of the row axes has, its values in order, each a list:
                                       digest, absolute path or null, number of lines

The lines of a value with a path are not in rows-3.safetensors. A digest is that of the patches as the model saw them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.data.json_lines import DataError
from funrl.data.pictures import expand_placeholders, inner_pictures, picture_form_of
from funrl.data.processors.reading import THREADS
from funrl.kinds import OwnedLines
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.storage.shard_server import CheckpointError

SHOWN_DIGITS = 12  # of a digest, that a message shows


class PictureFiles(NamedTuple):
    """Pictures that a run reads from files.

    Attributes:
      field: ragged field of their patches.
      paths: of the files, by the digest of what was read.
      apart: as `OwnedValues.apart`.
    """

    field: str
    paths: Mapping[int, str]
    apart: Callable[[Mapping[str, Tensor]], list[OwnedLines]]


def picture_files(job: Job) -> PictureFiles | None:
    """The pictures of a run's prompts that stand in files; None: there are none."""
    owned = job.model.owned
    if owned is None or picture_reader(job.tokenizer) is None or not isinstance(job, RLJob):
        return None
    paths: dict[int, str] = {}
    for example in job.task.prompts:
        given = [_file_of(picture) for picture in inner_pictures([*(example.opening or ())])]
        if any(given) and example.owned is not None:
            values = [example.owned] if len(given) == 1 else owned.apart(example.owned.values)
            paths |= {value.digest: path for value, path in zip(values, given, strict=True) if path}
    field = next(name for name, x in owned.none.items() if x.dtype == torch.uint8)
    return PictureFiles(field, paths, owned.apart) if paths else None


def picture_reader(tokenizer: Any) -> Callable[[str], list[OwnedLines]] | None:
    """Reader of the forms that the picture of a path can have for a tokenizer's model; None: it sees none.

    There are two where pictures beside others are not cut into tiles. It raises DataError.
    """
    form = None if tokenizer is None else picture_form_of(tokenizer)
    if form is None:
        return None
    counts = (1,) if form.tower.layout.tiles is None else (1, 2)

    def forms(path: str) -> list[OwnedLines]:
        from funrl.models.vision.inputs import single_pictures

        given = [expand_placeholders([form.tower.placeholder] * n, [path] * n, form).owned for n in counts]
        return [single_pictures(form.tower, owned.values)[0] for owned in given]

    return forms


def _file_of(picture: Any) -> str:
    """The absolute path of a picture as a record has it; "": it is no file."""
    if isinstance(picture, Mapping):
        picture = picture.get("path") if picture.get("bytes") is None else None
    is_path = isinstance(picture, str | Path) and not str(picture).startswith("data:")
    return os.path.abspath(picture) if is_path else ""


def pictures_file(rank: int) -> str:
    """Name of the file about the pictures of a rank's rows."""
    return f"pictures-{rank}.json"


def without_files(
    files: PictureFiles, lines: Mapping[str, Tensor], counts: Mapping[str, Sequence[int]]
) -> tuple[Tensor, list[list[list[Any]]]]:
    """The lines of `files.field` that are in no file, and the values of each row as a file about them has them.

    Args:
      files: of the run.
      lines: of the fields that rows own, of a rank's rows end to end.
      counts: lines of each row, by field.
    """
    left = [lines[files.field][:0]]
    rows = []
    for parts in zip(*(lines[name].split([*counts[name]]) for name in counts), strict=True):
        own = dict(zip(counts, parts, strict=True))
        values = files.apart(own) if len(own[files.field]) else []
        paths = [files.paths.get(value.digest) for value in values]
        left += [value.values[files.field] for value, path in zip(values, paths, strict=True) if path is None]
        rows.append(
            [
                [f"{value.digest:032x}", path, len(value.values[files.field])]
                for value, path in zip(values, paths, strict=True)
            ]
        )
    return torch.cat(left), rows


class SavedPictures(NamedTuple):
    """Pictures of the rows of a saved step.

    Attributes:
      folder: of the step.
      none: lines of the field of a row without pictures.
      stored: (rank, begin, end) -> lines that are in no file.
      read: of `picture_reader`; None: instead of the lines of a file there are bytes of its digest.
    """

    folder: Path
    none: Tensor
    stored: Callable[[int, int, int], Tensor]
    read: Callable[[str], list[OwnedLines]] | None

    def lines(self, name: str, owner: np.ndarray, numbers: Sequence[int]) -> list[Tensor]:
        """Lines of each of some rows.

        Args:
          name: of the field.
          owner: [B] the row rank that wrote each row.
          numbers: of the rows.

        Raises:
          CheckpointError: a picture cannot be read, or it is another one now.
        """
        ranks = set(owner[[*numbers]].tolist())
        saved = {rank: json.loads((self.folder / pictures_file(rank)).read_text()) for rank in ranks}
        places = [(int(owner[number]), int((owner[:number] == owner[number]).sum())) for number in numbers]
        wanted = {tuple(value) for rank, place in places for value in saved[rank][place] if value[1] is not None}
        with ThreadPoolExecutor(THREADS) as pool:
            files = dict(zip(wanted, pool.map(lambda value: self._again(name, *value), wanted), strict=True))
        rows = []
        for rank, place in places:
            begin = sum(count for row in saved[rank][:place] for _, path, count in row if path is None)
            parts = [self.none]
            for digest, path, count in saved[rank][place]:
                if path is None:
                    parts.append(self.stored(rank, begin, begin + count))
                    begin += count
                else:
                    parts.append(files[digest, path, count])
            rows.append(torch.cat(parts))
        return rows

    def _again(self, name: str, digest: str, path: str, count: int) -> Tensor:
        """The lines of a picture that its file has."""
        if self.read is None:
            shape = (count, *self.none.shape[1:])
            return torch.from_numpy(np.resize(np.frombuffer(bytes.fromhex(digest), np.uint8), shape))
        try:
            values = {f"{value.digest:032x}": value.values[name] for value in self.read(path)}
        except DataError as error:
            raise CheckpointError(f"{self.folder}: {error}; {_saved_as(digest)}: put the file back") from error
        if digest not in values:
            raise CheckpointError(
                f"{self.folder}: the picture {path} has changed; {_saved_as(digest)}, and is "
                f"{next(iter(values))[:SHOWN_DIGITS]} now: put the file back that the run has read"
            )
        return values[digest]


def _saved_as(digest: str) -> str:
    return f"the digest of its patches was {digest[:SHOWN_DIGITS]}"


def missing_picture(folder: str | Path) -> str:
    """A line about the first picture of saved steps whose file is gone; "": all are there.

    Args:
      folder: of all steps.
    """
    for file in sorted(Path(folder).glob(f"step-*/{pictures_file(0).replace('0', '*')}")):
        for digest, path, _ in (value for row in json.loads(file.read_text()) for value in row):
            if path is not None and not os.path.exists(path):
                return f"{file.parent}: the picture {path} is not there; {_saved_as(digest)}: put the file back"
    return ""
