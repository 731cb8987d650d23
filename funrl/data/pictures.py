"""Pictures of records: read by Pillow, resized as the model wants them, cut into patches, and their placeholders.

A record has its pictures in a field `images` (a list) or `image`: paths, bytes, objects with `bytes` or `path` as
parquet files of `datasets` have them, base64 as data URLs, arrays [H, W, 3] or pictures of Pillow. A prompt in messages
says with parts {"type": "image"} where they are; in a text they are where it says <image>, or before it.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from einops import rearrange

from funrl.data.json_lines import DataError
from funrl.data.processors.form import PictureForm, fixed_size, picture_parts
from funrl.data.processors.reading import PictureReading, ReadPatches

if TYPE_CHECKING:  # a record is read before torch is imported
    from funrl.kinds import OwnedLines
    from funrl.models.model import ModelConfig
    from funrl.models.vision.config import TowerConfig

PICTURE_COLUMNS = ("images", "image")
PROCESSOR = "preprocessor_config.json"
WHOLE_PROCESSOR = "processor_config.json"  # has the same in "image_processor", as transformers 5 saves it
PROCESSOR_FILES = (PROCESSOR, WHOLE_PROCESSOR, "video_preprocessor_config.json")
PROCESSOR_CLASSES = {  # in transformers, by family
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "gemma3": "Gemma3Processor",
    "llava_onevision": "LlavaOnevisionProcessor",
}
FEWEST_TOKENS, MOST_TOKENS = 4, 1280  # of a picture, where no file bounds its pixels
FILE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # others may start programs, as EPS does
MOST_STORED_PIXELS = 1 << 27  # of a file; more is taken for an attack on memory


def picture_form(config: ModelConfig, directory: str | None = None) -> PictureForm | None:
    """The form for a model; None: it sees no pictures.

    Args:
      config: of the model.
      directory: its files, whose preprocessor_config.json or processor_config.json bounds pixels.

    Raises:
      DataError: a file is no JSON, or says what is not supported.
    """
    from funrl.models.vision.config import VisionLanguageConfig

    if not isinstance(config, VisionLanguageConfig):
        return None
    pixels = (config.tower.patch * config.tower.merge) ** 2
    form = PictureForm(config.tower, FEWEST_TOKENS * pixels, MOST_TOKENS * pixels, bos=config.special_tokens.bos)
    if (fixed := fixed_size(config.tower)) is not None:
        form = form._replace(min_pixels=fixed.pixels**2, max_pixels=fixed.pixels**2)
    present = [] if directory is None else [Path(directory) / name for name in PROCESSOR_FILES]
    files = tuple((path.name, path.read_text()) for path in present if path.is_file())
    name, got = _processor_fields(dict(files), form.tower)
    if got is not None and fixed is not None:
        fixed.check(name, got)
    elif got is not None:
        form = _with_bounds(form, name, got)
    elif config.source.family in PROCESSOR_CLASSES:
        files = (*files, (PROCESSOR, _processor_text(form, PROCESSOR_CLASSES[config.source.family])))
    return _checked_bounds(form._replace(files=files))


def _processor_fields(texts: Mapping[str, str], tower: TowerConfig) -> tuple[str, Mapping[str, Any] | None]:
    """Name of the file that transformers prefers, and its fields of the processor of pictures; None: no file has them.

    Args:
      texts: of the files, by name.
      tower: whose sizes they must have.

    Raises:
      DataError: a file is no JSON object, or has other sizes.
    """
    for name in [name for name in (WHOLE_PROCESSOR, PROCESSOR) if name in texts]:
        try:
            got = json.loads(texts[name])
        except ValueError as error:
            raise DataError(f"{name} is not JSON: {error}") from None
        got = got.get("image_processor") if name == WHOLE_PROCESSOR and isinstance(got, Mapping) else got
        if got is None:
            continue
        if not isinstance(got, Mapping):
            raise DataError(
                f"{name} holds {type(got).__name__}, not an object with the fields of a processor of pictures"
            )
        mean, std = list(tower.form.mean), list(tower.form.std)
        wanted = {"patch_size": tower.patch, "merge_size": tower.merge, "image_mean": mean, "image_std": std}
        for field, value in wanted.items():
            if got.get(field) is not None and not _about_equal(got[field], value):
                raise DataError(
                    f"{name} has {field} {got[field]}, but the model takes {value}; write that, or leave it out"
                )
        return name, got
    return "", None


def _with_bounds(form: PictureForm, name: str, got: Mapping[str, object]) -> PictureForm:
    """The form with the bounds on pixels that a file gives; each may stand in one of two places.

    Args:
      name: of the file.
      got: its fields.

    Raises:
      DataError: a bound is no whole number from 1, or the lower one is above the upper one.
    """
    size = got.get("size")
    if size is not None and not isinstance(size, Mapping):
        raise DataError(f"{name} has size {size!r}, not an object with shortest_edge and longest_edge in pixels")
    bounds = {"min_pixels": form.min_pixels, "max_pixels": form.max_pixels}
    words = {bound: f"the {value} that {bound} is by default" for bound, value in bounds.items()}
    for bound, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        places = {bound: got.get(bound), f"size/{edge}": (size or {}).get(edge)}
        place, value = next(((x, y) for x, y in places.items() if y is not None), (bound, bounds[bound]))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DataError(f"{name} has {place} {value!r}; it must be a whole number of pixels from 1, or be left out")
        if any(x is not None for x in places.values()):
            words[bound] = f"{place} {value}"
        bounds[bound] = value
    if bounds["min_pixels"] > bounds["max_pixels"]:
        raise DataError(
            f"{name} has bounds the wrong way round: {words['min_pixels']} is above {words['max_pixels']}; write a "
            "max_pixels of at least min_pixels"
        )
    return form._replace(**bounds)


def _about_equal(got: Any, expected: Any) -> bool:
    """True for numbers, or lists of numbers, that agree to 1e-6."""
    try:
        return np.shape(got) == np.shape(expected) and np.allclose(got, expected, rtol=0, atol=1e-6)
    except (TypeError, ValueError):
        return False


def with_most_pixels(form: PictureForm, max_pixels: int) -> PictureForm:
    """The form with another upper bound on pixels, which its preprocessor_config.json gives too.

    Raises:
      DataError: the bound is below the lower one, or below the pixels of one token; or pictures have fixed sizes.
    """
    if (fixed := fixed_size(form.tower)) is not None:
        raise DataError(f"the model takes {fixed.words}; leave it out")
    form = _checked_bounds(form._replace(max_pixels=max_pixels))
    return form._replace(files=tuple((name, _bounded_text(name, text, form)) for name, text in form.files))


def _checked_bounds(form: PictureForm) -> PictureForm:
    least = max(form.min_pixels, form.factor**2)
    if form.max_pixels < least:
        why = "of one token" if least == form.factor**2 else "that a picture has at least"
        raise DataError(f"{form.max_pixels} pixels are less than the {least} {why}; give more")
    return form


def _bounded_text(name: str, text: str, form: PictureForm) -> str:
    """The text of a processor's file with the bounds of a form; files of other names are as they were."""
    values = json.loads(text)
    fields = {PROCESSOR: values, WHOLE_PROCESSOR: values.get("image_processor")}.get(name)
    if fields is None:
        return text
    size = {"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels}
    fields |= {"size": size, "min_pixels": form.min_pixels, "max_pixels": form.max_pixels}
    return json.dumps(values, indent=2) + "\n"


def _processor_text(form: PictureForm, processor_class: str) -> str:
    """The preprocessor_config.json by which a processor of transformers takes pictures in this form."""
    from funrl.models.vision.config import FRAMES

    kind = "Qwen2VLImageProcessor"
    fields: Mapping[str, Any] = {
        "patch_size": form.tower.patch,
        "merge_size": form.tower.merge,
        "temporal_patch_size": FRAMES,
        "size": {"shortest_edge": form.min_pixels, "longest_edge": form.max_pixels},
        "min_pixels": form.min_pixels,
        "max_pixels": form.max_pixels,
    }
    if (fixed := fixed_size(form.tower)) is not None:
        kind = f"{processor_class.removesuffix('Processor')}ImageProcessor"
        fields = fixed.fields
    colours = {"image_mean": list(form.tower.form.mean), "image_std": list(form.tower.form.std)}
    values = {"image_processor_type": kind, "processor_class": processor_class, **colours, **fields}
    return json.dumps(values, indent=2) + "\n"


def with_picture_form(tokenizer: Any, form: PictureForm | None) -> Any:
    """The tokenizer as one that reads pictures in this form, or none; see `picture_form_of`.

    Where it is saved beside a model, so are the files of the form.
    """
    tokenizer.picture_form = form
    tokenizer.processor_files = () if form is None else form.files
    return tokenizer


def picture_form_of(tokenizer: object) -> PictureForm | None:
    """The form in which a tokenizer's model takes pictures; None: it sees none."""
    return getattr(tokenizer, "picture_form", None)


def pictures_of(record: Mapping[str, object], tokenizer: object) -> list[Any]:
    """The pictures of a record, as it has them: those of its messages, or else of its own field.

    Raises:
      DataError: they are no list, or the tokenizer's model sees none.
    """
    named = next((name for name in PICTURE_COLUMNS if record.get(name) is not None), None)
    given: Any = [] if named is None else record[named]
    if named == "images" and (isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__")):
        raise DataError(f"'images' must be a list of pictures, not {type(given).__name__}")
    pictures = list(given) if named != "image" else [given]
    inner = [x for name in ("prompt", "messages") for x in inner_pictures(record.get(name))]
    if inner and pictures:
        raise DataError(f"the messages have pictures of their own, and so has the field {named!r}; leave one out")
    if picture_form_of(tokenizer) is None and (inner or pictures or _has_places(record)):
        raise DataError("the record has pictures, and the model reads text only; leave them out, or give another model")
    return inner or pictures


def _has_places(record: Mapping[str, object]) -> bool:
    """True if messages of a record have parts for pictures."""
    lists = (value for value in record.values() if isinstance(value, list))
    messages = (message for value in lists for message in value if isinstance(message, Mapping) and "role" in message)
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)


def inner_pictures(messages: object) -> list[Any]:
    """The pictures that parts of messages hold themselves."""
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if isinstance(part, Mapping) and part.get("image") is not None]


class ExpandedTokens(NamedTuple):
    """Token ids with a placeholder for each token of the pictures, and the values of these."""

    tokens: list[int]
    owned: OwnedLines


def reading_of(tokenizer: object) -> PictureReading | None:
    """The way to read pictures in the form of a tokenizer's model, as `patches_of`; None: that sees none."""
    form = picture_form_of(tokenizer)
    return None if form is None else PictureReading(_reader(form), form.counts_as_alone)


def _reader(form: PictureForm) -> ReadPatches:
    return lambda picture, alone: patches_of(read_picture(picture), form, alone)


def expand_placeholders(
    tokens: Sequence[int],
    pictures: Sequence[object],
    form: PictureForm,
    read: ReadPatches | None = None,
    together: Sequence[int] | None = None,
) -> ExpandedTokens:
    """Token ids with all placeholders.

    Args:
      tokens: with one placeholder a picture; without any, the pictures come before them.
      pictures: as the record has them.
      form: of the model.
      read: patches of a picture; None: `patches_of`.
      together: for each picture, how many pictures stand together with it; None: all do.

    Raises:
      DataError: there are other placeholders than pictures, or a picture cannot be used.
    """
    import torch

    from funrl.kinds import owned_lines
    from funrl.models.vision.config import CHANNELS
    from funrl.models.vision.grids import picture_tokens
    from funrl.models.vision.inputs import GRIDS, PATCHES

    tower = form.tower
    places = sum(token == tower.placeholder for token in tokens)
    if pictures and not places:
        around = [x for x in (tower.begin, tower.placeholder, tower.end) if x is not None]
        first = _tokens_before_pictures(tokens, form)
        tokens = [*tokens[:first], *around * len(pictures), *tokens[first:]]
    elif places != len(pictures):
        raise DataError(
            f"there are {places} places for pictures (token {tower.placeholder}) and {len(pictures)} pictures; a text "
            "may not hold the placeholder by itself"
        )
    read = read or _reader(form)
    together = together or [len(pictures)] * len(pictures)
    seen = [read(x, form.counts_as_alone(count)) for x, count in zip(pictures, together, strict=True)]
    counts = iter([picture_tokens(grid, tower) for _, grid in seen])
    ids = [i for token in tokens for i in [token] * (next(counts) if token == tower.placeholder else 1)]
    none = np.zeros((0, CHANNELS, tower.patch, tower.patch), dtype=np.uint8)
    values = {
        PATCHES: torch.from_numpy(seen[0][0] if len(seen) == 1 else np.concatenate([none, *(x for x, _ in seen)])),
        GRIDS: torch.tensor([grid for _, grid in seen], dtype=torch.int64).reshape(-1, 2),
    }
    return ExpandedTokens(ids, owned_lines(values))


def _tokens_before_pictures(tokens: Sequence[int], form: PictureForm) -> int:
    """Number of the first tokens of a text that come before its pictures, where it has no place for them."""
    return int(form.bos is not None and list(tokens[:1]) == [form.bos])


def one_placeholder_each(tokens: Sequence[int], owned: OwnedLines, form: PictureForm) -> list[int]:
    """Token ids as they were before `expand_placeholders`."""
    from funrl.models.vision.inputs import GRIDS, collapsed, grids_of

    return collapsed(form.tower, tokens, grids_of(owned.values[GRIDS]))


def flags_after(tokens: Sequence[int], flags: Sequence[bool], new: ExpandedTokens, form: PictureForm) -> list[bool]:
    """Flags of the tokens of `expand_placeholders`: false at placeholders and at what was put before the text.

    Args:
      tokens, flags: of the text before.
    """
    placeholder = form.tower.placeholder
    old = [flag for token, flag in zip(tokens, flags, strict=True) if token != placeholder]
    before = sum(token != placeholder for token in new.tokens) - len(old)
    first = _tokens_before_pictures(tokens, form)
    rest = iter([*old[:first], *[False] * before, *old[first:]])
    return [token != placeholder and next(rest) for token in new.tokens]


def read_picture(given: Any) -> Any:
    """A picture of Pillow in red, green and blue; transparency is dropped, as in transformers.

    Raises:
      DataError: it is absent, broken or huge, or Pillow is not installed.
    """
    pillow = _pillow()
    if isinstance(given, pillow.Image):
        return given.convert("RGB")
    if isinstance(given, np.ndarray):
        try:
            return pillow.fromarray(given).convert("RGB")
        except (TypeError, ValueError) as error:
            shape = list(given.shape)
            raise DataError(f"an array {shape} of {given.dtype} is no picture; give uint8 [H, W, 3]") from error
    with _opened(given) as picture:
        return picture.convert("RGB")


def stored_pixels(given: Any) -> int:
    """Number of pixels of a picture as it is given; of bytes and files the head is read. Raises: as `read_picture`."""
    if isinstance(given, _pillow().Image):
        return given.width * given.height
    if isinstance(given, np.ndarray):
        return math.prod(given.shape[:2])
    with _opened(given) as picture:
        return picture.width * picture.height


@contextlib.contextmanager
def _opened(given: object) -> Iterator[Any]:
    """The picture of a path or of bytes, whose pixels are not decoded yet. Raises: DataError."""
    pillow = _pillow()
    source, name = _source(given)
    try:
        with pillow.open(source, formats=FILE_FORMATS) as picture:
            if picture.width * picture.height > MOST_STORED_PIXELS:
                raise DataError(f"the picture {name} has {picture.width} x {picture.height} pixels; resize it")
            yield picture
    except FileNotFoundError:
        raise DataError(f"the picture {name} is not there") from None
    except pillow.DecompressionBombError:
        raise DataError(f"the picture {name} has more than {MOST_STORED_PIXELS} pixels; resize it") from None
    except (OSError, SyntaxError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = " ".join(str(error).split())
        raise DataError(f"the picture {name} cannot be read: {reason}") from None


@functools.cache
def _pillow() -> Any:
    """The module of Pillow that has pictures. Raises: DataError, it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("pictures are read by Pillow: pip install 'funrl[vision]'") from None
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # `_opened` has a bound of its own
    return Image


def _source(given: object) -> tuple[Any, str]:
    """A path or a file of bytes, and what errors call it."""
    if isinstance(given, Mapping):
        inner = next((given[key] for key in ("bytes", "path", "image") if given.get(key) is not None), None)
        return _source(inner)
    if isinstance(given, bytes | bytearray):
        return io.BytesIO(given), f"of {len(given)} bytes"
    if isinstance(given, str) and given.startswith("data:"):
        try:
            return io.BytesIO(base64.b64decode(given.partition(",")[2], validate=True)), "in base64"
        except ValueError:
            raise DataError(f"the picture {given[:40]}... is no base64") from None
    if isinstance(given, str | Path) and str(given):
        return str(given), str(given)
    what = "an empty text" if given == "" else type(given).__name__
    raise DataError(f"a picture is a path, bytes, base64 or an object with one of these, not {what}")


def picture_url(pixels_HWC: np.ndarray) -> str:
    """A PNG in base64, as records have pictures, of uint8 [H, W, 3]. Raises: DataError, Pillow is not installed."""
    file = io.BytesIO()
    _pillow().fromarray(pixels_HWC).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def patches_of(picture: object, form: PictureForm, alone: bool = True) -> tuple[np.ndarray, tuple[int, int]]:
    """Patches [P, 3, side, side] of a picture in the order of its tokens, and its grid.

    Args:
      picture: of Pillow.
      form: of the model.
      alone: the prompt has no other picture.

    Raises:
      DataError: it is too long for its width.
    """
    tower = form.tower
    parts, grid = picture_parts(picture, form, alone)
    order = "(rows y h) (columns x w) c -> (rows columns y x) c h w"
    sides = {"y": tower.merge, "x": tower.merge, "h": tower.patch, "w": tower.patch}
    pixels = [np.asarray(part, dtype=np.uint8) for part in parts]
    # What fills no block at the lower and right sides is left out.
    whole = [x[: x.shape[0] // form.factor * form.factor, : x.shape[1] // form.factor * form.factor] for x in pixels]
    return np.concatenate([rearrange(x, order, **sides) for x in whole]), grid
