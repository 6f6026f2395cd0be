"""Prepared ids: the same as those of the text in memory, whole or not there at all."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

import keras_tinygpt as tg
from keras_tinygpt.files import sealed, write_json
from keras_tinygpt.text import preparing
from keras_tinygpt.text.prepared import DESCRIPTION

TEXT = "To be, or not to be — that is the question:\r\nWhether 'tis nobler\n" * 40


@pytest.fixture
def small_shards(monkeypatch):
    """Shards of about 331 bytes, so that the text has many."""
    monkeypatch.setattr(preparing, "SHARD_BYTES", 331)


@pytest.fixture
def texts(tmp_path):
    """Three files of one corpus, one without a line end, and another file beside."""
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes(("\ufeff" + TEXT).encode())
    (folder / "a.txt").write_bytes(b"no end of line")
    (folder / "c.txt").write_bytes(TEXT[:500].encode())
    (folder / "deep" / "d.txt").write_bytes(b"deep down\n")
    (folder / "notes.md").write_bytes(b"# not part of it\n")
    return folder


def joined(prepared) -> np.ndarray:
    return np.concatenate(list(prepared.parts.values()))


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_the_ids_are_those_of_the_whole_text(texts, tmp_path, kind, small_shards):
    if kind == "bpe":
        pytest.importorskip("tokenizers", reason="needs the extra [bpe]")
    corpus = tg.load_corpus(texts)
    prepared = tg.prepare(texts, tmp_path / "out", kind, processes=1, split=(0.7, 0.3))
    assert (prepared.name, prepared.sha256) == ("texts", corpus.sha256)
    assert len(list(preparing.cut_shards(tg.text.corpus.find_texts(texts)[1]))) > 9
    ids = tg.encode_corpus(corpus, prepared.tokenizer)
    assert ids.tolist() == joined(prepared).tolist()
    assert len(prepared.parts["train"]) == len(ids) * 7 // 10
    assert prepared.tokenizer.decode(joined(prepared)) == corpus.text
    for name, ids in prepared.parts.items():
        assert prepared.characters[name] == len(prepared.tokenizer.decode(ids))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("train.bin", "val.bin", "tokenizer.json", "prepared.json")
    }
    assert not list(tmp_path.glob(".*"))
    for ids in prepared.parts.values():
        assert isinstance(ids, np.memmap) and ids.dtype == np.uint16
        assert not ids.flags.writeable


def test_several_processes_write_what_one_does(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "SHARD_BYTES", 700)
    done = []
    for processes in (1, 2):
        tg.prepare(
            texts,
            tmp_path / str(processes),
            "byte",
            processes=processes,
            progress=lambda *sizes: done.append(sizes),
        )
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in "12"
    )
    assert one == two
    assert done[: len(done) // 2] == done[len(done) // 2 :] and len(done) > 5
    assert done[-1][0] == done[-1][1] == sum(p.stat().st_size for p in texts.glob("*t"))


@given(
    text=st.text(st.sampled_from("ab \n\r—🙂é."), min_size=1, max_size=300),
    size=st.integers(1, 40),
)
def test_shards_join_to_the_text(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("shards") / "a.txt"
    path.write_bytes(text.encode())
    shards = list(preparing.cut_shards([path], size))
    assert "".join(shard.text() for shard in shards) == tg.load_corpus(path).text
    assert sum(shard.size for shard in shards) == path.stat().st_size
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(shard.size <= size + 8 for shard in shards)


def test_small_files_share_a_shard(tmp_path):
    paths = [tmp_path / f"{index}.txt" for index in range(7)]
    for path in paths:
        path.write_bytes(b"three words here")
    shards = list(preparing.cut_shards(paths, 40))
    assert [len(shard.pieces) for shard in shards] == [3, 3, 3]
    assert [shard.pieces[-1][1:3] for shard in shards] == [(0, 5), (0, 11), (0, 16)]
    assert "".join(s.text() for s in shards) == "\n".join(["three words here"] * 7)


def test_a_stopped_preparation_goes_on(texts, tmp_path, small_shards, monkeypatch):
    out, encode, calls = tmp_path / "out", preparing.encode_shard, []

    def stopping(shard, tokenizer, folder):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(shard.index)
        encode(shard, tokenizer, folder)

    def prepare(**settings):
        return tg.prepare(texts, out, processes=1, **settings)

    monkeypatch.setattr(preparing, "encode_shard", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert not out.exists() and (tmp_path / ".out.unfinished").is_dir()
    with pytest.raises(ValueError, match="holds unfinished work of another text or"):
        prepare(tokenizer="byte")
    learn = tg.CharTokenizer.from_text
    monkeypatch.setattr(preparing.CharTokenizer, "from_text", None)  # it is there
    calls[:] = [None]  # so that three more are done
    with pytest.raises(KeyboardInterrupt):
        prepare()
    assert calls == [None, 4, 5, 6]
    calls[:] = [None] * 5
    prepared = prepare()
    assert calls[5] == 7
    corpus = tg.load_corpus(texts)
    assert prepared.tokenizer.decode(joined(prepared)) == corpus.text
    assert prepared.tokenizer == learn(corpus)
    assert [path.name for path in tmp_path.iterdir() if path != texts] == ["out"]


@pytest.mark.slow
def test_a_killed_preparation_goes_on(tmp_path):
    (tmp_path / "long.txt").write_text(TEXT * 10_000, "utf-8")
    code = (
        "import keras_tinygpt as tg, keras_tinygpt.text.preparing as p\n"
        "p.SHARD_BYTES = 1 << 20\n"
        "p.prepare('long.txt', 'out', 'byte', processes=2)\n"
    )
    work, kills = tmp_path / ".out.unfinished", 0
    while not (tmp_path / "out").exists():
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        before = len(list(work.glob("shard_*")))
        while process.poll() is None:
            if kills < 3 and len(list(work.glob("shard_*"))) > before + 3:
                process.send_signal(signal.SIGKILL)
                kills += 1
                process.wait()
            time.sleep(0.01)
    assert kills == 3 and not work.exists()
    prepared = tg.load_prepared(tmp_path / "out")
    text = (TEXT * 10_000).replace("\r\n", "\n").encode()
    assert joined(prepared).astype("uint8").tobytes() == text


def test_a_bad_text_leaves_nothing(tmp_path, small_shards):
    tokenizer = tg.CharTokenizer(sorted(set(TEXT)))
    path = tmp_path / "a.txt"
    for text, message, processes in (
        (TEXT.encode() + b"\xff", f"byte 0xff at offset {len(TEXT.encode())}", 1),
        (TEXT.encode() + b"@", r"got '@' \(U\+0040\)", 2),
    ):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=message):
            tg.prepare(path, tmp_path / "out", tokenizer, processes=processes)
        assert list(tmp_path.iterdir()) == [path]


def test_what_is_there_is_kept(texts, tmp_path):
    out = tmp_path / "out"
    tg.prepare(texts, out)
    with pytest.raises(FileExistsError, match="out: .*out exists already"):
        tg.prepare(texts, out)
    tg.prepare(texts, out, "byte", overwrite=True)
    assert isinstance(tg.load_prepared(out).tokenizer, tg.ByteTokenizer)
    with pytest.raises(FileExistsError, match="is not a prepared folder"):
        tg.prepare(texts, texts, overwrite=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "word"}, "tokenizer must be one of 'char', 'byte', 'bpe', got"),
        ({"vocab_size": 300}, "vocab_size needs bpe, got 300 with char"),
        ({"tokenizer": tg.ByteTokenizer(), "vocab_size": 300}, "vocab_size needs bpe"),
        ({"split": (0.5, 0.6)}, "fractions must add up to 1"),
        ({"split": (1.0,)}, "split must be 2 or 3 numbers, got 1"),
        ({"processes": 0}, "processes must be at least 1, got 0"),
    ],
)
def test_bad_settings(texts, tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        tg.prepare(texts, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == [texts]


def test_a_damaged_folder_is_noticed(texts, tmp_path):
    out = tmp_path / "out"
    tg.prepare(texts, out)
    for name in ("train.bin", "val.bin", "tokenizer.json"):
        content = (out / name).read_bytes()
        (out / name).write_bytes(content[:-2] + b"  ")
        with pytest.raises(ValueError, match=f"{name} is damaged or was replaced"):
            tg.load_prepared(out)
        (out / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"has no {name}"):
            tg.load_prepared(out)
        (out / name).write_bytes(content)
    tg.load_prepared(out)
    description = json.loads((out / DESCRIPTION).read_text())
    (out / DESCRIPTION).write_text(json.dumps(description | {"dtype": "uint32"}))
    with pytest.raises(ValueError, match="prepared.json is damaged"):
        tg.load_prepared(out)
    del description["sha256"]
    for changes in ({"tokens": {"other": 5}}, {"files": 3}, {"characters": [1]}):
        write_json(out / DESCRIPTION, sealed(description | changes))
        with pytest.raises(ValueError, match="prepared.json is damaged"):
            tg.load_prepared(out)
    with pytest.raises(FileNotFoundError, match="a folder with prepared.json or"):
        tg.load_prepared(tmp_path)


def nano_gpt_folder(path, tokenizer=None):
    """train.bin and val.bin as nanoGPT's prepare.py scripts write them."""
    path.mkdir()
    ids = tg.ByteTokenizer().encode(TEXT)
    ids[: len(ids) * 9 // 10].astype(np.uint16).tofile(path / "train.bin")
    ids[len(ids) * 9 // 10 :].astype(np.uint16).tofile(path / "val.bin")
    return ids


def test_the_files_of_nano_gpt(tmp_path):
    ids = nano_gpt_folder(tmp_path / "data")
    prepared = tg.load_prepared(tmp_path / "data")
    assert joined(prepared).tolist() == ids.tolist()
    assert prepared.tokenizer is None and prepared.characters == {}
    assert prepared.name == "data"
    tg.ByteTokenizer().save(tmp_path / "data" / "tokenizer.json")
    prepared = tg.load_prepared(tmp_path / "data")
    assert prepared.tokenizer.decode(joined(prepared)) == TEXT
    assert prepared.characters["valid"] == len(
        prepared.tokenizer.decode(prepared.parts["valid"])
    )
    (tmp_path / "data" / "val.bin").unlink()
    with pytest.raises(FileNotFoundError, match="has no val.bin"):
        tg.load_prepared(tmp_path / "data")


def test_ids_of_two_and_four_bytes(tmp_path):
    path = tmp_path / "x.bin"
    np.array([1, 70_000], "<u4").tofile(path)
    assert tg.load_ids(path, "uint32").tolist() == [1, 70_000]
    assert tg.load_ids(path).tolist() == [1, 0, 70_000 % 2**16, 1]
    with pytest.raises(ValueError, match="dtype must be one of 'uint16', 'uint32'"):
        tg.load_ids(path, "int64")
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="ids of 2 bytes each, got 3 bytes"):
        tg.load_ids(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="ids of 2 bytes each, got 0 bytes"):
        tg.load_ids(path)


def test_large_vocabularies_take_four_bytes(tmp_path):
    characters = "".join(map(chr, [10, *range(0xE000, 0xF900), *range(2**16, 130_000)]))
    (tmp_path / "a.txt").write_text(characters, "utf-8")
    prepared = tg.prepare(tmp_path / "a.txt", tmp_path / "out", split=(0.5, 0.5))
    assert {ids.dtype for ids in prepared.parts.values()} == {np.dtype("uint32")}
    assert prepared.tokenizer.decode(joined(prepared)) == characters
