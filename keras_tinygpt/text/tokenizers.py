"""Character and byte tokenizers: lossless maps between strings and integer ids.

A character is one Unicode code point; nothing is normalised, so every Python string,
lone surrogates included, survives encoding, decoding and saving. There are no special
tokens and no merges.
"""

import codecs
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_tinygpt.checks import check_choice, check_ids, check_int
from keras_tinygpt.text.corpus import Corpus

FORMAT_VERSION = 1
_CHUNK_CHARACTERS = 1 << 20
# Short, since one decoding error costs a copy of the rest of its chunk.
_CHUNK_DECODED_BYTES = 1 << 12


class Tokenizer:
    """What the tokenizers share; subclasses set `kind` and `vocab_size`."""

    kind: str
    vocab_size: int
    concatenates = True  # whether the ids of a joined text are its pieces' ids, joined

    @property
    def ids_dtype(self) -> np.dtype:
        """The smallest unsigned dtype that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: str, unknown: str = "error", dtype=np.int32) -> np.ndarray:
        """Returns the ids (n,) of `text` as `dtype`.

        Args:
            text: any string; an empty one gives an empty array.
            unknown: what to do with a character outside the vocabulary: "error",
                "drop" (leave it out), or a character of the vocabulary to use
                in its place.
            dtype: an integer dtype that holds every id.

        Raises:
            ValueError: a character is unknown and `unknown` is "error", or an argument
                is not as above.
        """
        check_text("text", text)
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu" or np.iinfo(dtype).max < self.vocab_size - 1:
            raise ValueError(
                f"dtype must be an integer type that holds {self.vocab_size - 1}, "
                f"got {dtype}"
            )
        starts = range(0, len(text), _CHUNK_CHARACTERS)
        pieces = (text[start : start + _CHUNK_CHARACTERS] for start in starts)
        chunks = self.iter_encode(pieces, unknown)
        return _collect(chunks, self._most_ids(len(text)), dtype)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the tokenizer as JSON in plain ASCII."""
        content = json.dumps(self.get_config(), ensure_ascii=True)
        Path(path).write_text(content + "\n", encoding="ascii")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tokenizer":
        """Reads what `save` wrote; ValueError where the file holds anything else."""
        tokenizer = load_tokenizer(path)
        if not isinstance(tokenizer, cls):
            raise ValueError(
                f"{str(path)!r} must hold a {cls.kind!r} tokenizer, "
                f"got type {tokenizer.kind!r}"
            )
        return tokenizer

    def get_config(self) -> dict[str, Any]:
        """Returns the JSON content as a dictionary."""
        return {"type": self.kind, "version": FORMAT_VERSION}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"


class CharTokenizer(Tokenizer):
    """One id per character of a fixed vocabulary.

    Args:
        vocabulary: the distinct characters in the order of their ids, as a string or
            as a list of one-character strings.

    Raises:
        ValueError: the vocabulary is empty, repeats a character, or has an entry that
            is not one character.

    Example:
    >>> tokenizer = CharTokenizer.from_text("to be")
    >>> tokenizer.encode("bet").tolist()
    [1, 2, 4]
    >>> tokenizer.decode([4, 3, 0, 1, 2])
    'to be'
    """

    kind = "char"

    def __init__(self, vocabulary: str | Sequence[str]):
        _check_vocabulary(vocabulary)
        self._vocabulary = tuple(vocabulary)
        codes = [ord(character) for character in self._vocabulary]
        self._codes = np.array(codes, "<u4")
        # One entry past the highest code stands for all that lie above it.
        self._ids = np.full(max(codes) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes))

    @classmethod
    def from_text(cls, text: str | Iterable[str] | Corpus) -> "CharTokenizer":
        """Returns the tokenizer of the distinct characters of a text, sorted.

        Args:
            text: a string, pieces of one, or a corpus (read piece by piece).
        """
        pieces = text.iter_text() if isinstance(text, Corpus) else text
        if isinstance(pieces, str):
            pieces = [pieces]
        characters: set[str] = set()
        for piece in pieces:
            check_text("each piece of text", piece)
            characters.update(piece)
        if not characters:
            raise ValueError("text must have at least one character, got none")
        return cls(sorted(characters))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "CharTokenizer":
        """Builds the tokenizer from what `get_config` returns."""
        check_version(config)
        vocabulary = config.get("vocabulary")
        if not isinstance(vocabulary, list):
            kind = type(vocabulary).__name__
            raise ValueError(f"vocabulary must be a list of characters, got {kind}")
        return cls(vocabulary)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The characters in the order of their ids."""
        return self._vocabulary

    def iter_encode(
        self, pieces: Iterable[str], unknown: str = "error"
    ) -> Iterator[np.ndarray]:
        """Yields the ids of a text given in pieces; offsets in errors are global."""
        replacement = self._check_unknown(unknown)
        offset = 0
        for piece in pieces:
            codes = np.frombuffer(piece.encode("utf-32-le", "surrogatepass"), "<u4")
            ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
            if np.any(ids < 0):
                if unknown == "error":
                    index = int(np.argmax(ids < 0))
                    raise ValueError(
                        f"text must use the vocabulary's characters only, got "
                        f"{piece[index]!r} (U+{ord(piece[index]):04X}) "
                        f"at offset {offset + index}"
                    )
                if unknown == "drop":
                    ids = ids[ids >= 0]
                else:
                    ids[ids < 0] = replacement
            offset += len(piece)
            yield ids

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of one-dimensional integer `ids`."""
        ids = check_ids(ids, self.vocab_size)
        chunks = (
            self._codes[ids[start : start + _CHUNK_CHARACTERS]]
            for start in range(0, len(ids), _CHUNK_CHARACTERS)
        )
        return "".join(
            chunk.tobytes().decode("utf-32-le", "surrogatepass") for chunk in chunks
        )

    def stream_decoder(self) -> "_CharStreamDecoder":
        """Returns a decoder with `.push(id) -> str` and `.finish() -> str`."""
        return _CharStreamDecoder(self._vocabulary)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "vocabulary": list(self._vocabulary)}

    def _most_ids(self, num_characters: int) -> int:
        return num_characters

    def _check_unknown(self, unknown: str) -> int | None:
        if unknown in ("error", "drop"):
            return None
        if unknown not in self._vocabulary:
            raise ValueError(
                "unknown must be 'error', 'drop' or a character of the vocabulary, "
                f"got {unknown!a}"
            )
        return int(self._ids[ord(unknown)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CharTokenizer):
            return NotImplemented
        return self._vocabulary == other._vocabulary

    def __hash__(self) -> int:
        return hash((self.kind, self._vocabulary))


class ByteTokenizer(Tokenizer):
    """One id per byte of UTF-8: 256 ids, no vocabulary to fit, nothing unknown.

    Lone surrogates are encoded as UTF-8 would encode them if it could. Bytes that are
    not UTF-8 decode to U+FFFD.

    Example:
    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    >>> ByteTokenizer().decode([110, 195, 169])
    'né'
    """

    kind = "byte"
    vocab_size = 256

    @classmethod
    def from_text(cls, text: str | Iterable[str] | Corpus) -> "ByteTokenizer":
        """Returns the tokenizer; the text is not read, as every text fits."""
        del text
        return cls()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ByteTokenizer":
        """Builds the tokenizer from what `get_config` returns."""
        check_version(config)
        return cls()

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The single bytes in the order of their ids."""
        return tuple(bytes([value]) for value in range(self.vocab_size))

    def iter_encode(
        self, pieces: Iterable[str], unknown: str = "error"
    ) -> Iterator[np.ndarray]:
        """Yields the ids of a text given in pieces; `unknown` has no effect here."""
        del unknown
        for piece in pieces:
            yield np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of one-dimensional integer `ids`."""
        return decode_bytes(check_ids(ids, self.vocab_size).astype(np.uint8).tobytes())

    def stream_decoder(self) -> "Utf8StreamDecoder":
        """Returns a decoder with `.push(id) -> str` and `.finish() -> str`."""
        return Utf8StreamDecoder(self.vocabulary)

    def _most_ids(self, num_characters: int) -> int:
        return 4 * num_characters

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer) or NotImplemented

    def __hash__(self) -> int:
        return hash(self.kind)


# By the type that files name; `keras_tinygpt.text.bpe` adds its own.
TOKENIZERS: dict[str, Any] = {"char": CharTokenizer, "byte": ByteTokenizer}


def load_tokenizer(path: str | os.PathLike) -> Any:
    """Reads a saved tokenizer of whichever type the file names.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: the tokenizer needs a package that is missing.
        ValueError: the file is not one this version of the package can read.
    """
    content = Path(path).read_bytes()
    try:
        try:
            config = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tokenizer must be JSON, got {error}") from None
        return tokenizer_from_config(config)
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error}") from None


def tokenizer_from_config(config: Any) -> Any:
    """Builds the tokenizer of whichever type `config`, made by `get_config`, names."""
    if not isinstance(config, dict):
        kind = type(config).__name__
        raise ValueError(f"tokenizer must be a JSON object, got {kind}")
    kind = check_choice("type", config.get("type"), tuple(TOKENIZERS))
    return TOKENIZERS[kind].from_config(config)


def encode_corpus(corpus: Corpus, tokenizer: Any, unknown: str = "error") -> np.ndarray:
    """Returns a corpus' ids (n,) as `tokenizer.ids_dtype`.

    The text is decoded and encoded piece by piece: memory holds the corpus, the ids
    and one piece. `unknown` is as in `encode`.
    """
    chunks = tokenizer.iter_encode(corpus.iter_text(), unknown)
    return _collect(chunks, len(corpus.data), tokenizer.ids_dtype)


class _CharStreamDecoder:
    """Every id is a whole character, so nothing is ever held back."""

    def __init__(self, vocabulary: tuple[str, ...]):
        self._vocabulary = vocabulary

    def push(self, token_id: int) -> str:
        return self._vocabulary[
            check_int("token_id", token_id, 0, len(self._vocabulary) - 1)
        ]

    def finish(self) -> str:
        return ""


class Utf8StreamDecoder:
    """Holds back the bytes of a character until its last one arrives.

    Args:
        vocabulary: the bytes of each token.
    """

    def __init__(self, vocabulary: Sequence[bytes]):
        self._vocabulary = vocabulary
        self._pending = b""

    def push(self, token_id: int) -> str:
        """Returns the characters that are complete with this token."""
        token_id = check_int("token_id", token_id, 0, len(self._vocabulary) - 1)
        data = self._pending + self._vocabulary[token_id]
        text, self._pending = _decode_utf8(data, final=False)
        return text

    def finish(self) -> str:
        """Returns what was held back (as U+FFFD) and starts afresh."""
        text, self._pending = _decode_utf8(self._pending, final=True)
        return text


def decode_bytes(data: bytes) -> str:
    """Returns UTF-8 as text: lone surrogates pass, what is not UTF-8 reads U+FFFD."""
    pieces, pending = [], b""
    for start in range(0, len(data), _CHUNK_DECODED_BYTES):
        stop = start + _CHUNK_DECODED_BYTES
        chunk = pending + data[start:stop]
        text, pending = _decode_utf8(chunk, final=stop >= len(data))
        pieces.append(text)
    return "".join(pieces)


def _decode_utf8(data: bytes, final: bool) -> tuple[str, bytes]:
    """Decodes as errors="replace" does, but lets lone surrogates pass.

    Returns:
        The text, and the bytes of an unfinished character at the end (none if final).
    """
    pieces = []
    while True:
        try:
            text, used = codecs.utf_8_decode(data, "surrogatepass", final)
            pieces.append(text)
            return "".join(pieces), data[used:]
        except UnicodeDecodeError as error:
            valid, rest = data[: error.start], data[error.start :]
            pieces.append(valid.decode("utf-8", "surrogatepass"))
            # The first two of a surrogate's three bytes are an error to the codec.
            if not final and len(rest) == 2 and rest[0] == 0xED and rest[1] in _SECOND:
                return "".join(pieces), rest
            pieces.append("\ufffd")
            data = data[error.end :]


_SECOND = range(0xA0, 0xC0)


def _collect(chunks: Iterable[np.ndarray], most: int, dtype) -> np.ndarray:
    """Joins chunks of at most `most` ids in all; untouched memory costs nothing."""
    ids = np.empty(most, dtype)
    count = 0
    for chunk in chunks:
        ids[count : count + len(chunk)] = chunk
        count += len(chunk)
    ids.resize(count, refcheck=False)
    return ids


def check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a string, got {type(text).__name__}")


def _check_vocabulary(vocabulary: Any) -> None:
    if not isinstance(vocabulary, (str, list, tuple)):
        kind = type(vocabulary).__name__
        raise ValueError(f"vocabulary must be a string or list, got {kind}")
    if not vocabulary:
        raise ValueError("vocabulary must have at least one character, got none")
    seen = set()
    for index, character in enumerate(vocabulary):
        if not isinstance(character, str) or len(character) != 1:
            raise ValueError(
                f"vocabulary must hold single characters, got {character!a} "
                f"at index {index}"
            )
        if character in seen:
            raise ValueError(
                f"vocabulary must hold distinct characters, got {character!a} again "
                f"at index {index}"
            )
        seen.add(character)


def check_version(config: dict[str, Any]) -> None:
    version = check_int("version", config.get("version"))
    if version > FORMAT_VERSION:
        raise ValueError(
            f"version must be at most {FORMAT_VERSION}, got {version}, "
            "which a newer keras_tinygpt wrote"
        )
