"""What int8 matrices cost and save: file size, test loss, speed of generation.

Usage: python examples/benchmark_int8.py TINY_SHAKESPEARE.txt [RESULT.json]
"""

import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from contenders import record

import keras_tinygpt as tg

lm = tg.load("tiny-shakespeare")
text = tg.load_corpus(sys.argv[1]).text
test_ids = lm.tokenizer.encode(text)[-lm.metrics["split"]["test"] :]


def measure(name):
    """One row: name, megabytes of model.keras, nats, tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        saved = tg.save(Path(folder) / "bundle", lm.model, lm.tokenizer)
        size = (saved / "model.keras").stat().st_size / 1e6
    nats = tg.evaluate(lm.model, test_ids, "strided").nats
    seconds = []
    for seed in range(6):
        start = time.perf_counter()
        tg.generate(lm.model, test_ids[:16], 112, seed=seed)
        seconds.append(time.perf_counter() - start)
    rate = 112 / float(np.median(seconds[1:]))
    return [name, f"{size:.2f}", f"{nats:.4f}", f"{rate:,.0f}"]


rows = [measure("float32")]
lm.model.quantize("int8")
rows.append(measure("int8"))
print(*rows, sep="\n")
if len(sys.argv) > 2:
    backend = keras.backend.backend()
    record(
        sys.argv[2],
        packages=("keras", backend),
        kind="table",
        command="python examples/benchmark_int8.py TINY_SHAKESPEARE.txt",
        setting=f"tiny-shakespeare on {backend}, batch 1, medians of 5 runs",
        columns=["weights", "MB", "test nats", "tokens/s"],
        rows=rows,
    )
