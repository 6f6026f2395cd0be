"""Training speed on a GPU: tokens per second and model-FLOPs utilisation.

In mixed_bfloat16, on each installed backend: the mini shape (batch 64 x 128) and the
shape of GPT-2 small (124 M weights, batch 8 x 1,024). TensorFlow and JAX compile with
XLA; JAX and PyTorch choose flash attention where the GPU has it. The utilisation is the
share of a large bfloat16 matrix product's rate on the same device. About 4 minutes; a
backend that sees no GPU times a few steps of the mini shape on the CPU and says so.

Usage: python examples/benchmark_gpu.py [RESULT.json]
"""

import sys
import time

import numpy as np
from contenders import record, start

BACKENDS = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}
SHAPES = {  # name: (vocabulary, windows, tokens in a window, steps, rounds)
    "mini": (65, 64, 128, 50, 3),
    "gpt2_small": (50257, 8, 1024, 10, 3),
}
CPU_STEPS, CPU_ROUNDS = 2, 1


def has_gpu() -> bool:
    """Whether the backend of this process sees a GPU."""
    import keras

    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.is_available()
    return not all(name.startswith("cpu") for name in keras.distribution.list_devices())


def make(shape: str):
    """The model, and NumPy batches for the given number of steps."""
    import keras_tinygpt as tg

    vocab, batch, window, *_ = SHAPES[shape]
    size = {}
    if shape == "gpt2_small":
        size = {
            "num_layers": 12,
            "num_heads": 12,
            "hidden_dim": 768,
            "qkv_bias": True,
            "tie_embeddings": True,
        }
    config = tg.GPTConfig(vocab, window, dropout=0.0, **size)
    model = tg.build_gpt(config, dtype="mixed_bfloat16")
    ids = np.random.default_rng(0).integers(0, vocab, (batch, window), "int32")
    return model, ids


def work(shape: str):
    """Answers "gpu", "flops", "ceiling" and, with seconds, a number of steps."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import keras_tinygpt as tg
    from keras_tinygpt.speed import flops_per_token, matmul_ceiling
    from keras_tinygpt.training import compile_model

    model, ids = make(shape)
    compile_model(model, tg.TrainConfig())

    def steps(count: int) -> float:
        many = np.tile(ids, (count, 1))
        started = time.perf_counter()
        model.fit(many, many, batch_size=len(ids), shuffle=False, verbose=0)
        return time.perf_counter() - started

    known = {
        "gpu": has_gpu,
        "flops": lambda: flops_per_token(model),
        "ceiling": lambda: matmul_ceiling("bfloat16"),
    }
    for line in sys.stdin:
        question = line.strip()
        answer = known[question]() if question in known else steps(int(question))
        print(float(answer), file=answers, flush=True)


def measure(backend: str, shape: str) -> list[str] | None:
    """One row of the table; None where the backend or its GPU is missing."""
    name = f"{shape}, {backend}"
    running = start({name: (shape, backend, [BACKENDS[backend]])}, __file__)
    if not running:
        return None
    worker = running[name]
    gpu = bool(worker.seconds("gpu"))
    if not gpu and shape != "mini":
        worker.close()
        return None
    if not gpu:
        print(f"{backend} sees no GPU: a few steps of the mini shape on the CPU")
    _, batch, window, steps, rounds = SHAPES[shape]
    if not gpu:
        steps, rounds = CPU_STEPS, CPU_ROUNDS
    worker.seconds(str(steps))  # compiles
    seconds = [worker.seconds(str(steps)) for _ in range(rounds)]
    rate = steps * batch * window / float(np.median(seconds))
    share = rate * worker.seconds("flops") / worker.seconds("ceiling")
    worker.close()
    device = "GPU" if gpu else "CPU"
    print(f"{name:<24} {device} {rate:>12,.0f} tokens/s  {share:>4.0%}", flush=True)
    return [name, device, f"{round(rate, -2):,.0f}", f"{share:.0%}"]


def main():
    """Measures every shape on every backend, one process at a time."""
    rows = [measure(backend, shape) for shape in SHAPES for backend in BACKENDS]
    rows = [row for row in rows if row]
    if len(sys.argv) > 1:
        record(
            sys.argv[1],
            kind="table",
            command="python examples/benchmark_gpu.py",
            setting="training in mixed_bfloat16, medians",
            columns=["", "device", "tokens/s", "of the product"],
            rows=rows,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
