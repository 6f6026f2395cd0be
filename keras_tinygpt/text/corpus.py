"""Corpora: UTF-8 text files held as bytes, with the sha256 of what was on disk.

A corpus keeps its text as UTF-8 and decodes it on demand, since one emoji makes a
Python string four bytes a character. The only changes to a file's text are a removed
byte-order mark and CRLF pairs turned into LF; where several files are one corpus, each
but the last ends with a line end.
"""

import codecs
import glob
import hashlib
import os
import re
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
_PATTERN = re.compile(r"[*?[]")
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
        name: the name of the file or folder, or the known name it was loaded by.
        data: the text as UTF-8, without a byte-order mark, with LF line ends.
        sha256: hexadecimal sha256 of the bytes of the files as found on disk.
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
    """Loads UTF-8 text files, or a corpus known by name, into memory.

    Args:
        source: path of a text file; of a folder, for the .txt files in it; a pattern
            with *, ? or [] (and ** for folders of any depth), for the files that match,
            in the order of their paths; or the string "shakespeare", which is
            downloaded once into Keras' cache (`~/.keras/datasets`); or the string
            "five-nights", which comes with this package. A known name wins over a file
            of that name in the working directory; pass "./shakespeare" or a `Path`.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: a file may not be read.
        ConnectionError: "shakespeare" could not be downloaded, or has changed there.
        ValueError: a file is empty or is not UTF-8 text, or `source` is not a path.
    """
    name, paths = find_texts(source)
    digest, texts = hashlib.sha256(), []
    for path in paths:
        data = _read_bytes(path)
        digest.update(data)
        texts.append(clean_text(data, repr(str(path))))
        if path != paths[-1] and not texts[-1].endswith(b"\n"):
            texts.append(b"\n")
    return Corpus(name=name, data=b"".join(texts), sha256=digest.hexdigest())


def find_texts(source: str | os.PathLike) -> tuple[str, list[Path]]:
    """The name of a corpus and its files; arguments and errors as in `load_corpus`."""
    usable = isinstance(source, (str, os.PathLike)) and str(source)
    if not usable or "\0" in str(source):
        raise ValueError(f"source must be a path or a known name, got {source!r}")
    if source == SHAKESPEARE_NAME:
        return SHAKESPEARE_NAME, [_download_shakespeare()]
    if source == EMBEDDED_NAME:
        return EMBEDDED_NAME, [_find_embedded()]
    path, pattern = Path(source), None
    if path.is_dir():
        pattern = os.path.join(glob.escape(str(path)), "*.txt")
    elif not path.exists() and _PATTERN.search(str(path)):
        pattern = str(path)
    if pattern is None:
        return path.name, [path]
    found = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    found = [file for file in found if file.is_file()]
    if not found:
        raise FileNotFoundError(f"source must match text files, none are {pattern!r}")
    if path.is_dir():
        return path.resolve().name, found
    return Path(os.path.commonpath([file.resolve() for file in found])).name, found


def clean_text(data: bytes, label: str, offset: int = 0) -> bytes:
    """Text as a corpus holds it; ValueError unless it is UTF-8 of a character or more.

    Args:
        data: content of a file, or a part of it that ends where a character does.
        label: what the message calls the file.
        offset: where in the file the part begins.
    """
    _check_text(data, label, offset)
    if offset == 0:
        data = data.removeprefix(codecs.BOM_UTF8)
    return data.replace(b"\r\n", b"\n")  # apart, so that at most two copies live


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        message = f"source must be an existing text file, got {str(path)!r}"
        if path.name == str(path) and "." not in path.name:
            message += f" (known names: {', '.join(KNOWN_NAMES)})"
        raise FileNotFoundError(message) from None


def _check_text(data: bytes, label: str, base: int) -> None:
    """Raises ValueError unless `data` is a UTF-8 text of at least one character."""
    for mark, encoding in _FOREIGN_MARKS:
        if base == 0 and data.startswith(mark):
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
            f"byte 0x00 at offset {base + offset}"
        )
    for _ in _iter_utf8(data, _CHUNK_BYTES, label, base):
        pass


def _iter_utf8(
    data: bytes, chunk_bytes: int, label: str, base: int = 0
) -> Iterator[str]:
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
                f"byte 0x{data[offset]:02x} at offset {base + offset}"
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
