"""Tests of keras_tinygpt.text.corpus."""

import collections
import hashlib
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from helpers import ROOT, tiny_shakespeare
from hypothesis import given
from hypothesis import strategies as st

from keras_tinygpt.text import EMBEDDED_NAME, Corpus, load_corpus
from keras_tinygpt.text import corpus as corpus_module


def write(path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def error_of(source, kind) -> str:
    with pytest.raises(kind) as caught:
        load_corpus(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_plain_file_is_kept_as_it_is(tmp_path):
    data = "Où — 🙂\n".encode()
    corpus = load_corpus(write(tmp_path / "a.txt", data))
    assert corpus.name == "a.txt"
    assert corpus.data == data
    assert corpus.text == "Où — 🙂\n"
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()
    assert corpus == load_corpus(str(tmp_path / "a.txt"))
    assert "Où" not in repr(corpus)


def test_only_the_mark_and_crlf_pairs_change(tmp_path):
    data = b"\xef\xbb\xbfa\r\nb\rc\n\r\r\n\xef\xbb\xbf \t\r"
    corpus = load_corpus(write(tmp_path / "a.txt", data))
    assert corpus.text == "a\nb\rc\n\r\n\ufeff \t\r"
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()


@given(
    text=st.text(
        st.characters(codec="utf-8", exclude_characters="\r\0\ufeff"), min_size=1
    ),
    chunk_bytes=st.sampled_from([1, 2, 3, 5, 7, 1 << 20]),
)
def test_pieces_join_to_the_text(text, chunk_bytes):
    corpus = Corpus("x", text.encode(), "")
    pieces = list(corpus.iter_text(chunk_bytes))
    assert "".join(pieces) == text == corpus.text
    assert all(pieces)


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1))
def test_no_text_is_lost(tmp_path_factory, text):
    path = write(
        tmp_path_factory.mktemp("c") / "a.txt", b"\xef\xbb\xbf" + text.encode()
    )
    assert load_corpus(path).text == text.replace("\r\n", "\n")


def test_the_locale_does_not_matter(tmp_path):
    write(tmp_path / "a.txt", "é".encode())
    code = (
        "from keras_tinygpt.text import load_corpus as f; print(ascii(f('a.txt').text))"
    )
    path = os.pathsep.join([str(ROOT), *sys.path])
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": path}
    environment["PYTHONCOERCECLOCALE"] = "0"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "'\\xe9'", run.stderr


def test_a_missing_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = error_of("hamlet", FileNotFoundError)
    assert "'hamlet'" in message and "shakespeare, five-nights" in message
    for name in ("hamlet.txt", "plays/hamlet"):
        message = error_of(name, FileNotFoundError)
        assert repr(str(Path(name))) in message and "known names" not in message


def test_several_files_are_one_corpus(tmp_path, monkeypatch):
    folder = tmp_path / "[plays] 1"
    (folder / "deep").mkdir(parents=True)
    first = write(folder / "b.txt", b"\xef\xbb\xbftwo\r\n")
    second = write(folder / "c.txt", b"three")
    write(folder / "a.txt", b"one")
    write(folder / "deep" / "d.txt", b"four")
    write(folder / "notes.md", b"no")
    corpus = load_corpus(folder)
    assert (corpus.name, corpus.text) == ("[plays] 1", "one\ntwo\nthree")
    data = b"one" + first.read_bytes() + second.read_bytes()
    assert corpus.sha256 == hashlib.sha256(data).hexdigest()
    monkeypatch.chdir(folder)
    assert load_corpus(".") == corpus
    assert load_corpus("*.txt") == corpus
    deep = load_corpus("**/*.txt")
    assert (deep.name, deep.text) == ("[plays] 1", "one\ntwo\nthree\nfour")
    assert load_corpus("[ab].txt").text == "one\ntwo\n"
    only = load_corpus("*.md")
    assert (only.name, only.text) == ("notes.md", "no")


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    path = write(tmp_path / "a[1].txt", b"itself")
    write(tmp_path / "a1.txt", b"another")
    assert load_corpus(path).text == "itself"


def test_no_files_at_all(tmp_path):
    message = error_of(tmp_path, FileNotFoundError)
    assert f"none are {str(tmp_path / '*.txt')!r}" in message
    assert "none are 'x*.md'" in error_of("x*.md", FileNotFoundError)


def test_a_bad_file_among_others_is_named(tmp_path):
    write(tmp_path / "a.txt", b"fine")
    write(tmp_path / "b.txt", b"\xff")
    assert "b.txt" in error_of(tmp_path, ValueError)


@pytest.mark.parametrize("data", [b"", b"\xef\xbb\xbf"])
def test_an_empty_file(tmp_path, data):
    message = error_of(write(tmp_path / "a.txt", data), ValueError)
    assert "a.txt" in message and "empty" in message


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"ab\0c", "byte 0x00 at offset 2"),
        (b"abc\xff", "byte 0xff at offset 3"),
        (b"\xef\xbb\xbfab\xe9 ", "byte 0xe9 at offset 5"),
        (b"ab\xe2\x80", "byte 0xe2 at offset 2"),
        (b"a\xed\xa0\x80", "byte 0xed at offset 1"),
        (b"a" * ((1 << 20) - 1) + b"\xe2\x80a", f"byte 0xe2 at offset {(1 << 20) - 1}"),
        ("long".encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
        (b"\xfe\xff\0a", "iconv -f UTF-16 -t UTF-8"),
        ("long".encode("utf-32"), "iconv -f UTF-32 -t UTF-8"),
        (b"\0\0\xfe\xff\0\0\0a", "iconv -f UTF-32 -t UTF-8"),
    ],
)
def test_a_binary_file(tmp_path, data, found):
    message = error_of(write(tmp_path / "a.txt", data), ValueError)
    assert "a.txt" in message and found in message


def test_an_unreadable_file(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    path = write(tmp_path / "a.txt", b"a")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "a.txt" in error_of(path, PermissionError)


@pytest.mark.parametrize("source", [None, 3, b"a.txt", "", "a\0b"])
def test_what_is_not_a_path(source):
    assert repr(source) in error_of(source, ValueError)


def test_the_chunk_size_is_checked():
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        Corpus("x", b"a", "").iter_text(0)


def test_a_known_name_wins_over_a_file(tmp_path, monkeypatch):
    (tmp_path / "_data").mkdir()
    write(tmp_path / "_data" / "five-nights.txt", b"embedded")
    write(tmp_path / EMBEDDED_NAME, b"a file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpus_module, "_PACKAGE", tmp_path)
    assert load_corpus(EMBEDDED_NAME).text == "embedded"
    assert load_corpus(EMBEDDED_NAME).name == EMBEDDED_NAME
    assert load_corpus("./" + EMBEDDED_NAME).text == "a file"
    assert load_corpus(Path(EMBEDDED_NAME)).text == "a file"


def test_the_source_tree_serves_the_embedded_corpus(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(corpus_module, "_PACKAGE", tmp_path / "package")
    assert "five-nights.txt" in error_of(EMBEDDED_NAME, FileNotFoundError)
    write(tmp_path / "data" / "five-nights.txt", b"in the tree")
    assert load_corpus(EMBEDDED_NAME).text == "in the tree"


def test_the_embedded_corpus_is_there():
    assert load_corpus(EMBEDDED_NAME).data


def test_shakespeare_comes_through_the_cache(tmp_path, monkeypatch):
    path = write(tmp_path / "tinyshakespeare.txt", b"First Citizen:\n")
    asked = {}

    def get_file(**arguments):
        asked.update(arguments)
        return str(path)

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    corpus = load_corpus("shakespeare")
    assert (corpus.name, corpus.text) == ("shakespeare", "First Citizen:\n")
    assert asked["file_hash"] == corpus_module.SHAKESPEARE_SHA256
    assert asked["origin"] == corpus_module.SHAKESPEARE_URL


def test_shakespeare_without_a_network(monkeypatch):
    def get_file(**arguments):
        raise Exception("URL fetch failure:\n no route to host")

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    message = error_of("shakespeare", ConnectionError)
    assert "URL fetch failure: no route to host" in message
    assert "pass the path of a copy" in message


def test_a_changed_shakespeare_is_refused(tmp_path, monkeypatch):
    copy = write(tmp_path / "input.txt", b"not by him")
    monkeypatch.setattr(corpus_module, "SHAKESPEARE_URL", copy.as_uri())
    real = keras.utils.get_file
    monkeypatch.setattr(
        keras.utils, "get_file", lambda **a: real(cache_dir=str(tmp_path), **a)
    )
    message = error_of("shakespeare", ConnectionError)
    assert "hash" in message and "pass the path of a copy" in message


def test_the_shared_shakespeare():
    corpus = load_corpus(tiny_shakespeare())
    assert corpus.sha256 == corpus_module.SHAKESPEARE_SHA256
    assert len(corpus.text) == 1_115_394


def test_the_embedded_corpus_is_real_prose():
    corpus = load_corpus(EMBEDDED_NAME)
    text = corpus.text
    assert 140_000 <= len(text) <= 160_000
    characters = set(text)
    assert len(characters) <= 104
    assert {c for c in characters if not c.isascii()} <= set("—é")
    assert len(lzma.compress(corpus.data, preset=9)) >= 0.33 * len(corpus.data)
    counts = collections.Counter(text[i : i + 40] for i in range(len(text) - 39))
    repeated = sum(count for count in counts.values() if count > 1)
    assert repeated <= 0.005 * len(text)
    speakers = re.findall(r"^[A-Z ]+:$", text, re.M)
    assert len(speakers) > 500 and len(set(speakers)) > 20
