"""Peak memory and speed of the GPT-2 small shape (124M) with random weights.

Usage: python examples/benchmark_gpt2.py train|generate [RESULT.json]

Each row is a process of its own; its peak is that of everything in it.
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from contenders import peak_bytes, record, run_worker

import keras_tinygpt as tg
from keras_tinygpt.models.gpt import remat_scope
from keras_tinygpt.pretrained.writing import export_safetensors
from keras_tinygpt.training import compile_model

SHAPE = tg.GPTConfig(
    *(50257, 1024, 12, 12), hidden_dim=768, qkv_bias=True, tie_embeddings=True
)
WINDOW, NEW = 256, 64  # tokens of generation
TRAINING = {  # dtype policy, blocks rematerialized, parts of a batch, windows, tokens
    "float32, 4 x 256": ("float32", False, 1, 4, 256),
    "blocks rematerialized, 4 x 256": ("float32", True, 1, 4, 256),
    "4 parts accumulated, 4 x 256": ("float32", False, 4, 4, 256),
    "mixed_bfloat16, 4 x 256": ("mixed_bfloat16", False, 1, 4, 256),
    "float32, 2 x 1024": ("float32", False, 1, 2, 1024),
    "blocks rematerialized, 2 x 1024": ("float32", True, 1, 2, 1024),
}
UPDATES = 3
BACKENDS = ("tensorflow", "torch")


def train(policy, rematerialized, parts, batch_size, length):
    """Seconds of an update with one batch, in one part or more; the first compiles."""
    keras.config.set_dtype_policy(policy)
    with remat_scope(SHAPE) if rematerialized else contextlib.nullcontext():
        model = tg.build_gpt(SHAPE)
    config = tg.TrainConfig(batch_size=batch_size, gradient_accumulation_steps=parts)
    compile_model(model, config)
    ids = np.random.default_rng(0).integers(0, SHAPE.vocab_size, 9_999, np.int32)
    starts = tg.window_schedule(len(ids), length, 1, batch_size)
    data = tg.WindowDataset(ids, starts.reshape(parts, -1), length)
    seconds = []
    for _ in range(1 + UPDATES):
        started = time.perf_counter()
        model.fit(data, verbose=0, shuffle=False)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:]))


def generate(folder):
    """Tokens per second with a cache, the first call left out."""
    lm = tg.from_pretrained(folder, max_sequence_length=WINDOW)
    seconds = []
    for seed in range(4):
        started = time.perf_counter()
        lm.generate("The bell rang", NEW, seed=seed)
        seconds.append(time.perf_counter() - started)
    return NEW / float(np.median(seconds[1:]))


def write_folder(folder):
    """The shape with random weights, as transformers keeps it."""
    tokenizer = tg.BPETokenizer.from_text(tg.load_corpus("five-nights").text, 512)
    tokenizer = tg.BPETokenizer(tokenizer.content, SHAPE.vocab_size)
    return export_safetensors(tg.build_gpt(SHAPE), tokenizer, folder)


def main():
    kind, rows = sys.argv[1], []
    if kind == "train":
        for backend in BACKENDS:
            for name in TRAINING:
                seconds, used = run_worker(__file__, backend, "train", name)
                rows.append([backend, name, f"{used / 1e9:.2f}", f"{seconds:.1f}"])
                print(rows[-1], flush=True)
        setting = f"windows x tokens a step, AdamW, medians of {UPDATES} steps"
        columns = ["backend", "setting", "peak GB", "seconds a step"]
    else:
        with tempfile.TemporaryDirectory() as temporary:
            folder = str(write_folder(Path(temporary, "gpt2")))
            for backend in BACKENDS:
                value, used = run_worker(__file__, backend, "generate", folder)
                rows.append([backend, f"{used / 1e9:.2f}", f"{value:.1f}"])
                print(rows[-1], flush=True)
        setting = f"{NEW} new tokens, window {WINDOW}, batch 1, medians of 3 runs"
        columns = ["backend", "peak GB", "tokens/s"]
    if len(sys.argv) > 2:
        record(
            sys.argv[2],
            packages=("keras", *BACKENDS),
            kind="table",
            command=f"python examples/benchmark_gpt2.py {kind}",
            setting=setting,
            columns=columns,
            rows=rows,
        )


if sys.argv[1] == "--worker":
    run = train if sys.argv[2] == "train" else generate
    arguments = TRAINING[sys.argv[3]] if run is train else sys.argv[3:]
    print(json.dumps([run(*arguments), peak_bytes()]))
else:
    main()
