"""Under load: threads, thousands of calls, texts larger than the model by far."""

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers import ROOT

import keras_tinygpt as tg

slow = pytest.mark.slow


def make(characters="abcdefg", window=16):
    tokenizer = tg.CharTokenizer(characters)
    config = tg.GPTConfig(tokenizer.vocab_size, window, 1, 1, hidden_dim=4)
    return tg.LanguageModel(tg.build_gpt(config, seed=1), tokenizer)


@pytest.mark.backend
def test_eight_threads_get_the_texts_they_get_alone(tmp_path):
    lm = make()
    lm = tg.load(tg.save(tmp_path / "run", lm.model, lm.tokenizer))
    requests = [("abcdefg"[seed % 7 :], seed) for seed in range(40)]

    def answer(request):
        prompt, seed = request
        return lm.generate(prompt, 8, seed=seed, temperature=1.0 + seed % 3, top_k=5)

    with ThreadPoolExecutor(8) as pool:  # the first of them compile at once
        together = list(pool.map(answer, requests))
    assert together == [answer(request) for request in requests]
    assert len(set(together)) > 30


def resident_bytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("calls", "bound"), [(300, 8e6), pytest.param(10_000, 50e6, marks=slow)]
)
def test_many_calls_do_not_grow_memory(calls, bound):
    lm = make()
    for seed in range(100):
        lm.generate("abc", 8, seed=seed)
    before = resident_bytes()
    for seed in range(calls):
        lm.generate("abc", 8, seed=seed)
    assert resident_bytes() - before < bound


@slow
def test_a_corpus_of_200_megabytes_trains_within_a_gigabyte(tmp_path):
    text = "Now is the winter of our discontent — made glorious summer.\n"
    with open(tmp_path / "large.txt", "w", encoding="utf-8") as file:
        for _ in range(200):
            file.write(text * (1_000_000 // len(text)))
    code = """
import resource, sys
import tensorflow, matplotlib.pyplot
import keras_tinygpt as tg
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
corpus = tg.load_corpus(sys.argv[1])
tokenizer = tg.CharTokenizer.from_text(corpus)
train_ids, valid_ids = tg.split_ids(tg.encode_corpus(corpus, tokenizer))
model = tg.build_gpt(tg.GPTConfig.preset("mini", vocab_size=tokenizer.vocab_size))
config = tg.TrainConfig(steps=3, batch_size=4, validation_windows=4)
tg.train(model, train_ids, valid_ids, config, verbose=False)
print(len(train_ids), peak() - before)
"""
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "large.txt")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"},
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    tokens, grown = map(int, result.stdout.split())
    assert tokens > 170_000_000 and grown < 1e9
