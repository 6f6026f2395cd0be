"""Byte-pair encoding: frequent strings of bytes as tokens, learned or read from files.

The merges are found and applied by the Hugging Face tokenizers library, which is
imported when a tokenizer is made. Every tokenizer here is byte-level: its vocabulary
holds all 256 single bytes, so no text is unknown.

Reference: Sennrich et al., 2016; Radford et al., 2019 (bytes instead of characters).
"""

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_tinygpt.checks import check_ids, check_int
from keras_tinygpt.text.corpus import Corpus
from keras_tinygpt.text.tokenizers import (
    TOKENIZERS,
    Tokenizer,
    Utf8StreamDecoder,
    check_text,
    check_version,
    decode_bytes,
)

_CHUNK_CHARACTERS = 1 << 16
_SURROGATES = re.compile("([\ud800-\udfff]+)")
# No token of the common splitting rules spans a blank that follows a visible character.
_LAST_WORD_END = re.compile(r".*\S(?= )", re.DOTALL)
END_OF_TEXT = "<|endoftext|>"


class BPETokenizer(Tokenizer):
    """Tokens of one or more bytes; make one with `from_text`, `from_file` or `load`.

    A learned tokenizer is lossless for every Python string: lone surrogates, which
    UTF-8 lacks, become the bytes UTF-8 would give them, one token each. A tokenizer
    read from a file does what the file says: one that normalises text, or adds a blank
    in front of it, gives the changed text back. Bytes that are not UTF-8 decode to
    U+FFFD.

    Unlike characters and bytes, the tokens of a joined text need not be the joined
    tokens of its pieces.

    Args:
        content: of a Hugging Face tokenizer.json, as a dictionary.
        vocab_size: number of ids; None means as many as the content has. Ids beyond
            those, of models with more rows than tokens, decode to nothing.

    Raises:
        ImportError: the tokenizers package is missing.
        ValueError: the content is not a byte-level BPE, or has more than `vocab_size`
            tokens.

    Example:
    >>> tokenizer = BPETokenizer.from_text("low lower lowest " * 9, vocab_size=258)
    >>> [tokenizer.decode([token]) for token in tokenizer.encode("lowly")]
    ['low', 'l', 'y']
    """

    kind = "bpe"
    concatenates = False

    def __init__(self, content: dict[str, Any], vocab_size: int | None = None):
        self._tokenizer = _read_tokenizer(content)
        self._content = json.loads(self._tokenizer.to_str())
        self._vocabulary = _token_bytes(self._tokenizer, vocab_size)
        byte_ids = [self._tokenizer.token_to_id(c) for c in byte_alphabet()]
        if None in byte_ids:
            raise ValueError(
                "vocabulary must hold all 256 single bytes (byte-level BPE), got "
                f"{256 - byte_ids.count(None)} of them"
            )
        self._byte_ids = np.array(byte_ids, "int32")

    @classmethod
    def from_text(
        cls, text: str | Iterable[str] | Corpus, vocab_size: int
    ) -> "BPETokenizer":
        """Learns merges from a text; equal texts give equal tokenizers.

        Args:
            text: a string, pieces of one, or a corpus (read piece by piece).
            vocab_size: most ids, at least 256; a short text gives fewer.
        """
        check_int("vocab_size", vocab_size, 256)
        library = _library()
        pieces = text.iter_text() if isinstance(text, Corpus) else text
        pieces = [pieces] if isinstance(pieces, str) else pieces
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
            add_prefix_space=False
        )
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(byte_alphabet()),
            show_progress=False,
        )
        chunks = (_SURROGATES.sub("", chunk) for chunk in _whole_words(pieces))
        tokenizer.train_from_iterator(chunks, trainer)
        return cls(json.loads(tokenizer.to_str()))

    @classmethod
    def from_file(
        cls, path: str | os.PathLike, vocab_size: int | None = None
    ) -> "BPETokenizer":
        """Reads a Hugging Face tokenizer.json; ValueError if it is not byte-level BPE.

        Args:
            path: the file, or a folder that holds tokenizer.json, or vocab.json and
                merges.txt as GPT-2 has them.
            vocab_size: as in the class.
        """
        path = Path(path)
        if path.is_dir() and not (path / "tokenizer.json").exists():
            return cls(_read_gpt2(path), vocab_size)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = json.loads(path.read_bytes())
            return cls(content, vocab_size)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{str(path)!r}: {error}") from None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "BPETokenizer":
        """Builds the tokenizer from what `get_config` returns."""
        check_version(config)
        return cls(
            config.get("tokenizer"), check_int("vocab_size", config.get("vocab_size"))
        )

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary)

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """The bytes of each token in the order of the ids."""
        return self._vocabulary

    @property
    def content(self) -> dict[str, Any]:
        """The content of a Hugging Face tokenizer.json."""
        return self._content

    def iter_encode(
        self, pieces: Iterable[str], unknown: str = "error"
    ) -> Iterator[np.ndarray]:
        """Yields the ids of a text given in pieces; `unknown` has no effect here.

        A word that goes on in the next piece is encoded as a whole.
        """
        del unknown
        for chunk in _whole_words(pieces):
            for index, part in enumerate(_SURROGATES.split(chunk)):
                if index % 2:
                    data = part.encode("utf-8", "surrogatepass")
                    yield self._byte_ids[np.frombuffer(data, np.uint8)]
                elif part:
                    encoding = self._tokenizer.encode(part, add_special_tokens=False)
                    yield np.array(encoding.ids, "int32")

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of one-dimensional integer `ids`."""
        ids = check_ids(ids, self.vocab_size).tolist()
        return decode_bytes(b"".join(self._vocabulary[token] for token in ids))

    def stream_decoder(self) -> Utf8StreamDecoder:
        """Returns a decoder with `.push(id) -> str` and `.finish() -> str`."""
        return Utf8StreamDecoder(self._vocabulary)

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "tokenizer": self._content,
        }

    def _most_ids(self, num_characters: int) -> int:
        return 4 * num_characters + 64  # a file may add a blank to every chunk

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BPETokenizer):
            return NotImplemented
        return self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash((self.kind, self._vocabulary))


TOKENIZERS[BPETokenizer.kind] = BPETokenizer


def _library() -> Any:
    """The tokenizers package; ImportError with the extra to install if missing."""
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "a BPETokenizer needs a package: pip install 'keras-tinygpt[bpe]' "
            f"({error})"
        ) from error
    return tokenizers


def _read_tokenizer(content: Any) -> Any:
    """The library's tokenizer of a tokenizer.json, without truncation and padding."""
    library = _library()
    model = content.get("model") if isinstance(content, dict) else None
    kind = model.get("type") if isinstance(model, dict) else None
    if kind != "BPE":
        raise ValueError(
            f"content must be a Hugging Face tokenizer with a BPE model, got {kind!r}"
        )
    try:
        tokenizer = library.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"content cannot be read: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_gpt2(folder: Path) -> dict[str, Any]:
    """The content of a tokenizer.json from GPT-2's two files."""
    library = _library()
    files = [folder / "vocab.json", folder / "merges.txt"]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {path.name}")
    try:
        model = library.models.BPE.from_file(*map(str, files))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{folder} has a damaged tokenizer: {error}") from None
    tokenizer = library.Tokenizer(model)
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return json.loads(tokenizer.to_str())


def _token_bytes(tokenizer: Any, vocab_size: int | None) -> tuple[bytes, ...]:
    """The bytes of each id; unused ids have none."""
    vocabulary = tokenizer.get_vocab()
    least = max(vocabulary.values(), default=-1) + 1
    if vocab_size is not None and vocab_size < least:
        raise ValueError(
            f"vocab_size must be at least the {least} tokens of the content, "
            f"got {vocab_size}"
        )
    values = {character: value for value, character in enumerate(byte_alphabet())}
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [b""] * (vocab_size or least)
    for token, index in vocabulary.items():
        if token in added or not values.keys() >= set(token):
            tokens[index] = token.encode("utf-8")
        else:
            tokens[index] = bytes(values[character] for character in token)
    return tuple(tokens)


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(b if b in printable else next(others)) for b in range(256))


def _whole_words(pieces: Iterable[str]) -> Iterator[str]:
    """The text of `pieces` in chunks that end where a word does."""
    held = ""
    for piece in pieces:
        check_text("each piece of text", piece)
        for start in range(0, len(piece), _CHUNK_CHARACTERS):
            held += piece[start : start + _CHUNK_CHARACTERS]
            match = _LAST_WORD_END.match(held)
            if match and len(held) >= _CHUNK_CHARACTERS:
                yield match[0]
                held = held[match.end() :]
    if held:
        yield held
