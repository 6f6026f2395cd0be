"""What a training step costs as it grows, and what is spent around it.

From the mini shape (65 tokens, window 128, 128 wide, 4 blocks, 4 heads, 64 windows, no
dropout) one size is changed at a time. `predicted` is the growth of the operations per
step (`flops_per_token`), `measured` that of the seconds. Then, per length, one layer's
attention products against its four projections, the most memory that a step takes with
and without rematerialized blocks, and the share that `train` adds to the bare step with
its schedule, dataset and callbacks.

Usage: python examples/benchmark_growth.py [RESULT.json]
"""

import contextlib
import functools
import json
import statistics
import sys
import time

import keras
import numpy as np
from contenders import peak_bytes, record, run_worker

import keras_tinygpt as tg
from keras_tinygpt.layers.attention import attend
from keras_tinygpt.models.gpt import remat_scope
from keras_tinygpt.speed import flops_per_token
from keras_tinygpt.training import compile_model

VOCAB, WINDOW, WIDTH, BATCH, ROUNDS = 65, 128, 128, 64, 5
SIZES = {
    "windows in a batch": (4, 16, 64, 128),
    "tokens in a window": (32, 128, 512, 1024),
    "width": (64, 128, 256, 512),
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
MEMORY_LENGTHS, MEMORY_BATCH = (128, 512, 1024, 2048), 8
OVERHEAD_STEPS, OVERHEAD_ROUNDS = 30, 3


def median_seconds(*calls):
    """Medians of calls that are timed in alternation, after a warm-up of each."""
    times = [[] for _ in calls]
    for turn in range(ROUNDS + 1):
        for call, seconds in zip(calls, times, strict=True):
            started = time.perf_counter()
            call()
            if turn:
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in times]


def step(batch=BATCH, window=WINDOW, width=WIDTH):
    """Seconds and operations of one optimizer step."""
    model = tg.build_gpt(tg.GPTConfig(VOCAB, window, hidden_dim=width))
    compile_model(model, tg.TrainConfig())
    ids = np.random.default_rng(0).integers(0, VOCAB, (batch, window), "int32")
    (seconds,) = median_seconds(lambda: model.train_on_batch(ids, ids))
    return seconds, flops_per_token(model) * batch * window


def growth():
    """One row per size: seconds, and growth against the smallest."""
    rows = []
    for (what, values), name in zip(
        SIZES.items(), ("batch", "window", "width"), strict=True
    ):
        measured = [step(**{name: value}) for value in values]
        (least, fewest), *_ = measured
        for value, (seconds, flops) in zip(values, measured, strict=True):
            rows.append(
                [
                    f"{what}: {value:,}",
                    f"{1000 * seconds:.0f}",
                    f"{flops / fewest:.1f}",
                    f"{seconds / least:.1f}",
                ]
            )
            print(*rows[-1], sep="  ", flush=True)
    return rows


def compiled(inputs, outputs):
    """A function of NumPy arrays that runs the graph once."""
    model = keras.Model(inputs, outputs)
    model.compile(jit_compile=keras.backend.backend() != "torch")
    return model.predict_on_batch


def attention_against_projections():
    """One row per length: milliseconds of both, forward, 8 windows, 4 heads."""
    rows, heads = [], 4
    hidden = keras.Input((None, WIDTH))
    x = hidden
    for _ in range(4):
        x = keras.layers.Dense(WIDTH)(x)
    project = compiled(hidden, x)
    parts = [keras.Input((heads, None, WIDTH // heads)) for _ in range(3)]
    read = compiled(parts, keras.layers.Lambda(lambda qkv: attend(*qkv)[0])(parts))
    for length in LENGTHS:
        x = np.ones((8, length, WIDTH), "float32")
        qkv = [np.ones((8, heads, length, WIDTH // heads), "float32")] * 3
        products, projections = median_seconds(
            functools.partial(read, qkv), functools.partial(project, x)
        )
        rows.append(
            [
                f"{length:,} tokens: attention, projections",
                f"{1000 * products:.1f}, {1000 * projections:.1f}",
                f"{length / (2 * WIDTH):.1f}",
                f"{products / projections:.1f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    return rows


def step_memory(length, rematerialized):
    """Bytes by which one step raises the most that this process has held."""
    config = tg.GPTConfig(VOCAB, length, hidden_dim=WIDTH)
    with remat_scope(config) if rematerialized else contextlib.nullcontext():
        model = tg.build_gpt(config)
    compile_model(model, tg.TrainConfig())
    ids = np.random.default_rng(0).integers(0, VOCAB, (MEMORY_BATCH, length), "int32")
    before = peak_bytes()
    model.train_on_batch(ids, ids)
    return peak_bytes() - before


def memory():
    """One row per length: megabytes of a step, each in a process of its own."""
    rows, first = [], None
    for length in MEMORY_LENGTHS:
        plain, rematerialized = (
            run_worker(__file__, keras.backend.backend(), length, int(remat))
            for remat in (False, True)
        )
        first = first or plain
        rows.append(
            [
                f"{MEMORY_BATCH} x {length:,} tokens: MB of a step, rematerialized",
                f"{plain / 1e6:,.0f}, {rematerialized / 1e6:,.0f}",
                f"{(length / MEMORY_LENGTHS[0]) ** 2:.0f} (scores alone)",
                f"{plain / first:.1f}",
            ]
        )
        print(*rows[-1], sep="  ", flush=True)
    return rows


def overhead():
    """Share of a step's time that `train` adds to `train_on_batch`."""
    model = tg.build_gpt(tg.GPTConfig.preset("mini", VOCAB))
    config = tg.TrainConfig(
        steps=2 * OVERHEAD_STEPS, validate_every=OVERHEAD_STEPS, validation_windows=1
    )
    ids = np.random.default_rng(0).integers(0, VOCAB, 100_000, "int32")
    bare, ours = [], []
    for _ in range(OVERHEAD_ROUNDS):
        result = tg.train(model, ids[:90_000], ids[90_000:], config)
        ours.append(BATCH * WINDOW / result.tokens_per_second)
        compile_model(model, config)
        batch = ids[: BATCH * WINDOW].reshape(BATCH, WINDOW)
        model.train_on_batch(batch, batch)
        started = time.perf_counter()
        for _ in range(OVERHEAD_STEPS):
            model.train_on_batch(batch, batch)
        bare.append((time.perf_counter() - started) / OVERHEAD_STEPS)
        print(f"step {1000 * bare[-1]:.0f} ms, in train {1000 * ours[-1]:.0f} ms")
    return statistics.median(ours) / statistics.median(bare) - 1


if sys.argv[1:2] == ["--worker"]:
    print(json.dumps(step_memory(*map(int, sys.argv[2:]))))
elif __name__ == "__main__":
    rows = growth() + attention_against_projections() + memory()
    added = overhead()
    print(f"schedule, dataset and callbacks of train add {added:+.1%} to a step")
    if len(sys.argv) > 1:
        record(
            sys.argv[1],
            kind="table",
            command="python examples/benchmark_growth.py",
            setting=(
                f"{keras.backend.backend()}, float32, medians of {ROUNDS} runs; "
                "predicted: operations, in the last rows attention's against those "
                "of the four projections; schedule, dataset and callbacks of `train` "
                f"add {added:+.1%} to a mini step"
            ),
            columns=["", "ms or MB", "predicted growth", "measured growth"],
            rows=rows,
        )
