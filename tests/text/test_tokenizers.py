"""Tests of keras_tinygpt.text.tokenizers."""

import doctest
import json
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT, tiny_shakespeare
from hypothesis import given
from hypothesis import strategies as st

from keras_tinygpt.text import (
    ByteTokenizer,
    CharTokenizer,
    Corpus,
    encode_corpus,
    load_corpus,
    load_tokenizer,
    tokenizers,
)

# NUL, a combining mark, an astral character, the last code point, lone surrogates in
# both orders (a pair of them must not merge into one character).
HARD = "a\0e\u0301\U0001f642\U0010ffff\ud83d\ude42\ude42\ud83d\ufeff\r\n\ufffd"
# Every code point: the default alphabet of text() leaves surrogates out.
any_text = st.text(st.characters())


def test_docstring_examples():
    assert doctest.testmod(tokenizers).failed == 0


def test_characters_are_sorted_and_numbered():
    tokenizer = CharTokenizer.from_text("ROMEO: é\n")
    assert tokenizer.vocabulary == ("\n", " ", ":", "E", "M", "O", "R", "é")
    assert tokenizer.vocab_size == 8
    assert repr(tokenizer) == "CharTokenizer(vocab_size=8)"
    ids = tokenizer.encode("MORE")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [4, 5, 6, 3])
    assert tokenizer.decode(ids) == "MORE"


def test_a_given_order_is_kept():
    for vocabulary in ("zax", ["z", "a", "x"], ("z", "a", "x")):
        tokenizer = CharTokenizer(vocabulary)
        assert tokenizer.encode("axz").tolist() == [1, 2, 0]
        assert tokenizer.decode([0, 1, 2]) == "zax"


def test_pieces_and_corpora_give_the_vocabulary_of_the_whole():
    whole = CharTokenizer.from_text("to — be")
    assert CharTokenizer.from_text(iter(["to ", "", "— be"])) == whole
    assert CharTokenizer.from_text(Corpus("x", "to — be".encode(), "")) == whole
    assert hash(CharTokenizer.from_text(["to — be"])) == hash(whole)
    assert CharTokenizer("ab") != CharTokenizer("ba")
    assert CharTokenizer("ab") != ByteTokenizer() != "byte"
    assert ByteTokenizer.from_text("x") == ByteTokenizer()
    assert len({ByteTokenizer(), ByteTokenizer()}) == 1


@given(text=any_text)
def test_any_text_survives(text):
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text
    if text:
        tokenizer = CharTokenizer.from_text(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.vocabulary == tuple(sorted(set(text)))


@pytest.mark.parametrize("tokenizer", [CharTokenizer.from_text(HARD), ByteTokenizer()])
def test_hard_text_survives_everything(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").read_bytes().decode("ascii")
    for loaded in (
        load_tokenizer(tmp_path / "tokenizer.json"),
        type(tokenizer).load(str(tmp_path / "tokenizer.json")),
    ):
        assert loaded == tokenizer
        assert loaded.vocabulary == tokenizer.vocabulary
        ids = loaded.encode(HARD)
        np.testing.assert_array_equal(ids, tokenizer.encode(HARD))
        assert loaded.decode(ids) == HARD
        stream = loaded.stream_decoder()
        pieces = [stream.push(token_id) for token_id in ids]
        assert "".join(pieces) + stream.finish() == HARD


def test_a_loaded_pair_of_surrogates_stays_two_characters(tmp_path):
    tokenizer = CharTokenizer(["\ud83d", "\ude42", "\U0001f642"])
    tokenizer.save(tmp_path / "a.json")
    assert load_tokenizer(tmp_path / "a.json").vocab_size == 3


def test_long_text_crosses_chunks(monkeypatch):
    monkeypatch.setattr(tokenizers, "_CHUNK_CHARACTERS", 3)
    monkeypatch.setattr(tokenizers, "_CHUNK_DECODED_BYTES", 5)
    for tokenizer in (CharTokenizer.from_text(HARD), ByteTokenizer()):
        ids = tokenizer.encode(HARD * 7)
        assert tokenizer.decode(ids) == HARD * 7
    with pytest.raises(ValueError, match=r"got 'x' \(U\+0078\) at offset 5"):
        CharTokenizer("ab").encode("ababax")


def test_unknown_characters():
    tokenizer = CharTokenizer("ab?")
    with pytest.raises(ValueError, match=r"got '—' \(U\+2014\) at offset 2"):
        tokenizer.encode("ab\u2014a")
    with pytest.raises(ValueError, match=r"got '\\ud800' \(U\+D800\) at offset 0"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match=r"got '@' \(U\+0040\) at offset 1"):
        tokenizer.encode("a@")  # between known characters, not above them
    assert tokenizer.encode("\u2014ab@a", unknown="drop").tolist() == [0, 1, 0]
    assert tokenizer.encode("\u2014ab@a", unknown="?").tolist() == [2, 0, 1, 2, 0]
    assert tokenizer.encode("", unknown="drop").tolist() == []


@pytest.mark.parametrize("unknown", ["x", "ignore", "ab", "", None, 3, ["a"]])
def test_unknown_is_checked_even_where_nothing_is_unknown(unknown):
    for text in ("a", ""):
        with pytest.raises(ValueError, match="unknown must be 'error', 'drop' or"):
            CharTokenizer("ab").encode(text, unknown=unknown)


def test_empty_text_and_ids():
    for tokenizer in (CharTokenizer("a"), ByteTokenizer()):
        ids = tokenizer.encode("")
        assert ids.shape == (0,) and ids.dtype == np.int32
        assert tokenizer.decode(ids) == tokenizer.decode([]) == ""


def test_dtypes():
    tokenizer = CharTokenizer("ab")
    assert tokenizer.encode("ab", dtype="uint8").dtype == np.uint8
    assert CharTokenizer([chr(i) for i in range(256)]).ids_dtype == np.uint8
    assert CharTokenizer([chr(i) for i in range(257)]).ids_dtype == np.uint16
    assert CharTokenizer([chr(i) for i in range(65537)]).ids_dtype == np.uint32
    assert ByteTokenizer().ids_dtype == np.uint8
    for dtype in (np.int8, np.uint32, np.int64):
        ids = CharTokenizer("xyz").encode("zyx", dtype=dtype)
        assert CharTokenizer("xyz").decode(ids) == "zyx"
    for dtype in (np.int8, np.float32, bool):
        with pytest.raises(
            ValueError, match="dtype must be an integer type that holds"
        ):
            ByteTokenizer().encode("a", dtype=dtype)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 3], r"between 0 and 2 \(vocab_size=3\), got 3 at index 2"),
        (np.array([0, -1]), r"got -1 at index 1"),
        (np.array([2**63], np.uint64), r"got 9223372036854775808 at index 0"),
        ([[0]], "one-dimensional integer array, got shape"),
        (1, "one-dimensional integer array"),
        ([0.0], "dtype float64"),
        ([True], "dtype bool"),
        ("abc", "one-dimensional integer array"),
    ],
)
def test_bad_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer("abc").decode(ids)
    if np.ndim(ids) == 1 and np.asarray(ids).dtype.kind in "iu":
        with pytest.raises(ValueError, match="token_id must be between 0 and 2"):
            CharTokenizer("abc").stream_decoder().push(ids[-1])


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        ("", "at least one character"),
        ([], "at least one character"),
        ("aba", "distinct characters, got 'a' again at index 2"),
        (["a", "bc"], "single characters, got 'bc' at index 1"),
        (["a", ""], "single characters, got '' at index 1"),
        (["a", 7], "single characters, got 7 at index 1"),
        ({"a", "b"}, "must be a string or list, got set"),
    ],
)
def test_bad_vocabularies(vocabulary, message):
    with pytest.raises(ValueError, match=message):
        CharTokenizer(vocabulary)


def test_bad_text():
    with pytest.raises(ValueError, match="text must have at least one character"):
        CharTokenizer.from_text("")
    with pytest.raises(
        ValueError, match="each piece of text must be a string, got int"
    ):
        CharTokenizer.from_text([3])
    with pytest.raises(ValueError, match="text must be a string, got bytes"):
        CharTokenizer("a").encode(b"a")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be JSON"),
        ("\xff", "must be JSON"),
        ("[" * 100_000, "must be JSON"),
        ("[]", "must be a JSON object, got list"),
        ("{}", "type must be one of 'char', 'byte', 'bpe', got None"),
        ('{"type": "word"}', "type must be one of 'char', 'byte', 'bpe', got 'word'"),
        ('{"type": ["char"]}', "type must be one of"),
        ('{"type": "char"}', "version must be an integer, got None"),
        ('{"type": "char", "version": true}', "version must be an integer"),
        ('{"type": "byte", "version": 2}', "at most 1, got 2, which a newer"),
        ('{"type": "char", "version": 0}', "version must be at least 1"),
        (
            '{"type": "char", "version": 1}',
            "must be a list of characters, got NoneType",
        ),
        ('{"type": "char", "version": 1, "vocabulary": "ab"}', "got str"),
        ('{"type": "char", "version": 1, "vocabulary": []}', "at least one"),
        ('{"type": "char", "version": 1, "vocabulary": ["a", "a"]}', "distinct"),
        ('{"type": "char", "version": 1, "vocabulary": ["ab"]}', "single characters"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(path)
    assert repr(str(path)) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_the_other_type(tmp_path):
    ByteTokenizer().save(tmp_path / "a.json")
    with pytest.raises(
        ValueError, match="must hold a 'char' tokenizer, got type 'byte'"
    ):
        CharTokenizer.load(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "b.json")


def test_the_json_layout(tmp_path):
    CharTokenizer("aé").save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == {
        "type": "char",
        "version": 1,
        "vocabulary": ["a", "é"],
    }


def test_bytes_by_hand():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é—🙂").tolist() == list("é—🙂".encode())
    assert tokenizer.decode([65, 0xE2, 0x80, 66, 0xFF]) == "A\ufffdB\ufffd"
    assert tokenizer.vocabulary[65] == b"A"
    stream = tokenizer.stream_decoder()
    assert [stream.push(value) for value in "—a".encode()] == ["", "", "—", "a"]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    with pytest.raises(ValueError, match="token_id must be between 0 and 255, got 256"):
        stream.push(256)


@given(data=st.binary(max_size=31))
def test_bytes_decode_alike_whole_and_streamed(data):
    tokenizer = ByteTokenizer()
    text = tokenizer.decode(np.frombuffer(data, np.uint8))
    stream = tokenizer.stream_decoder()
    assert "".join([stream.push(value) for value in data]) + stream.finish() == text
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert text == data.decode("utf-8", "replace")


@given(pieces=st.lists(st.sampled_from([b"\xed", b"\xa0", b"\x80", b"\xbf", b"a"])))
def test_broken_surrogates_decode_alike_whole_and_streamed(pieces):
    data = b"".join(pieces)
    stream = ByteTokenizer().stream_decoder()
    streamed = "".join([stream.push(value) for value in data]) + stream.finish()
    assert streamed == ByteTokenizer().decode(list(data))


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_a_corpus_encodes_like_its_text(text):
    corpus = Corpus("x", text.encode(), "")
    for tokenizer in (CharTokenizer.from_text(corpus), ByteTokenizer()):
        ids = encode_corpus(corpus, tokenizer)
        assert ids.dtype == tokenizer.ids_dtype
        np.testing.assert_array_equal(ids, tokenizer.encode(corpus.text))


def test_unknown_characters_of_a_corpus():
    corpus = Corpus("x", ("a" * (1 << 20) + "ba").encode(), "")
    with pytest.raises(ValueError, match=rf"got 'b' \(U\+0062\) at offset {1 << 20}"):
        encode_corpus(corpus, CharTokenizer("a"))
    assert len(encode_corpus(corpus, CharTokenizer("a"), "drop")) == (1 << 20) + 1
    assert encode_corpus(corpus, CharTokenizer("a?"), "?")[1 << 20] == 1


def test_the_shared_shakespeare():
    corpus = load_corpus(tiny_shakespeare())
    tokenizer = CharTokenizer.from_text(corpus)
    assert tokenizer.vocab_size == 65
    assert tokenizer.decode(encode_corpus(corpus, tokenizer)) == corpus.text


MEMORY_SCRIPT = """
import resource
from keras_tinygpt.text import (
    CharTokenizer, encode_corpus, load_corpus, split_ids, window_schedule
)

def peak_megabytes():
    try:  # of this process alone; ru_maxrss starts at the parent's peak on Linux
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1000
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000

before = peak_megabytes()
for extra in ("", "\\u2014", "\\U0001f642"):
    line = "Speak, speak. The quality of mercy is not strained.\\n".encode()
    with open("big.txt", "wb") as file:
        for _ in range(1000):
            file.write(line * (100_000_000 // 1000 // len(line)))
        file.write(extra.encode())
    corpus = load_corpus("big.txt")
    tokenizer = CharTokenizer.from_text(corpus)
    ids = encode_corpus(corpus, tokenizer)
    train, valid = split_ids(ids)
    schedule = window_schedule(len(train), 128, 3000, 64)
    assert len(corpus.data) > 99e6 and len(ids) > 99e6
    print(peak_megabytes() - before)
    del corpus, ids, train, valid
"""


def test_memory_of_a_large_text(tmp_path):
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n" + MEMORY_SCRIPT,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    peaks = [float(line) for line in run.stdout.split()]
    assert len(peaks) == 3 and max(peaks) < 400, peaks
