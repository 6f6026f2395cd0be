"""Corpora: UTF-8 text files held as bytes, with the sha256 of what was on disk.

A corpus keeps its text as UTF-8 and decodes it on demand, since one emoji makes a
Python string four bytes a character. The only changes to a file's text are a removed
byte-order mark and CRLF pairs turned into LF.
"""

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import keras

from keras_tinygpt.checks import check_int

SHAKESPEARE_NAME = "shakespeare"
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
    "tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
EMBEDDED_NAME = "five-nights"
KNOWN_NAMES = (SHAKESPEARE_NAME, EMBEDDED_NAME)

_PACKAGE = Path(__file__).resolve().parents[1]
_CHUNK_BYTES = 1 << 20
# UTF-32-LE starts with the mark of UTF-16-LE, so the longer marks are tried first.
_FOREIGN_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


@dataclass(frozen=True)
class Corpus:
    """A text with a name.

    Attributes:
        name: the file's name without its folder, or the known name it was loaded by.
        data: the text as UTF-8, without a byte-order mark, with LF line ends.
        sha256: hexadecimal sha256 of the file's bytes as found on disk.
    """

    name: str
    data: bytes = field(repr=False)
    sha256: str

    @property
    def text(self) -> str:
        """The whole text, decoded anew at each access."""
        return self.data.decode("utf-8")

    def iter_text(self, chunk_bytes: int = _CHUNK_BYTES) -> Iterator[str]:
        """Yields the text in pieces of about `chunk_bytes` bytes of UTF-8."""
        check_int("chunk_bytes", chunk_bytes)
        return _iter_utf8(self.data, chunk_bytes, self.name)


def load_corpus(source: str | os.PathLike) -> Corpus:
    """Loads a UTF-8 text file or a corpus known by name.

    Args:
        source: path of a text file; or the string "shakespeare", which is downloaded
            once into Keras' cache (`~/.keras/datasets`); or the string "five-nights",
            which comes with this package. A known name wins over a file of that name
            in the working directory; pass "./shakespeare" or a `Path` for the file.

    Raises:
        FileNotFoundError: there is no such file.
        IsADirectoryError: the path is a directory.
        PermissionError: the file may not be read.
        ConnectionError: "shakespeare" could not be downloaded, or has changed there.
        ValueError: the file is empty or is not UTF-8 text, or `source` is not a path.
    """
    usable = isinstance(source, (str, os.PathLike)) and str(source)
    if not usable or "\0" in str(source):
        raise ValueError(f"source must be a path or a known name, got {source!r}")
    if source == SHAKESPEARE_NAME:
        return _load_file(_download_shakespeare(), SHAKESPEARE_NAME)
    if source == EMBEDDED_NAME:
        return _load_file(_find_embedded(), EMBEDDED_NAME)
    path = Path(source)
    return _load_file(path, path.name)


def _load_file(path: Path, name: str) -> Corpus:
    data = _read_bytes(path)
    sha256 = hashlib.sha256(data).hexdigest()
    _check_text(data, repr(str(path)))
    data = data.removeprefix(codecs.BOM_UTF8)
    data = data.replace(b"\r\n", b"\n")  # apart, so that at most two copies live
    return Corpus(name=name, data=data, sha256=sha256)


def _read_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():  # opening one is a PermissionError on Windows
            raise IsADirectoryError(
                f"source must be a text file, got the directory {str(path)!r}"
            )
        return path.read_bytes()
    except FileNotFoundError:
        message = f"source must be an existing text file, got {str(path)!r}"
        if path.name == str(path) and "." not in path.name:
            message += f" (known names: {', '.join(KNOWN_NAMES)})"
        raise FileNotFoundError(message) from None


def _check_text(data: bytes, label: str) -> None:
    """Raises ValueError unless `data` is a UTF-8 text of at least one character."""
    for mark, encoding in _FOREIGN_MARKS:
        if data.startswith(mark):
            raise ValueError(
                f"{label} must be UTF-8 text, got {encoding}; convert it first, "
                f"as with: iconv -f {encoding} -t UTF-8"
            )
    if not data.removeprefix(codecs.BOM_UTF8):
        raise ValueError(f"{label} must hold text, got an empty file")
    offset = data.find(b"\0")
    if offset >= 0:
        raise ValueError(
            f"{label} must be UTF-8 text, got a binary file: "
            f"byte 0x00 at offset {offset}"
        )
    for _ in _iter_utf8(data, _CHUNK_BYTES, label):
        pass


def _iter_utf8(data: bytes, chunk_bytes: int, label: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), chunk_bytes):
        stop = start + chunk_bytes
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(data[start:stop], stop >= len(data))
        except UnicodeDecodeError as error:
            offset = start - pending + error.start
            raise ValueError(
                f"{label} must be UTF-8 text, got a binary file or another encoding: "
                f"byte 0x{data[offset]:02x} at offset {offset}"
            ) from None
        if text:
            yield text


def _download_shakespeare() -> Path:
    try:
        path = keras.utils.get_file(
            fname="tinyshakespeare.txt",
            origin=SHAKESPEARE_URL,
            file_hash=SHAKESPEARE_SHA256,
            hash_algorithm="sha256",
        )
    except Exception as error:  # get_file raises bare Exception when offline
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"{SHAKESPEARE_NAME!r} could not be downloaded ({reason}); "
            f"pass the path of a copy of {SHAKESPEARE_URL} instead"
        ) from error
    return Path(path)


def _find_embedded() -> Path:
    """Returns the embedded corpus: inside a wheel, else in the source tree."""
    packaged = _PACKAGE / "_data" / f"{EMBEDDED_NAME}.txt"
    if packaged.exists():
        return packaged
    return _PACKAGE.parent / "data" / f"{EMBEDDED_NAME}.txt"
