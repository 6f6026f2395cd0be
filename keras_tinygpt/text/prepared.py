"""Token ids in files, as `prepare` and nanoGPT write them, read as memory maps.

A part of a text is a file of little-endian ids, two or four bytes each and nothing
else, under nanoGPT's names. `prepare` adds its tokenizer and a description with the
checksums of all files.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from keras_tinygpt.checks import check_choice
from keras_tinygpt.files import file_sha256, read_sealed
from keras_tinygpt.text.bpe import BPETokenizer
from keras_tinygpt.text.corpus import KNOWN_NAMES
from keras_tinygpt.text.tokenizers import load_tokenizer

FORMAT_VERSION = 1
PART_FILES = {"train": "train.bin", "valid": "val.bin", "test": "test.bin"}
DESCRIPTION, TOKENIZER = "prepared.json", "tokenizer.json"
DTYPES = ("uint16", "uint32")


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A text as token ids on disk.

    Attributes:
        name: of the text.
        sha256: of the text's files; of the ids where nothing is known of the text.
        tokenizer: what made the ids; None if the folder holds none.
        parts: "train", "valid" and maybe "test" to read-only memory maps (n,).
        characters: how many characters each part has, as far as that is known.
    """

    name: str
    sha256: str
    tokenizer: Any
    parts: dict[str, np.ndarray]
    characters: dict[str, int]


def load_ids(path: str | os.PathLike, dtype: str = "uint16") -> np.ndarray:
    """Maps a file of token ids into memory, such as nanoGPT's train.bin.

    Args:
        path: a file of little-endian ids and nothing else.
        dtype: "uint16", as in nanoGPT's files, or "uint32".

    Returns:
        Read-only array (n,); what is read of it takes memory that the system may have
        back at any time.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or ends within an id.
    """
    path = Path(path)
    kind = np.dtype(check_choice("dtype", dtype, DTYPES)).newbyteorder("<")
    size = path.stat().st_size
    if size == 0 or size % kind.itemsize:
        raise ValueError(
            f"{path} must hold ids of {kind.itemsize} bytes each, got {size} bytes"
        )
    return np.memmap(path, kind, mode="r")


def is_prepared(path: str | os.PathLike) -> bool:
    """Whether `path` is a folder of token ids; the name of a corpus is not."""
    folder = Path(path)
    return path not in KNOWN_NAMES and any(
        (folder / name).is_file() for name in (DESCRIPTION, "train.bin")
    )


def load_prepared(path: str | os.PathLike) -> Prepared:
    """Reads a folder that `prepare` wrote, or one with nanoGPT's train.bin and val.bin.

    The files of `prepare` are compared with their checksums. Ids without a description
    are taken to be two bytes each; text needs a tokenizer beside them: a tokenizer.json
    of this package or of Hugging Face, or GPT-2's vocab.json and merges.txt.

    Raises:
        FileNotFoundError: there is no such folder, or a file is missing.
        ValueError: a file is damaged.
    """
    folder = Path(path)
    if not is_prepared(folder):
        raise FileNotFoundError(
            f"prepared ids are a folder with {DESCRIPTION} or train.bin, got {folder}"
        )
    if not (folder / DESCRIPTION).is_file():
        return _load_bare(folder)
    content = read_sealed(folder / DESCRIPTION, FORMAT_VERSION)
    try:
        dtype, files = content["dtype"], dict(content["files"])
        parts = {part: PART_FILES[part] for part in content["tokens"]}
        name, sha256 = str(content["name"]), str(content["text_sha256"])
        characters = {str(k): int(v) for k, v in content["characters"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / DESCRIPTION} is damaged: {error!r}") from error
    for file in (TOKENIZER, *parts.values()):
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{folder} has no {file}")
        if file_sha256(folder / file) != files.get(file):
            raise ValueError(
                f"{folder / file} is damaged or was replaced: its sha256 is not the "
                f"one in {DESCRIPTION}"
            )
    return Prepared(
        name=name,
        sha256=sha256,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        parts={part: load_ids(folder / file, dtype) for part, file in parts.items()},
        characters=characters,
    )


def _load_bare(folder: Path) -> Prepared:
    """A folder of ids alone, or with a tokenizer."""
    if not (folder / PART_FILES["valid"]).is_file():
        raise FileNotFoundError(f"{folder} has no {PART_FILES['valid']}")
    there = {p: f for p, f in PART_FILES.items() if (folder / f).is_file()}
    tokenizer, characters = None, {}
    names = {file.name for file in folder.iterdir()}
    if TOKENIZER in names or {"vocab.json", "merges.txt"} <= names:
        tokenizer = find_tokenizer(folder)
    parts = {part: load_ids(folder / file) for part, file in there.items()}
    if tokenizer is not None:  # the training part may be long
        held_out = {name: ids for name, ids in parts.items() if name != "train"}
        characters = {n: len(tokenizer.decode(ids)) for n, ids in held_out.items()}
    digests = "".join(file_sha256(folder / file) for file in there.values())
    return Prepared(
        name=folder.resolve().name,
        sha256=hashlib.sha256(digests.encode()).hexdigest(),
        tokenizer=tokenizer,
        parts=parts,
        characters=characters,
    )


def find_tokenizer(path: str | os.PathLike) -> Any:
    """Reads a tokenizer as this package or Hugging Face writes it.

    Args:
        path: a tokenizer.json; or a folder with one, or with GPT-2's two files.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read.
    """
    path = Path(path)
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        return BPETokenizer.from_file(path)
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        content = None  # the reader of our own files says what is wrong
    if isinstance(content, dict) and "type" not in content:
        return BPETokenizer.from_file(file)
    return load_tokenizer(file)
