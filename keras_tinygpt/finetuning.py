"""Fine-tuning: low-rank adapters in files of their own, and new characters.

An adapter adds a product of two small matrices to a kernel that stays as it is. The
layers are Keras' own `enable_lora`; what is here chooses them, and keeps the small
matrices apart from the model they belong to.

Reference: Hu et al., 2021.
"""

import dataclasses
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import check_pair, plain_model
from keras_tinygpt.checks import check_float, check_int
from keras_tinygpt.files import replace_file
from keras_tinygpt.models import GPTConfig, build_gpt, build_lstm
from keras_tinygpt.models.initialization import fingerprint_weights
from keras_tinygpt.text import CharTokenizer

FORMAT_VERSION = 1
MATRICES = ("lora_kernel_a", "lora_kernel_b")
_DESCRIPTION = "description"


def add_adapters(model: keras.Model, rank: int, alpha: float | None = None) -> None:
    """Gives each Dense layer but the head an adapter; nothing else trains any more.

    The model computes what it did before until the adapters are trained.

    Args:
        model: from `build_gpt`, `load` or `from_pretrained`, quantized or not.
        rank: of the product that is added to a kernel.
        alpha: the product is multiplied by alpha / rank; None means rank.

    Raises:
        ValueError: the model has adapters, or no layer that could have one.
    """
    check_int("rank", rank)
    if alpha is not None:
        check_float("alpha", alpha, low_open=True)
    layers = _dense_layers(model)
    if not layers:
        raise ValueError("model must have a Dense layer beside its head, got none")
    if any(layer.lora_enabled for layer in layers.values()):
        raise ValueError("model must have no adapters yet, got one that has")
    for layer in layers.values():
        layer.enable_lora(rank, lora_alpha=alpha)
    for weight in model.weights:
        weight.trainable = weight.name in MATRICES
    # What Keras compiled computes without them.
    model.train_function = model.test_function = model.predict_function = None


def save_adapters(path: str | os.PathLike, model: keras.Model) -> Path:
    """Writes the adapters alone, as an .npz file, whole or not at all.

    Args:
        path: of the file, ending in .npz.
        model: one with adapters.

    Returns:
        The path.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {str(path)!r}")
    layers = {
        name: layer
        for name, layer in _dense_layers(model).items()
        if layer.lora_enabled
    }
    if not layers:
        raise ValueError("model must have adapters, got none (see add_adapters)")
    first = next(iter(layers.values()))
    description = {
        "format_version": FORMAT_VERSION,
        "rank": first.lora_rank,
        "alpha": first.lora_alpha,
        "model": _base_fingerprint(model),
    }
    arrays = {
        f"{name}/{matrix}": keras.ops.convert_to_numpy(getattr(layer, matrix))
        for name, layer in layers.items()
        for matrix in MATRICES
    }
    arrays[_DESCRIPTION] = np.array(json.dumps(description))
    replace_file(path, lambda temporary: np.savez(temporary, **arrays))
    return path


def load_adapters(path: str | os.PathLike, model: keras.Model) -> None:
    """Gives `model` the adapters of a file, in place of its own if it has some.

    Args:
        path: what `save_adapters` wrote.
        model: with the weights that the adapters were trained on.

    Raises:
        ValueError: the file is damaged, or belongs to another model.
    """
    description, arrays = _read_adapters(Path(path))
    rank, alpha = description["rank"], description["alpha"]
    if description["model"] != _base_fingerprint(model):
        raise ValueError(
            f"{path} belongs to other weights: the model's fingerprint is not the one "
            "its adapters were trained on"
        )
    layers = _dense_layers(model)
    shapes = {}
    for name, layer in layers.items():
        rows = _kernel(layer).shape[0]
        shapes[f"{name}/{MATRICES[0]}"] = (rows, rank)
        shapes[f"{name}/{MATRICES[1]}"] = (rank, layer.units)
    if {name: array.shape for name, array in arrays.items()} != shapes:
        raise ValueError(f"{path} is damaged: it must hold two matrices a Dense layer")
    if not any(layer.lora_enabled for layer in layers.values()):
        add_adapters(model, rank, alpha)
    for name, layer in layers.items():
        if (layer.lora_rank, layer.lora_alpha) != (rank, alpha):
            raise ValueError(
                f"adapters must have rank={rank} and alpha={alpha} as in {path}, got "
                f"{layer.lora_rank} and {layer.lora_alpha}"
            )
        for matrix in MATRICES:
            getattr(layer, matrix).assign(arrays[f"{name}/{matrix}"])


def _read_adapters(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Description and matrices of a file."""
    try:
        # NumPy leaves a file open that it cannot read.
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file}
        description = json.loads(str(arrays.pop(_DESCRIPTION)))
        check_int("format_version", description["format_version"], 1, FORMAT_VERSION)
        check_int("rank", description["rank"])
        check_float("alpha", description["alpha"], low_open=True)
        str(description["model"])
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} holds no adapters: {error}") from error
    return description, arrays


def _dense_layers(model: keras.Model) -> dict[str, keras.layers.Dense]:
    """The layers that have an adapter, or may get one, by the path of their kernel."""
    return {
        _kernel(layer).path: layer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.Dense) and layer.name != "head"
    }


def _kernel(layer: keras.layers.Dense) -> keras.Variable:
    """The layer's own matrix, whatever is added to it."""
    return next(weight for weight in layer.weights if weight.name == "kernel")


def _base_fingerprint(model: keras.Model) -> str:
    """The fingerprint of the model's weights without its adapters."""
    return fingerprint_weights(w for w in model.weights if w.name not in MATRICES)


def extend_vocabulary(
    model: keras.Model, tokenizer: CharTokenizer, text: str, seed: int = 0
) -> tuple[keras.Model, CharTokenizer]:
    """A model and a tokenizer that know the characters of `text` too.

    Old characters keep their ids and their weights; the logits of old characters are
    the same. The rows of new ones start as `seed` would start them in a new model.

    Args:
        model: from `build_gpt` or `build_lstm`; adapters are added to their kernels.
        tokenizer: its tokenizer.
        text: characters that are known already are passed over.
        seed: of the new rows.

    Returns:
        The new model, to be compiled, and the new tokenizer.

    Raises:
        ValueError: the model is quantized, or the two do not belong together.
    """
    if not isinstance(tokenizer, CharTokenizer):
        raise ValueError(
            f"tokenizer must be a CharTokenizer, got {type(tokenizer).__name__}"
        )
    check_pair(model, tokenizer)
    if model.quantization is not None:
        raise ValueError(f"model must not be quantized, got {model.quantization}")
    new = sorted(set(text) - set(tokenizer.vocabulary))
    tokenizer = CharTokenizer([*tokenizer.vocabulary, *new])
    config = dataclasses.replace(model.config, vocab_size=tokenizer.vocab_size)
    build = build_gpt if isinstance(config, GPTConfig) else build_lstm
    larger = build(config, seed=seed, dtype=model.dtype_policy)
    old = {weight.path: weight for weight in plain_model(model).weights}
    for weight in larger.weights:
        value = keras.ops.convert_to_numpy(weight).copy()
        known = keras.ops.convert_to_numpy(old[weight.path])
        value[tuple(slice(size) for size in known.shape)] = known
        weight.assign(value)
    return larger, tokenizer
