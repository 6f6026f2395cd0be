"""Character and byte tokenizers as Hugging Face tokenizer.json, and back."""

from typing import Any

from keras_tinygpt.text import BPETokenizer, ByteTokenizer, CharTokenizer
from keras_tinygpt.text.bpe import byte_alphabet


def write_tokenizer(
    tokenizer: BPETokenizer | ByteTokenizer | CharTokenizer,
) -> dict[str, Any]:
    """The content of a tokenizer.json that gives the same ids.

    Characters are a vocabulary of words of one character each; bytes are byte pairs
    without merges.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.content
    content = {"version": "1.0", "added_tokens": [], "normalizer": None}
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary = {character: b for b, character in enumerate(byte_alphabet())}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        return {
            **content,
            "pre_tokenizer": {**level, "use_regex": False},
            "decoder": {**level, "use_regex": False},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
    vocabulary = {character: i for i, character in enumerate(tokenizer.vocabulary)}
    return {
        **content,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"(?m:.)|\n"},
            "behavior": "Isolated",
            "invert": False,
        },
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": vocabulary,
            "unk_token": tokenizer.vocabulary[0],
        },
    }


def read_characters(content: dict[str, Any]) -> CharTokenizer | None:
    """The tokenizer, if the content is one of characters as written above."""
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != "WordLevel":
        return None
    vocabulary = sorted(model.get("vocab", {}).items(), key=lambda item: item[1])
    return CharTokenizer([character for character, _ in vocabulary])
