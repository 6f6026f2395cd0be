"""The model in the package: its size, its text, its recorded score."""

import pytest
from helpers import ROOT, tiny_shakespeare

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.bundle import PRETRAINED, find_bundle


@pytest.fixture(scope="module")
def lm():
    return tg.load(PRETRAINED)


def test_it_is_small_and_writes(lm):
    folder = find_bundle(PRETRAINED)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size < 12e6
    assert lm.model.count_params() == lm.metrics["parameters"] == 824_897
    text = lm.generate("ROMEO:", 120, temperature=0.5)
    words = text.split()
    assert words[0] == "ROMEO:" and len(words) > 12
    assert sum(word.isalpha() for word in words) > len(words) / 2


def test_the_saved_model_beside_it_holds_the_same_weights(lm):
    folder = ROOT / "saved_models" / PRETRAINED
    exported = tg.load(folder / "saved_model")
    assert tg.fingerprint(exported.model) == tg.fingerprint(lm.model)
    assert exported.tokenizer == lm.tokenizer
    assert exported.metrics == lm.metrics


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch, lm):
    monkeypatch.chdir(tmp_path)
    (tmp_path / PRETRAINED / "inspection").mkdir(parents=True)  # figures, no model
    assert tg.load(PRETRAINED).model.config == lm.model.config
    (tmp_path / PRETRAINED / "inspection").rmdir()
    other = tg.build_gpt(tg.GPTConfig(lm.tokenizer.vocab_size, 9, 1, 1, hidden_dim=4))
    tg.save(PRETRAINED, other, lm.tokenizer)
    assert tg.load(PRETRAINED).model.config.max_sequence_length == 9


def test_generate_needs_no_model_named(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    cli.main(["generate", "--max-new-tokens", "8"])
    assert capsys.readouterr().out.startswith("ROMEO:")


def test_the_recorded_test_loss_is_right(lm):
    corpus = tg.load_corpus(tiny_shakespeare())
    assert corpus.sha256 == lm.metrics["corpus"]["sha256"]
    ids = lm.tokenizer.encode(corpus.text)
    test_ids = ids[-lm.metrics["split"]["test"] :]
    scores = tg.evaluate(lm.model, test_ids, "strided")
    recorded = lm.metrics["scores"]["test"]
    assert scores.tokens == recorded["tokens"]
    assert scores.nats == pytest.approx(recorded["nats"], abs=1e-4)
