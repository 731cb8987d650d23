"""Reading and writing of Hugging Face directories: config.json, generation_config.json and safetensors.

Names are strict: a tensor that is missing, unexpected or of the wrong shape is an error before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funrl import trees
from funrl.loading import existing_path
from funrl.mesh.mesh import Mesh, single
from funrl.mesh.plan import Box, volume
from funrl.mesh.reading import TensorFiles, contiguous_layout, read_onto_mesh
from funrl.mesh.rules import Layout, whole_layout
from funrl.models.errors import ModelError
from funrl.models.huggingface.config import (
    REFUSED_FAMILIES,
    ModuleConfig,
    architecture,
    check_config,
    config_from_hf,
    config_to_hf,
)
from funrl.models.huggingface.configs.hf_family import class_name
from funrl.models.huggingface.families import FAMILIES
from funrl.models.huggingface.fp8_files import FP8, check_scales, fp8_blocks, is_beside_fp8, without_quantization
from funrl.models.huggingface.generation_config import GENERATION, with_generation_config
from funrl.models.huggingface.left_out import is_redundant
from funrl.models.huggingface.mxfp4_files import MXFP4, whole_entries
from funrl.models.huggingface.names import UNEMBED, by_expert, fused, names_of, places_in_files
from funrl.models.huggingface.peft_files import ADAPTER_CONFIG, MERGE_ADVICE, is_adapter
from funrl.models.huggingface.resize import extended, is_of_vocabulary
from funrl.models.huggingface.weight_files import read_json, weight_tables, write_weight_files
from funrl.models.huggingface.weight_slices import check_tied, read_part, tensor_slices
from funrl.models.model import Model, ModelConfig
from funrl.models.value_head import HEAD, is_token_classifier, with_value_head
from funrl.models.vision.model import model_of_config
from funrl.models.weight_dtypes import weight_dtype

FILE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
FLOATS = tuple(FILE_DTYPES)
LOADED_BYTES = 512 << 20  # of a rank's weights that are read and exchanged together
# classes of models with a value head
SEQUENCES = "ForSequenceClassification"
TOKEN_CLASSIFIER = "ForTokenClassification"


def load_model(path: str | Path, code: str = "native") -> Model:
    """The model that a directory's config.json describes, without its weights.

    Where there is a generation_config.json beside it, that is read too.

    A `...ForSequenceClassification` with one label, or a `...ForTokenClassification` with one or two, is a decoder with
    a value head.

    Args:
      path: a directory, or a config.json; weights need not be there.
      code: whose code computes it: "native", this package's decoder; "hf", transformers' own; "auto", the decoder where
        it can.

    Raises:
      ModelError: a file is missing, broken or describes a model that is not supported.
    """
    file = Path(path) if Path(path).is_file() else _directory(path) / "config.json"
    raw = read_json(file)
    try:
        check_config(raw)
        raw = without_quantization(raw)
        if (head := _head_of(raw)) is not None:
            return _classifier(raw, code, *head)
        config, make = _config_of(raw, code)
        beside = file.with_name(GENERATION)
        if file.name == "config.json" and beside.exists():
            file = beside
            generation = read_json(beside)
            config = with_generation_config(config, generation)
            file = file.with_name("config.json")
        return make(config)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except Exception as error:  # transformers raises what it likes, in several lines
        reason = " ".join(str(error).split())
        raise ModelError(f"{file}: it describes no model ({type(error).__name__}: {reason})") from error


def _classifier(raw: Mapping[str, Any], code: str, labels: int, bias: bool) -> Model:
    try:
        config, make = _config_of(raw, code)
        return with_value_head(make(config), labels, bias)
    except ModelError as error:
        raise ModelError(
            f"{raw['architectures'][0]}: only a classifier on a causal language model that this package computes can "
            f"score: {error}"
        ) from error


def _config_of(raw: Mapping[str, Any], code: str) -> tuple[ModelConfig, Callable[[Any], Model]]:
    """The record of a config.json, and what makes a model of it."""
    problem = None
    refused = str(raw.get("model_type")) in REFUSED_FAMILIES
    if code != "hf" or refused:
        try:
            return config_from_hf(raw), model_of_config
        except ModelError as error:
            if code == "native" or refused:
                raise
            problem = error
    from funrl.models.huggingface.modules import check_module, module_config, module_model

    def checked(config: ModuleConfig) -> Model:
        model = module_model(config)
        check_module(model, config)
        return model

    try:
        return module_config(raw), checked
    except ModelError as error:
        raise ModelError(str(error) if problem is None else f"{problem}; {error}") from None


def find_directory(model: str | Path) -> Path:
    """Directory of a model that is given by it, or by its name in the local Hugging Face cache; nothing is downloaded.

    A path such as recipes/models/NAME.json may be one of funrl's own files. What is not one of these comes back as it
    is, for the caller to refuse.
    """
    model = existing_path(str(model))
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return Path(model)


def check_directory(path: str | Path, code: str = "native") -> Model:
    """The model of a directory, after a check of everything but the numbers: a few milliseconds, no weight is read.

    Args:
      code: as in `load_model`.

    Raises:
      ModelError: the directory is missing or empty, config.json is missing, broken or not supported, a safetensors
        file is missing or cut short, or a tensor is missing, unexpected, of the wrong shape or not floating point.
    """
    folder = Path(path)
    model = load_model(_directory(folder), code)
    config = model.config
    entries: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for file, table in weight_tables(folder).items():
        for name, entry in table.items():
            entries[name] = (tuple(entry["shape"]), entry["dtype"], file.name)
    entries = whole_entries(entries, folder)
    stored = places_in_files(model, entries)
    places = {name: place for place in stored.values() for name in place.tensors}
    missing = sorted(set(places) - set(entries))
    dtypes = {name: dtype for name, (_, dtype, _) in entries.items()}
    extra = [n for n in set(entries) - set(places) if not is_redundant(n, config) and not is_beside_fp8(n, dtypes)]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if extra:
        raise ModelError(
            f"{folder}: {len(extra)} tensors have no place in a {_architecture(model)}, the first is {min(extra)}"
        )
    blocks = fp8_blocks(read_json(folder / "config.json"))
    for name, kept in places.items():
        got, dtype, file = entries[name]
        if not kept.fits(got):
            raise ModelError(f"{folder / file}: {name} has shape {list(got)}, config.json says {[*kept.tensors[name]]}")
        if dtype == FP8:
            check_scales(name, entries, blocks, folder=folder)
        elif dtype not in (*FLOATS, MXFP4):
            raise ModelError(f"{folder / file}: {name} has dtype {dtype}, supported are {list(FLOATS)}")
    if config.tied and model.unembed is not None and not isinstance(config, ModuleConfig) and UNEMBED in entries:
        if entries[UNEMBED][1] == FP8:
            check_scales(UNEMBED, entries, blocks, folder=folder)
        check_tied(folder / entries[UNEMBED][2], stored["embed"].name, tensor_slices(folder))
    return model


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
    *,
    layouts: trees.Tree | None = None,
    model: Model | None = None,
) -> tuple[Model, trees.Tree]:
    """Load a model and its weights from a Hugging Face directory. Collective: ranks read together, each byte once.

    Args:
      path: the directory, which all ranks of the mesh see.
      dtype: of the weights; None: as in config.json.
      mesh: the devices; None: the CPU alone.
      layouts: one `Layout` per weight: this rank gets its part; None: every rank gets whole tensors.
      model: the model, if `check_directory` has made it already; `with_vocabulary` may have given it more token ids.

    Raises:
      ModelError: as `check_directory`, or a weight cannot be read; the latter on every rank.
    """
    model = check_directory(path) if model is None else model
    mesh = single() if mesh is None else mesh
    stored_dtype: torch.dtype = getattr(torch, model.config.source.dtype)
    if layouts is None:
        layouts = trees.map(lambda x: whole_layout(x.shape, mesh), model.shapes)
    weights = dict(read_weights(path, model, dtype or stored_dtype, wanted=dict(trees.named(layouts)), mesh=mesh))
    return model, trees.map_named(lambda name, _: weights.pop(name), model.shapes)


def read_weights(
    path: str | Path, model: Model, dtype: torch.dtype, *, wanted: Mapping[str, Layout], mesh: Mesh
) -> Iterator[tuple[str, Tensor]]:
    """Read weights of a Hugging Face directory in this rank's parts of their layouts. Collective.

    Each byte of the files is read by one rank, and a few hundred megabytes of weights are in memory twice.

    Args:
      path: the directory, which all ranks of the mesh see.
      model: by `check_directory`; `with_vocabulary` may have given it more token ids.
      dtype: of the weights.
      wanted: layouts of the weights to read, by name.
      mesh: that the layouts are on.

    Raises:
      ModelError: a weight cannot be read; on every rank.
    """
    sent_dtype = _sent_dtype(path, dtype)
    read = weight_reader(path, model, sent_dtype)

    def begin(parts: Mapping[str, Layout]) -> Callable[[], dict[str, Tensor]]:
        return lambda: {name: read(name, layout.box(mesh.rank)).to(mesh.device) for name, layout in parts.items()}

    files = TensorFiles(contiguous_layout, begin, LOADED_BYTES)
    dtypes = {name: weight_dtype(name, sent_dtype) for name in wanted}
    for name, x in read_onto_mesh(wanted, dtypes, files, mesh=mesh):
        yield name, x.to(weight_dtype(name, dtype))


def _sent_dtype(path: str | Path, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which ranks exchange weights: that of the files where it is narrower than the one that is wanted."""
    stored = {entry["dtype"] for table in weight_tables(Path(path)).values() for entry in table.values()}
    file_dtype = FILE_DTYPES.get(next(iter(stored)), dtype) if len(stored) == 1 else dtype
    return file_dtype if file_dtype.itemsize < dtype.itemsize else dtype


def weight_reader(path: str | Path, model: Model, dtype: torch.dtype) -> Callable[[str, Box], Tensor]:
    """A function (name of a weight, box) -> the part of the weight in the box, in a dtype, read without other ranks.

    Args:
      path: a Hugging Face directory.
      model: by `check_directory`; `with_vocabulary` may have given it more token ids.

    The function raises ModelError where a number that it reads is not finite.
    """
    tables = weight_tables(Path(path))
    stored = places_in_files(model, {name for table in tables.values() for name in table})
    tensor = tensor_slices(Path(path), tables)
    shapes = {name: tuple(x.shape) for name, x in trees.named(model.shapes)}

    def read(name: str, box: Box) -> Tensor:
        place = stored[name]
        kind = weight_dtype(name, dtype)
        if not volume(box):
            return torch.empty([high - low for low, high in box], dtype=kind)
        if place.experts:
            inner = tuple(slice(*edge) for edge in box[1:])
            experts = place.experts[slice(*box[0])]
            return torch.stack([_finite(tensor(expert)[inner], expert, path).to(kind) for expert in experts])
        held = tensor(place.name)
        if is_of_vocabulary(name) and held.get_shape()[0] < shapes[name][0]:
            return _finite(extended(held, box, kind), place.name, path)
        return _finite(read_part(held, place, shapes[name], box=box), place.name, path).to(kind)

    return read


def _finite(part: Tensor, name: str, path: str | Path) -> Tensor:
    """The part of a stored tensor that was read. Raises: ModelError, a number of it is NaN or infinite."""
    if part.numel() and not all(bool(torch.isfinite(x)) for x in part.aminmax()):
        bad = int((~torch.isfinite(part)).sum())
        raise ModelError(f"{path}: {bad} numbers of the tensor {name} are NaN or infinite; save the model again")
    return part


def save(
    path: str | Path,
    model: Model,
    params: trees.Tree,
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a directory that transformers loads.

    It is one for `AutoModelForCausalLM`, with the generation_config.json that the model was read with; of a model with
    a value head, one for `AutoModelForSequenceClassification` with one label, or for `AutoModelForTokenClassification`.

    Args:
      path: made where it is absent; older weights in it are replaced.
      model: the dtype in its config is replaced by that of the weights.
      params: whole tensors.
      tokenizer: anything with `save_pretrained`, such as a transformers tokenizer. Its padding token is written to
        config.json where the model has none; with a value head always, for transformers finds the end of a text by it.
      max_shard_bytes: beyond this the weights are split over several files, with an index.
    """
    names = names_of(model)
    named = ((names[name][0], x.detach().reshape(names[name][1])) for name, x in trees.named(params))
    write(path, model, named, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)


def check_savable(model: Model) -> None:
    """Raise ModelError where `save` would, as far as the model alone tells."""
    config_to_hf(model.config)
    _architecture(model)
    if isinstance(model.config, ModuleConfig) and model.value is not None:
        from funrl.models.huggingface.skeletons import check_classifier

        check_classifier(model.config, _architecture(model), dict(names_of(model).values()))


def has_token_classifier(config: ModelConfig) -> bool:
    """True if transformers has a token classifier of this family, which can hold two labels."""
    family = FAMILIES.get(config.source.family)
    return family is not None and family.vision is None and class_of_heads(config, tokens=True) is not None


def write(
    path: str | Path,
    model: Model,
    named_weights: Iterable[tuple[str, Tensor]],
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
    *,
    dtype: str | None = None,
) -> None:
    """`save` of weights that arrive one by one, by the names and in the shapes of `names_of`.

    They may come from `funrl.mesh.reshard.export_weights`. No more than those of one file are held. Without weights,
    only the config and the tokenizer are written.

    Args:
      path, model, tokenizer, max_shard_bytes: as in `save`.
      named_weights: the weights.
      dtype: of the files, such as "bfloat16", but for weights that stay wide; None: as the weights are.

    Raises:
      ModelError: a weight is too large for the dtype.
    """
    folder = Path(path)
    config = model.config
    folder.mkdir(parents=True, exist_ok=True)
    named_weights = named_weights if dtype is None else _cast(model, named_weights, dtype)
    tensors = by_expert(fused(config.source.family, names_of(model), named_weights))
    largest = write_weight_files(folder, tensors, max_shard_bytes)
    if dtype is None:
        dtype = config.source.dtype if largest is None else str(largest).removeprefix("torch.")
    raw = _with_dtype(config_to_hf(config), dtype)
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is not None and (config.special_tokens.pad is None or model.value is not None):
        raw["pad_token_id"] = padding
    if model.value is not None:
        labels = ("wrong", "right") if len(model.shapes[HEAD]) == 2 else ("reward",)
        raw |= {"architectures": [_architecture(model)], "id2label": {str(i): name for i, name in enumerate(labels)}}
        raw["label2id"] = {name: i for i, name in enumerate(labels)}
        raw.pop("num_labels", None)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / GENERATION).unlink(missing_ok=True)  # another model's
    if config.source.generation and model.value is None:
        (folder / GENERATION).write_text(json.dumps(json.loads(config.source.generation), indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        for name, text in getattr(tokenizer, "processor_files", ()):
            (folder / name).write_text(text)


def _cast(model: Model, named_weights: Iterable[tuple[str, Tensor]], dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Weights by the names of files in a dtype, or wider. Raises: ModelError, a number has no place in it."""
    ours = {theirs: name for name, (theirs, _) in names_of(model).items()}
    for name, x in named_weights:
        cast = x.to(weight_dtype(ours[name], getattr(torch, dtype)))
        if cast.dtype == torch.float16 and (count := int((cast.isinf() & x.isfinite()).sum())):
            raise ModelError(f"{count} numbers of {name} are beyond the largest of float16; save it in bfloat16")
        yield name, cast


def _with_dtype(raw: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The fields of a config.json, those of its parts too, with another dtype."""
    parts = {
        name: part | dict.fromkeys(part.keys() & {"dtype", "torch_dtype"}, dtype)
        for name, part in raw.items()
        if name.endswith("_config") and isinstance(part, dict)
    }
    return {**raw, **parts, "dtype": dtype, "torch_dtype": dtype}


def _directory(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a directory, nor the name of a model in the local Hugging Face cache")
    if is_adapter(folder):
        base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        raise ModelError(f"{folder} holds adapters alone, for the base {base}; {MERGE_ADVICE}")
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty; a model directory has config.json and *.safetensors")
    return folder


def _head_of(raw: Mapping[str, Any]) -> tuple[int, bool] | None:
    """The labels of the classifier that a config.json describes, and whether its head has a bias; None: it is none."""
    kind = next(
        (str(kind) for kind in raw.get("architectures") or [] if str(kind).endswith((SEQUENCES, TOKEN_CLASSIFIER))),
        None,
    )
    if kind is None:
        return None
    labels = raw.get("num_labels") or len(raw.get("id2label") or (0, 1))
    tokens = kind.endswith(TOKEN_CLASSIFIER)
    if labels != 1 and not (tokens and labels == 2):  # transformers' default is two
        supported = "one (a reward) or two (a step is wrong, or right)" if tokens else "one (a reward)"
        raise ModelError(f"{kind} has {labels} labels, supported is {supported}")
    return labels, tokens and bool(raw.get("token_classification_bias", True))


def _architecture(model: Model) -> str:
    """The name in transformers of the class of this model."""
    if model.value is None:
        return architecture(model.config)
    tokens = is_token_classifier(model)
    name = class_of_heads(model.config, tokens)
    if name is None:
        kind = "token" if tokens else "sequence"
        raise ModelError(
            f"transformers has no {kind} classifier for {model.config.source.family}: it cannot hold a reward"
        )
    return name


def class_of_heads(config: ModelConfig, tokens: bool) -> str | None:
    """The class of transformers that classifies tokens, or sequences, with a model of text; None: there is none."""
    family = FAMILIES.get(config.source.family)
    if family is not None and family.vision is not None:
        return None
    return class_name(config.source.family, "TOKEN_CLASSIFICATION" if tokens else "SEQUENCE_CLASSIFICATION")
