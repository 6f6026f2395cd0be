"""Tests of keras_tinygpt.text.bpe, and of models whose tokens are byte pairs."""

import doctest
import functools
import json
import re
import sys

import numpy as np
import pytest
from helpers import check_one_line_error
from hypothesis import given
from hypothesis import strategies as st

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.bundle import _cut_stream
from keras_tinygpt.text import bpe, encode_corpus, load_tokenizer

pytest.importorskip("tokenizers", reason="needs the extra [bpe]")

TEXT = "The bell rang twice. Nobody came, nobody's bell; the bell rang again. " * 5
HARD = "a\0e\u0301\U0001f642\U0010ffff\ud83d\ude42\ude42\ud83d\ufeff\r\n\ufffd"
SMALL = [
    *("--hidden-dim", "12", "--num-heads", "2", "--num-layers", "1"),
    *("--max-sequence-length", "16", "--batch-size", "4", "--jit-compile", "False"),
]


@functools.cache
def made(vocab_size=280):
    return tg.BPETokenizer.from_text(TEXT, vocab_size)


def test_docstring_examples():
    assert doctest.testmod(bpe).failed == 0


def test_merges_by_hand():
    """ab and cd are met thrice, abcd twice: the order in which they become tokens."""
    tokenizer = tg.BPETokenizer.from_text("abcd\nabcd\nab\ncd", 259)
    assert tokenizer.vocabulary[256:] == (b"ab", b"cd", b"abcd")
    assert tokenizer.vocabulary[:2] == (b"!", b'"')
    assert tokenizer.encode("xabcda").tolist() == [
        tokenizer.vocabulary.index(token) for token in (b"x", b"abcd", b"a")
    ]
    assert repr(tokenizer) == "BPETokenizer(vocab_size=259)"
    assert sorted(tokenizer.vocabulary[:256]) == [bytes([b]) for b in range(256)]


def test_equal_texts_give_equal_tokenizers():
    again = tg.BPETokenizer.from_text([TEXT[:101], TEXT[101:]], 280)
    corpus = tg.Corpus("x", TEXT.encode(), "")
    assert again == made() == tg.BPETokenizer.from_text(corpus, 280)
    assert hash(again) == hash(made()) and made() != made(279)
    assert made() != tg.ByteTokenizer() and made(100_000).vocab_size < 400


@given(text=st.text(st.characters()))
def test_any_text_survives_whole_and_streamed(text):
    ids = made().encode(text)
    assert ids.dtype == np.int32
    assert made().decode(ids) == text
    stream = made().stream_decoder()
    pieces = [stream.push(token) for token in ids.tolist()]
    assert "".join(pieces) + stream.finish() == text


@given(ids=st.lists(st.integers(0, 279), max_size=31))
def test_any_ids_decode_alike_whole_and_streamed(ids):
    """Random ids are mostly not UTF-8; a stream replaces what decode replaces."""
    stream = made().stream_decoder()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == made().decode(ids)


def test_a_stream_holds_back_half_a_character():
    ids = made().encode("a—é").tolist()
    assert len(ids) == 6
    stream = made().stream_decoder()
    assert [stream.push(token) for token in ids] == ["a", "", "", "—", "", "é"]
    with pytest.raises(ValueError, match="token_id must be between 0 and 279, got 280"):
        stream.push(280)


def test_hard_text_survives_saving(tmp_path):
    path = tmp_path / "tokenizer.json"
    made().save(path)
    path.read_bytes().decode("ascii")
    for loaded in (load_tokenizer(path), tg.BPETokenizer.load(path)):
        assert loaded == made() and loaded.vocabulary == made().vocabulary
        assert loaded.decode(loaded.encode(HARD + TEXT)) == HARD + TEXT
    with pytest.raises(
        ValueError, match="must hold a 'char' tokenizer, got type 'bpe'"
    ):
        tg.CharTokenizer.load(path)


@given(st.data())
def test_pieces_encode_like_the_whole(data):
    """However a text is cut, and however short the chunks are."""
    words = st.sampled_from(["bell ", "  ", "\n", "twice.\r\n", "é", " rang", "\ud800"])
    pieces = data.draw(st.lists(words, max_size=17))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "_CHUNK_CHARACTERS", data.draw(st.integers(1, 7)))
        chunks = list(made().iter_encode(pieces))
    whole = made().encode("".join(pieces))
    assert [i for chunk in chunks for i in chunk.tolist()] == whole.tolist()


def test_a_corpus_encodes_like_its_text():
    corpus = tg.Corpus("x", TEXT.encode(), "")
    ids = encode_corpus(corpus, made())
    assert ids.dtype == made().ids_dtype == np.uint16
    np.testing.assert_array_equal(ids, made().encode(TEXT))
    assert made().encode("").shape == (0,) and made().decode([]) == ""


def test_hugging_face_files_give_the_same_ids(tmp_path):
    import tokenizers

    (tmp_path / "tokenizer.json").write_text(json.dumps(made().content))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for source in (tmp_path, tmp_path / "tokenizer.json"):
        ours = tg.BPETokenizer.from_file(source)
        assert ours == made()
        assert ours.encode(TEXT).tolist() == theirs.encode(TEXT).ids
        assert ours.decode(theirs.encode(TEXT).ids) == TEXT
    (tmp_path / "gpt2").mkdir()
    theirs.model.save(str(tmp_path / "gpt2"))
    gpt2 = tg.BPETokenizer.from_file(tmp_path / "gpt2", vocab_size=287)
    assert gpt2.vocab_size == 287 and gpt2.vocabulary[:280] == made().vocabulary
    np.testing.assert_array_equal(gpt2.encode(TEXT), made().encode(TEXT))
    assert gpt2.decode([286, 0]) == gpt2.vocabulary[0].decode()
    gpt2.save(tmp_path / "saved.json")
    assert load_tokenizer(tmp_path / "saved.json") == gpt2


def test_special_tokens_of_a_file_are_kept(tmp_path):
    vocabulary = {**made().content["model"]["vocab"], "<|endoftext|>": 280}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair in made().content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    tokenizer = tg.BPETokenizer.from_file(tmp_path)
    ids = tokenizer.encode("bell<|endoftext|>The")
    assert ids.tolist().count(280) == 1
    assert tokenizer.decode(ids) == "bell<|endoftext|>The"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting"),
        ("[]", "BPE model, got None"),
        ('{"model": {"type": "WordPiece"}}', "BPE model, got 'WordPiece'"),
        ('{"model": {"type": "BPE"}}', "content cannot be read"),
        (
            '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, '
            '"merges": []}}',
            r"all 256 single bytes \(byte-level BPE\), got 1 of them",
        ),
    ],
)
def test_bad_files(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        tg.BPETokenizer.from_file(tmp_path)
    assert "tokenizer.json" in str(caught.value) and "\n" not in str(caught.value)


def test_other_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no vocab\.json"):
        tg.BPETokenizer.from_file(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("a b")
    with pytest.raises(ValueError, match="damaged tokenizer"):
        tg.BPETokenizer.from_file(tmp_path)
    with pytest.raises(ValueError, match="vocab_size must be at least 256, got 255"):
        tg.BPETokenizer.from_text(TEXT, 255)
    with pytest.raises(ValueError, match="at least the 280 tokens of the content"):
        tg.BPETokenizer(made().content, vocab_size=279)
    with pytest.raises(ValueError, match="each piece of text must be a string"):
        tg.BPETokenizer.from_text([3], 300)
    with pytest.raises(ValueError, match="text must be a string, got bytes"):
        made().encode(b"a")
    with pytest.raises(ValueError, match="dtype must be an integer type that holds"):
        made().encode("a", dtype="uint8")


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'keras-tinygpt\[bpe\]'"):
        tg.BPETokenizer.from_text(TEXT, 300)


def small_model(vocab_size=280):
    config = tg.GPTConfig(vocab_size, 16, 1, 2, hidden_dim=12)
    return tg.build_gpt(config, seed=1)


@pytest.mark.backend
def test_a_bundle_with_byte_pairs(tmp_path):
    path = tg.save(tmp_path / "run", small_model(), made())
    lm = tg.load(path)
    assert lm.tokenizer == made()
    settings = {"seed": 3, "use_cache": False}
    text = lm.generate("The bell", 23, **settings)
    assert text.startswith("The bell")
    assert "The bell" + "".join(lm.stream("The bell", 23, **settings)) == text


def test_stops_are_found_in_the_text_not_in_the_tokens():
    """No token ends where these stops do."""
    lm = tg.LanguageModel(small_model(), made())
    ids = made().encode("again")
    settings = {"seed": 2, "allowed_tokens": ids.tolist(), "use_cache": False}
    text = lm.generate("The", 40, **settings)
    place = text.index("a", 5)
    stop = text[place : place + 3]
    for stops in (stop, [stop, "never"]):
        options = {**settings, "stop": stops}
        expected = text[: text.index(stop, 3)]
        assert lm.generate("The", 40, **options) == expected
        assert "The" + "".join(lm.stream("The", 40, **options)) == expected
        assert lm.generate(["The"], 40, **options) == [expected]


@given(
    text=st.text("ab ", max_size=13),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=3),
    data=st.data(),
)
def test_a_stream_stops_where_the_text_would(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(_cut_stream(iter(pieces), stops)) == expected


def run(*argv):
    cli.main([str(argument) for argument in argv])


def test_train_evaluate_generate_export(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT * 5 + "— end", "utf-8")
    run("train", "a.txt", *SMALL, "--steps", 2, "--tokenizer", "bpe", "--vocab-size",
        290, "--out", "run", "--sample-tokens", 5)  # fmt: skip
    out = capsys.readouterr().out
    assert re.search(r"valid nats +perplexity +bits +bits/char\n", out)
    lm = tg.load("run")
    characters = lm.metrics["characters"]
    assert sum(characters.values()) == len(TEXT) * 5 + 5
    # The dash is in the held-out part: learned on the training part alone.
    assert lm.tokenizer == tg.BPETokenizer.from_text(
        (TEXT * 5)[: characters["train"]], 290
    )
    scores = lm.metrics["scores"]["valid"]
    rate = lm.metrics["split"]["valid"] / characters["valid"]
    by_character = scores["bits_per_token"] * rate
    assert scores["bits_per_character"] == pytest.approx(by_character)
    assert (
        0 < rate < 1
        and "bits_per_character" in (lm.metrics["ngrams"]["3-gram, add 0.1"]["valid"])
    )
    run("evaluate", "run")
    assert f"{by_character:.4f} bits per character" in capsys.readouterr().out
    run("generate", "run", "The bell", "--max-new-tokens", 7, "--no-use-cache")
    assert capsys.readouterr().out.startswith("The bell")
    error = check_one_line_error(capsys, "export", "run", "--format", "onnx")
    assert "CharTokenizer or a ByteTokenizer to be exported in this" in error
    error = check_one_line_error(
        capsys, "train", "a.txt", "--vocab-size", "300", "--out", "other"
    )
    assert "vocab_size needs --tokenizer bpe, got 300 with char" in error
