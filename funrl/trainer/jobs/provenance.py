"""Origin of a run: its recipe, its flags, and digests of the files that it reads.

They stand in config.json and in each checkpoint, so that a resumed run can say what has changed.

| digest of | taken by, and what it costs |
|---|---|
| files of data, rewards and templates, config.json, tokenizers | the first rank before ranks start; 64 MiB of a flag |
| weights | all ranks when they are loaded, each of its own shards: see `weight_digests` |
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funrl.data.cached_datasets import data_digest, files_digest, records_digest, short_digest
from funrl.environments.builtin.load import environment_arguments
from funrl.models import ModelConfig
from funrl.models.flat import saved_fields
from funrl.trainer.settings.checks import DATA_FLAGS, data_files
from funrl.trainer.settings.declaration import SettingsError, parts
from funrl.trainer.settings.scorers import MODEL_FLAGS, Given, model_paths
from funrl.trainer.settings.settings import Settings, flag_value

# Flags of functions in a FILE.py, and of texts that may be in a file.
CODE_FLAGS = ("reward", "env", "curriculum")
TEXT_FLAGS = ("prompt_template", "system_prompt", "few_shot", "chat_template", "tools", "judge_template")
CONFIGS = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
)
WEIGHTS = "model/weights"  # name of a digest that the ranks take
# Fields of a model's config that its function does not depend on, and keys of the config.json of another's code.
NOT_COMPUTED = ("dtype", "bos", "eos", "pad", "generation", "max_positions", "raw")
NOT_COMPUTED_KEYS = (
    "dtype",
    "torch_dtype",
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
PROBES = (
    "The quick brown fox, 1234567890 + 3.14!\n\tdef f(x):  return x",
    "Gr\u00f6\u00dfe na\u00efve \u0395\u03bb\u03bb \u0440\u0443\u0441 \u4e2d\u6587 \u0639\u0631 \U0001f642",
    "27+186=",
)  # texts whose tokens tell two tokenizers with the same vocabulary apart


class Provenance(NamedTuple):
    """Origin of a run's numbers.

    Attributes:
      recipe: name of the recipe; None: an `Algorithm` was given in Python.
      flags: of the start, the recipe's arguments included.
      inputs: digests by what they are of, such as "prompts" and "model/config.json".
    """

    recipe: str | None = None
    flags: Mapping[str, object] = {}
    inputs: Mapping[str, str] = {}


def input_digests(settings: Settings, source: str | None, given: Given | None = None) -> dict[str, str]:
    """Digests of the files that a run reads, and of what a caller in Python gives instead.

    Files that a FILE.py imports are not among them.

    Args:
      settings: with directories instead of names of models.
      source: "module:function" or "FILE.py:function" of the recipe; None: it was given as an object.
      given: in Python.

    Raises:
      SettingsError: a file cannot be read.
    """
    given = given or Given()
    try:
        digests = {"recipe": _code_digest(source), **_model_digests(settings)}
        digests |= {name: _data_digests(settings, name) for name in DATA_FLAGS}
        digests |= {name: _code_digest(flag_value(settings, name)) for name in CODE_FLAGS}
        digests |= {name: _text_digest(flag_value(settings, name)) for name in TEXT_FLAGS}
        arguments = environment_arguments(settings.environments.env_args).values()
        texts = [text for x in arguments for text in (x if isinstance(x, list) else [x]) if isinstance(text, str)]
        digests |= {"env_args": "".join(map(_text_digest, texts))}
    except OSError as error:
        raise SettingsError(f"{error.filename}: it cannot be read: {error.strerror}") from error
    records = "prompts" if settings.examples.data is None else "data"
    digests |= {records: _list_digest(given.records)} if given.records is not None else {}
    digests |= {"eval_data": _list_digest(given.eval_records)} if given.eval_records is not None else {}
    digests |= {"reward": "".join(map(_function_digest, given.rewards))} if given.rewards is not None else {}
    digests |= {"curriculum": _function_digest(given.curriculum)} if given.curriculum is not None else {}
    digests |= {"env": _environment_digest(given.environment)} if given.environment is not None else {}
    return {name: digest for name, digest in digests.items() if digest}


def _model_digests(settings: Settings) -> dict[str, str]:
    """Digests of the small files in the directories of models."""
    digests = {}
    for name in MODEL_FLAGS:
        paths = model_paths(settings, name)
        for rest, path in paths.items():
            if not Path(path).is_dir():
                continue
            which = name if len(paths) == 1 else f"{name}{rest}"
            digests |= {f"{which}/{file}": _there({"": Path(path) / file}) for file in CONFIGS}
            digests[f"{which}/tokenizer"] = _there({file: Path(path) / file for file in TOKENIZER_FILES})
    return digests


def _there(files: Mapping[str, Path]) -> str:
    """The digest of those files that exist; "" where none does."""
    files = {name: file for name, file in files.items() if file.is_file()}
    return files_digest(files) if files else ""


def _data_digests(settings: Settings, flag: str) -> str:
    digests = [data_digest(file.path) for file in data_files(settings, flag)]
    return digests[0] if len(digests) == 1 else short_digest(repr(digests).encode()) if digests else ""


def _code_digest(text: str | None) -> str:
    """The digest of the files that hold functions such as "a.py:f,module:g@0.5"; "" where they are this package's."""
    files = {}
    for name in (part.rpartition(":")[0] for part in parts(text)):
        name = name if Path(name).is_file() else name.rpartition(":")[2]  # behind the name of a framework
        file = name if name.endswith(".py") else getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not name.startswith("funrl."):
            files[Path(file).name] = Path(file)
    return _there(files)


def _text_digest(text: str | None) -> str:
    """The digest of the file in FILE or FILE:n; "" of a text that is none."""
    places = [] if text is None else [text, text.rpartition(":")[0]]
    file = next((place for place in places if os.path.isfile(place)), None)
    return "" if file is None else files_digest({"": Path(file)})


def _list_digest(records: object) -> str:
    """The digest of records that are a list; "" of what can be read once only."""
    return records_digest(records) if isinstance(records, Sequence) else ""


def _function_digest(function: Callable[..., object]) -> str:
    """The digest of a function's text; "" where Python does not have it."""
    function = getattr(function, "function", function)
    try:
        return short_digest(inspect.getsource(function).encode())
    except (OSError, TypeError):
        return ""


def _environment_digest(environment: Any) -> str:
    """The digest of the text of an environment's function, class or tools; "" where it is one of this package's."""
    if isinstance(environment, (list, tuple)):
        return "".join(map(_environment_digest, environment))
    code = environment if inspect.isroutine(environment) or isinstance(environment, type) else type(environment)
    return "" if code.__module__.startswith("funrl.") else _function_digest(code)


def model_function(config: ModelConfig) -> dict[str, object]:
    """The fields of a model's config that its function depends on, as JSON has them."""
    fields = {name: value for name, value in saved_fields(config).items() if name not in NOT_COMPUTED}
    foreign = config.foreign.items()
    fields |= {f"config.json {name}": value for name, value in foreign if name not in NOT_COMPUTED_KEYS}
    return json.loads(json.dumps(fields))


@functools.lru_cache(maxsize=8)
def tokenizer_digest(tokenizer: Any) -> str:
    """The digest of what a tokenizer does: its vocabulary, the ends of a text, and the tokens of a few texts.

    It does not depend on how its files are written, nor on the version that wrote them.
    """
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos")]
    behaviour = [sorted(tokenizer.get_vocab().items()), special, [_tokens(tokenizer, text) for text in PROBES]]
    return short_digest(json.dumps(behaviour).encode())


def _tokens(tokenizer: Any, text: str) -> list[int] | None:
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception:  # of a tokenizer that does not know all characters
        return None
