"""Whether the fast ways to train end where float32 on TensorFlow does.

The mini shape learns the embedded text in few and small steps, on every backend and
precision that is trained with, from equal weights and windows; without dropout, which
does not draw alike everywhere. Each is a process of its own.

Usage: python examples/compare_paths.py [RESULT.json]
"""

import json
import sys

import keras
from contenders import installed, record, run_worker

import keras_tinygpt as tg

STEPS, BATCH = 200, 16
PATHS = {  # name: (Keras backend, package, dtype policy)
    "TensorFlow, float32": ("tensorflow", "tensorflow", "float32"),
    "JAX, float32": ("jax", "jax", "float32"),
    "PyTorch, float32": ("torch", "torch", "float32"),
    "PyTorch, bfloat16": ("torch", "torch", "mixed_bfloat16"),
}


def train(policy):
    """Held-out nats after every quarter of a run."""
    keras.config.set_dtype_policy(policy)
    corpus = tg.load_corpus("five-nights")
    tokenizer = tg.CharTokenizer.from_text(corpus)
    train_ids, valid_ids = tg.split_ids(tg.encode_corpus(corpus, tokenizer))
    shape = tg.GPTConfig.preset("mini", tokenizer.vocab_size, dropout=0.0)
    config = tg.TrainConfig(
        STEPS, BATCH, learning_rate=4e-3, validate_every=STEPS // 4, restore_best=False
    )
    model = tg.build_gpt(shape)
    result = tg.train(model, train_ids, valid_ids, config, verbose=False)
    return [row["valid_loss"] for row in result.history]


def main():
    """Runs all, prints and records the curves."""
    rows = []
    for name, (backend, package, policy) in PATHS.items():
        if not installed([package]):
            print(f"left out: {name} (needs {package})")
            continue
        curve = run_worker(__file__, backend, policy)
        rows.append([name, *(f"{nats:.4f}" for nats in curve)])
        print(*rows[-1], sep="  ", flush=True)
    if len(sys.argv) > 1:
        record(
            sys.argv[1],
            packages=("keras", "tensorflow", "jax", "torch"),
            kind="table",
            command="python examples/compare_paths.py",
            setting=f"held-out nats; {STEPS} steps of {BATCH} windows, no dropout",
            columns=["", *(f"step {STEPS * i // 4}" for i in range(1, 5))],
            rows=rows,
        )


if sys.argv[1:2] == ["--worker"]:
    print(json.dumps(train(sys.argv[2])))
else:
    main()
