"""Tokens per second of generation against the context length, cached and not.

Shape: 128 wide, 4 blocks, 4 heads, 65 tokens, batch 1. Cached: a window is filled from
a prompt of 16 tokens. Plain: 8 tokens with the window full, each a whole forward pass.

Usage: python examples/benchmark_context.py [RESULT.json [PLOT.png]]
"""

import sys
import time

import keras
import numpy as np
from contenders import record

import keras_tinygpt as tg
from keras_tinygpt.plots import plot_lines

CONTEXTS, PROMPT, PLAIN, ROUNDS = (128, 256, 512, 1024, 2048), 16, 8, 5


def tokens_per_second(model, prompt, new, use_cache):
    """Median over the rounds, after a warm-up."""
    seconds = []
    for seed in range(ROUNDS + 1):
        start = time.perf_counter()
        tg.generate(model, prompt, new, seed=seed, use_cache=use_cache)
        seconds.append(time.perf_counter() - start)
    return round(new / float(np.median(seconds[1:])))


rows = []
for context in CONTEXTS:
    model = tg.build_gpt(tg.GPTConfig(65, context, 4, 4, hidden_dim=128))
    text = np.random.default_rng(0).integers(0, 65, context)
    cached = tokens_per_second(model, text[:PROMPT], context - PROMPT, True)
    plain = tokens_per_second(model, text, PLAIN, False)
    rows.append({"context": context, "cached": cached, "plain": plain})
    print(f"context {context:>5}  cached {cached:>7,}  plain {plain:>5,} tokens/s")

if len(sys.argv) > 1:
    backend = keras.backend.backend()
    record(
        sys.argv[1],
        packages=("keras", backend),
        kind="generation_context",
        command="python examples/benchmark_context.py",
        setting=f"tokens per second, {backend}, batch 1, medians of {ROUNDS} runs",
        rows=rows,
    )
if len(sys.argv) > 2:
    plot_lines(
        {name: [row[name] for row in rows] for name in ("cached", "plain")},
        CONTEXTS,
        sys.argv[2],
        labels=("context length (tokens)", "tokens per second"),
        title="Generation against context length",
    )
