"""What a .keras file says of itself, checked before Keras builds anything from it."""

import json
import zipfile
from pathlib import Path
from typing import Any

from keras_tinygpt.models import GPT, LSTM, Encoder, EncoderDecoder
from keras_tinygpt.models.configured import ConfiguredModel

CONFIG, WEIGHTS = "config.json", "model.weights.h5"
MEMBERS = {"metadata.json", CONFIG, WEIGHTS}
MAX_EXPANSION = 20  # of a compressed member; Keras stores its own uncompressed
MODELS: dict[str, type[ConfiguredModel]] = {
    f"keras_tinygpt>{kind.__name__}": kind
    for kind in (GPT, LSTM, Encoder, EncoderDecoder)
}


def check_archive(path: Path) -> None:
    """Raises ValueError unless a .keras file holds a model of ours and its weights.

    Nothing is unpacked by the names in the archive, no other class is looked up, and
    what is declared must not be larger than what is there.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        names = sorted(member.filename for member in members)
        if names != sorted(MEMBERS):
            raise ValueError(f"it must hold {sorted(MEMBERS)}, got {names[:9]}")
        for member in members:
            if member.file_size > MAX_EXPANSION * member.compress_size:
                raise ValueError(
                    f"{member.filename} declares {member.file_size:,} bytes, "
                    f"{member.compress_size:,} are there"
                )
        broken = archive.testzip()
        if broken is not None:
            raise ValueError(f"{broken} has another checksum")
        content = json.loads(archive.read(CONFIG))
        weight_bytes = archive.getinfo(WEIGHTS).file_size
    _check_config(content, weight_bytes)


def _check_config(content: Any, weight_bytes: int) -> None:
    try:
        name, config = content["registered_name"], content["config"]
        if name not in MODELS:
            raise ValueError(f"its class must be one of {list(MODELS)}, got {name!r}")
        declared = MODELS[name].config_class(**config["config"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{CONFIG} is damaged: {error!r}") from error
    check_size(declared, weight_bytes)


def check_size(config: Any, weight_bytes: int) -> None:
    """Raises ValueError where the weights of `config` cannot fit into their file."""
    least = config.least_weights()
    if least > 2 * weight_bytes:  # int4 takes half a byte
        raise ValueError(
            f"its config declares {least:,} weights or more, "
            f"its weights are {weight_bytes:,} bytes"
        )
