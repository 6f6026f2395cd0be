"""Reads a transformers folder: config.json, model.safetensors and a tokenizer.

Folders are local; nothing is downloaded and no code in them is run.
"""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.archive import check_size
from keras_tinygpt.checks import check_choice, check_int
from keras_tinygpt.models.gpt import GPT, GPTConfig
from keras_tinygpt.pretrained.layouts import FAMILIES, Family, Tensor
from keras_tinygpt.pretrained.tokens import read_characters
from keras_tinygpt.text import BPETokenizer, CharTokenizer

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
# Causal masks and frequencies that older versions of transformers saved as well.
BUFFERS = re.compile(r"(\.attn\.(masked_)?bias|rotary_emb\.inv_freq)$")


def is_pretrained(path: Path) -> bool:
    """Whether `path` is a folder as transformers writes them."""
    weights = ((path / name).is_file() for name in (WEIGHTS, INDEX))
    return (path / CONFIG).is_file() and any(weights)


def read_pretrained(
    path: Path, max_sequence_length: int | None = None, dtype: Any = None
) -> tuple[GPT, BPETokenizer | CharTokenizer | None, dict[str, Any]]:
    """Returns the model, the tokenizer if the folder has one, and where they are from.

    Arguments and errors are those of `keras_tinygpt.from_pretrained`.
    """
    if not is_pretrained(path):
        raise FileNotFoundError(
            f"{path} must be a folder with {CONFIG} and {WEIGHTS} (or {INDEX})"
        )
    content = _read_json(path / CONFIG)
    kind = check_choice("model_type", content.get("model_type"), tuple(FAMILIES))
    config = FAMILIES[kind].read(content)
    window = config.max_sequence_length
    if max_sequence_length is not None:
        check_int("max_sequence_length", max_sequence_length, 1, window)
        config = dataclasses.replace(config, max_sequence_length=max_sequence_length)
    tensors = _read_tensors(path)
    check_size(config, sum(tensor.nbytes for tensor in tensors.values()))
    model = GPT(config, dtype=dtype)
    _set_weights(model, config, FAMILIES[kind], tensors)
    tokenizer, said = _read_tokenizer(path, config.vocab_size)
    metrics = {"source": {"model_type": kind, "window": window, "tokenizer": said}}
    return model, tokenizer, metrics


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors of the folder's files, by name."""
    library = safetensors_library()
    names = [WEIGHTS]
    if not (path / WEIGHTS).is_file():
        places = _read_json(path / INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(
                f"{path / INDEX} must have a weight_map that names files, got "
                f"{places!r}"
            )
        names = sorted(set(map(str, places.values())))
    tensors = {}
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{path / INDEX} must name files beside it, got {name!r}")
        try:
            tensors |= library.numpy.load_file(path / name)
        except library.SafetensorError as error:
            raise ValueError(f"{path / name} cannot be read: {error}") from None
    return tensors


def safetensors_library() -> Any:
    """The safetensors package; ImportError with the extra to install if missing."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "transformers folders need a package: pip install 'keras-tinygpt[gpt2]' "
            f"({error})"
        ) from error
    return safetensors


def _set_weights(
    model: keras.Model, config: GPTConfig, family: Family, found: dict[str, np.ndarray]
) -> None:
    """Gives each weight its value; ValueError if one is missing or of another shape."""
    found = {name.removeprefix(family.prefix): value for name, value in found.items()}
    tensors = {tensor.path: tensor for tensor in family.tensors(config)}
    read = {"lm_head.weight"}  # a tied head may be there as well
    for weight in model.weights:
        if weight.path in tensors:  # all but the states of dropouts
            tensor = tensors[weight.path]
            weight.assign(_join(tensor, found, tuple(weight.shape)))
            read.update(tensor.names)
    unread = [name for name in found if name not in read and not BUFFERS.search(name)]
    if unread:
        raise ValueError(
            f"{WEIGHTS} must hold the tensors of its {CONFIG} only, got {unread[0]}"
        )


def _join(
    tensor: Tensor, found: dict[str, np.ndarray], shape: tuple[int, ...]
) -> np.ndarray:
    missing = [name for name in tensor.names if name not in found]
    if missing and tensor.is_bias and len(missing) == len(tensor.names):
        return np.zeros(shape, "float32")
    if missing:
        raise ValueError(f"{WEIGHTS} must have the tensor {missing[0]}, got none")
    parts = [found[name].astype("float32") for name in tensor.names]
    value = np.concatenate([p.T if tensor.transposed else p for p in parts], axis=-1)
    if tensor.path.startswith("position_embedding"):
        value = value[: shape[0]]  # of a window made shorter
    if value.shape != shape:
        raise ValueError(
            f"tensor {tensor.names[0]} must give a weight of shape {shape}, "
            f"got {value.shape}"
        )
    return value


def _read_tokenizer(
    path: Path, vocab_size: int
) -> tuple[BPETokenizer | CharTokenizer | None, str]:
    """The tokenizer and its file, or None and why there is none."""
    has_files = all((path / name).is_file() for name in ("vocab.json", "merges.txt"))
    if not has_files and not (path / "tokenizer.json").is_file():
        return None, "none: the folder has no tokenizer.json, vocab.json and merges.txt"
    used = "tokenizer.json" if (path / "tokenizer.json").is_file() else "vocab.json"
    try:
        if used == "tokenizer.json":
            characters = read_characters(_read_json(path / used))
            if characters is not None and characters.vocab_size == vocab_size:
                return characters, used
        return BPETokenizer.from_file(path, vocab_size), used
    except ValueError as error:
        return None, f"none: {error}"
