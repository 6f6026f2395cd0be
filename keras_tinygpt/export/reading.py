"""Reads an exported SavedModel back into a Keras model and a tokenizer.

The weights and the metadata are read; the graphs are not, and no code is run.
"""

from pathlib import Path
from typing import Any

import keras

from keras_tinygpt.archive import check_size
from keras_tinygpt.files import read_sealed
from keras_tinygpt.models.gpt import GPT
from keras_tinygpt.models.lstm import LSTM
from keras_tinygpt.text.tokenizers import tokenizer_from_config

FORMAT_VERSION = 1
GRAPH, METADATA, WEIGHTS = "saved_model.pb", "metadata.json", "variables/variables"
ARCHITECTURES = {"gpt": GPT, "lstm": LSTM}


def is_saved_model(path: Path) -> bool:
    """Whether `path` is a folder with a SavedModel of whatever origin."""
    return (path / GRAPH).is_file()


def read_saved_model(path: Path) -> tuple[keras.Model, Any, dict[str, Any]]:
    """Returns the model, the tokenizer and the metrics of an exported folder.

    Raises:
        FileNotFoundError: if the SavedModel was not written by this package.
        ValueError: if a file is damaged or was written by a newer version.
    """
    metadata = path / "assets" / METADATA
    if not metadata.is_file():
        raise FileNotFoundError(
            f"{path} was not exported by keras_tinygpt: it has no assets/{METADATA}"
        )
    content = read_sealed(metadata, FORMAT_VERSION)
    try:
        architecture = ARCHITECTURES[content["architecture"]]
        config = architecture.config_class(**content["config"])
        check_size(config, sum(file.stat().st_size for file in _weight_files(path)))
        model = architecture(config, seed=content["seed"], dtype="float32")
        tokenizer = tokenizer_from_config(content["tokenizer"])
        paths, metrics = list(content["weights"]), dict(content["metrics"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{metadata} is damaged: {error}") from error
    _read_weights(path, model, paths)
    return model, tokenizer, metrics


def _weight_files(path: Path) -> list[Path]:
    """The files of numbers; the index beside them is not one."""
    return list((path / WEIGHTS).parent.glob(f"{Path(WEIGHTS).name}.data-*"))


def _read_weights(path: Path, model: keras.Model, paths: list[str]) -> None:
    """Gives each weight of `model` its value in the SavedModel."""
    import tensorflow as tf  # Importing it takes seconds: not before it is needed.

    try:
        reader = tf.train.load_checkpoint(str(path / WEIGHTS))
        for weight in model.weights:
            key = f"model_weights/{paths.index(weight.path)}"
            weight.assign(reader.get_tensor(f"{key}/.ATTRIBUTES/VARIABLE_VALUE"))
    except (ValueError, LookupError, tf.errors.OpError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path / WEIGHTS} cannot be read: {reason}") from error
