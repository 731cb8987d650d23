"""Reading and writing of Hugging Face directories: config.json, generation_config.json and safetensors.

Names are strict: a tensor that is missing, unexpected or of the wrong shape is an error before any weight is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout
from funrl.models.config import Config, ModelError, architecture, config_from_hf, config_to_hf
from funrl.models.config_fields import check_config_fields
from funrl.models.decoder import decoder_model
from funrl.models.families import FAMILIES
from funrl.models.fp8_files import FP8, check_scales, fp8_blocks, is_beside_fp8, without_quantization
from funrl.models.generation_config import GENERATION, with_generation_config
from funrl.models.left_out import is_redundant
from funrl.models.model import Model
from funrl.models.names import UNEMBED, Stored, by_expert, fused, stored_in
from funrl.models.resize import extended, is_of_vocabulary
from funrl.models.value_head import HEAD, is_token_classifier, with_value_head
from funrl.models.weight_dtypes import weight_dtype
from funrl.models.weight_files import INDEX, WHOLE, read_json, weight_tables
from funrl.models.weight_slices import check_tied, read_part, tensor_slices

FLOATS = ("F64", "F32", "BF16", "F16")
SEQUENCES, TOKENS = "ForSequenceClassification", "ForTokenClassification"  # classes of models with a value head


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
        check_config_fields(raw)
        raw = without_quantization(raw)
        if (head := _head_of(raw)) is not None:
            return _classifier(raw, code, *head)
        config, make = _config_of(raw, code)
        beside = file.with_name(GENERATION)
        if file.name == "config.json" and beside.exists():
            file, generation = beside, read_json(beside)
            config = with_generation_config(config, generation)
            file = file.with_name("config.json")
        return make(config)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    except Exception as error:  # transformers raises what it likes, in several lines
        said = " ".join(str(error).split())
        raise ModelError(f"{file}: it describes no model ({type(error).__name__}: {said})") from error


def _classifier(raw: Mapping[str, Any], code: str, labels: int, bias: bool) -> Model:
    try:
        config, make = _config_of(raw, code)
        return with_value_head(make(config), labels, bias)
    except ModelError as error:
        raise ModelError(
            f"{raw['architectures'][0]}: only a classifier on a causal language model that this package computes can "
            f"score: {error}"
        ) from error


def _config_of(raw: Mapping[str, Any], code: str) -> tuple[Config, Callable[[Config], Model]]:
    """The record of a config.json, and what makes a model of it."""
    problem = None
    if code != "hf":
        try:
            return config_from_hf(raw), decoder_model
        except ModelError as error:
            if code == "native":
                raise
            problem = error
    from funrl.models.hf_module import check_module, module_config, module_model

    def checked(config: Config) -> Model:
        model = module_model(config)
        check_module(model)
        return model

    try:
        return module_config(raw), checked
    except ModelError as error:
        raise ModelError(str(error) if problem is None else f"{problem}; {error}") from None


def find_directory(model: str | Path) -> Path:
    """Directory of a model that is given by it, or by its name in the local Hugging Face cache; nothing is downloaded.

    What is neither comes back as it is, for the caller to refuse.
    """
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
    found: dict[str, tuple[tuple[int, ...], str, str]] = {}
    for file, table in weight_tables(folder).items():
        for name, entry in table.items():
            found[name] = (tuple(entry["shape"]), entry["dtype"], file.name)
    expected = {name: shape for one in _stored(model, found).values() for name, shape in one.tensors.items()}
    missing = sorted(set(expected) - set(found))
    dtypes = {name: dtype for name, (_, dtype, _) in found.items()}
    extra = [n for n in set(found) - set(expected) if not is_redundant(n, config) and not is_beside_fp8(n, dtypes)]
    if missing:
        raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if extra:
        raise ModelError(
            f"{folder}: {len(extra)} tensors have no place in a {_architecture(model)}, the first is {min(extra)}"
        )
    blocks = fp8_blocks(read_json(folder / "config.json"))
    for name, shape in expected.items():
        got, dtype, file = found[name]
        if got != shape:
            raise ModelError(f"{folder / file}: {name} has shape {list(got)}, config.json says {list(shape)}")
        if dtype == FP8:
            check_scales(name, found, blocks, folder)
        elif dtype not in FLOATS:
            raise ModelError(f"{folder / file}: {name} has dtype {dtype}, supported are {list(FLOATS)}")
    if config.tied and model.unembed is not None and not config.module and UNEMBED in found:
        if found[UNEMBED][1] == FP8:
            check_scales(UNEMBED, found, blocks, folder)
        embed = model.names["embed"][0]
        check_tied(folder / found[UNEMBED][2], embed, tensor_slices(folder))
    return model


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
    layouts: trees.Tree | None = None,
    model: Model | None = None,
) -> tuple[Model, trees.Tree]:
    """A model and its weights from a Hugging Face directory.

    Args:
      path: the directory.
      dtype: of the weights; None: as in config.json.
      mesh: the devices; None: the CPU.
      layouts: one `Layout` per weight; this rank then reads only its own part. None: whole tensors.
      model: the model, if `check_directory` has made it already; `with_vocabulary` may have given it more token ids.

    Raises:
      ModelError: as `check_directory`.
    """
    model = check_directory(path) if model is None else model
    wanted = dtype or getattr(torch, model.config.dtype)
    device = torch.device("cpu") if mesh is None else mesh.device
    read = weight_reader(path, model, wanted)

    def part(name: str, x: Tensor, layout: Layout | None = None) -> Tensor:
        box = layout.box(mesh.rank) if layout is not None and mesh is not None else None
        return read(name, box).to(device)

    rest = () if layouts is None else (layouts,)
    return model, trees.map_named(part, model.shapes, *rest)


def weight_reader(path: str | Path, model: Model, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function (name of a weight, box=None) -> the weight, or the part of it in the box, in a dtype.

    Args:
      path: a Hugging Face directory.
      model: by `check_directory`; `with_vocabulary` may have given it more token ids.
    """
    tables = weight_tables(Path(path))
    stored = _stored(model, {name for table in tables.values() for name in table})
    tensor, shapes = tensor_slices(Path(path), tables), {name: tuple(x.shape) for name, x in trees.named(model.shapes)}

    def read(name: str, box: tuple[tuple[int, int], ...] | None = None) -> Tensor:
        one, kind = stored[name], weight_dtype(name, dtype)
        box = tuple((0, n) for n in shapes[name]) if box is None else box
        if one.experts:
            inner = tuple(slice(*b) for b in box[1:])
            return torch.stack([tensor(there)[inner].to(kind) for there in one.experts[slice(*box[0])]])
        held = tensor(one.name)
        if is_of_vocabulary(name) and held.get_shape()[0] < shapes[name][0]:
            return extended(held, box, kind)
        return read_part(held, one, shapes[name], box).to(kind)

    return read


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
    named = ((model.names[name][0], x.detach().reshape(model.names[name][1])) for name, x in trees.named(params))
    write(path, model, named, tokenizer, max_shard_bytes)


def check_savable(model: Model) -> None:
    """Raise ModelError where `save` would, as far as the model alone tells."""
    config_to_hf(model.config)
    _architecture(model)
    if model.config.module and model.value is not None:
        from funrl.models.hf_skeleton import check_classifier

        check_classifier(model.config, _class_of_heads(model), dict(model.names.values()))


def has_token_classifier(config: Config) -> bool:
    """True if transformers has a token classifier of this family, which can hold two labels."""
    return config.family in FAMILIES and FAMILIES[config.family].token_classifier is not None


def write(
    path: str | Path,
    model: Model,
    named_weights: Iterable[tuple[str, Tensor]],
    tokenizer: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """`save` of weights that arrive one by one, by the names and in the shapes of `model.names`, such as from
    `funrl.mesh.reshard.export_weights`. No more than one file's are held. Without any, config and tokenizer alone.
    """
    folder, config = Path(path), model.config
    folder.mkdir(parents=True, exist_ok=True)
    dtype, partials, shards, total = config.dtype, [], [], 0
    for shard in _split(by_expert(fused(config.family, model.names, named_weights)), max_shard_bytes):
        dtype = str(max(shard.values(), key=Tensor.numel).dtype).removeprefix("torch.")
        partials.append(folder / f"model-{len(shards) + 1:05}.safetensors.partial")
        partials[-1].write_bytes(b"")
        mode = partials[-1].stat().st_mode  # the umask's; safetensors makes files that only their owner reads
        save_file(shard, partials[-1], metadata={"format": "pt"})
        partials[-1].chmod(mode)
        shards.append(list(shard))
        total += trees.nbytes(shard)
    count = len(shards)
    files = [WHOLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for partial, file in zip(partials, files, strict=True):
        os.replace(partial, folder / file)
    for old in folder.iterdir():  # a stale file of weights would be loaded instead of the new ones
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", old.name) and old.name not in files:
            old.unlink()
    if count > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    raw = config_to_hf(config) | {"dtype": dtype, "torch_dtype": dtype}
    padding = getattr(tokenizer, "pad_token_id", None)
    if padding is not None and (config.pad is None or model.value is not None):
        raw["pad_token_id"] = padding
    if model.value is not None:
        labels = ("wrong", "right") if len(model.shapes[HEAD]) == 2 else ("reward",)
        raw |= {"architectures": [_architecture(model)], "id2label": {str(i): name for i, name in enumerate(labels)}}
        raw["label2id"] = {name: i for i, name in enumerate(labels)}
        raw.pop("num_labels", None)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / GENERATION).unlink(missing_ok=True)  # another model's
    if config.generation and model.value is None:
        (folder / GENERATION).write_text(json.dumps(json.loads(config.generation), indent=2) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _directory(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a directory, nor the name of a model in the local Hugging Face cache")
    if not any(folder.iterdir()):
        raise ModelError(f"{folder} is empty; a model directory has config.json and *.safetensors")
    return folder


def _head_of(raw: Mapping[str, Any]) -> tuple[int, bool] | None:
    """The labels of the classifier that a config.json describes, and whether its head has a bias; None: it is none."""
    kind = next((str(kind) for kind in raw.get("architectures") or [] if str(kind).endswith((SEQUENCES, TOKENS))), None)
    if kind is None:
        return None
    labels, tokens = raw.get("num_labels") or len(raw.get("id2label") or (0, 1)), kind.endswith(TOKENS)
    if labels != 1 and not (tokens and labels == 2):  # transformers' default is two
        supported = "one (a reward) or two (a step is wrong, or right)" if tokens else "one (a reward)"
        raise ModelError(f"{kind} has {labels} labels, supported is {supported}")
    return labels, tokens and bool(raw.get("token_classification_bias", True))


def _architecture(model: Model) -> str:
    """The name in transformers of the class of this model."""
    config = model.config
    if model.value is not None:
        return _class_of_heads(model)
    return architecture(config) if config.module else FAMILIES[config.family].architecture


def _class_of_heads(model: Model) -> str:
    """The name in transformers of the class of a model with a value head."""
    config, tokens = model.config, is_token_classifier(model)
    if config.module:
        from funrl.models.hf_skeleton import classifier_name

        name = classifier_name(config, tokens)
    else:
        family = FAMILIES[config.family]
        name = family.token_classifier if tokens else family.classifier
    if name is None:
        kind = "token" if tokens else "sequence"
        raise ModelError(f"transformers has no {kind} classifier for {config.family}: it cannot hold a reward")
    return name


def _stored(model: Model, found: Collection[str]) -> Mapping[str, Stored]:
    """Place of each weight in files with tensors of the names `found`.

    Files for transformers' own code may have older names than it has now.
    """
    stored = stored_in(model.config.family, model.names)
    if not model.config.module:
        return stored
    from funrl.models.hf_skeleton import CPU, names_in_files, skeleton

    there = names_in_files(skeleton(model.config, CPU, False), [one.name for one in stored.values()], found)
    return {name: one._replace(name=there.get(one.name, one.name)) for name, one in stored.items()}


def _split(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Shards of at most `limit` bytes, in order and on the CPU; a tensor is never split."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, x in tensors:
        if shard and size + x.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name], size = x.to("cpu").contiguous(), size + x.nbytes
    if shard:
        yield shard
