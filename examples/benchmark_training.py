"""Tokens per second of training, this package against its peers, in alternation.

One optimizer step of the mini shape: 65 tokens, window 128, 128 wide, 4 blocks, 4
heads, 64 windows, dropout 0.1, AdamW, gradient norm clipped at 1; and of the mini LSTM
(embedding 64, 256 units). Every contender is a process of its own that stays alive; the
parent asks them for a few steps each, round by round, and reports medians. The extras
jax, torch and peers bring all contenders; those that are not installed are left out.

Usage: python examples/benchmark_training.py [RESULT.json]
"""

import contextlib
import os
import shutil
import sys
import time

import numpy as np
from contenders import record, start

VOCAB, WINDOW, BATCH, DROPOUT = 65, 128, 64, 0.1
WIDTH, BLOCKS, HEADS = 128, 4, 4
STEPS, ROUNDS = 6, 4
RATE = 2e-3
CONTENDERS = {  # name: (maker, Keras backend, packages)
    "GPT, keras_tinygpt, TensorFlow, float32": ("ours", "tensorflow", ["tensorflow"]),
    "GPT, keras_tinygpt, JAX, float32": ("ours", "jax", ["jax"]),
    "GPT, keras_tinygpt, PyTorch, float32": ("ours", "torch", ["torch"]),
    "GPT, keras_tinygpt, PyTorch, bfloat16": ("ours_mixed", "torch", ["torch"]),
    "GPT, transformers, PyTorch, float32": (
        *("transformers", "torch"),
        ["transformers", "torch"],
    ),
    "GPT, transformers, PyTorch, bfloat16": (
        *("transformers_mixed", "torch"),
        ["transformers", "torch"],
    ),
    "GPT, transformers, compiled, bfloat16": (
        *("transformers_compiled", "torch"),
        ["transformers", "torch"],
    ),
    "GPT, keras-hub, TensorFlow, float32": (
        *("keras_hub", "tensorflow"),
        ["keras-hub"],
    ),
    "GPT, keras-hub, JAX, float32": ("keras_hub", "jax", ["keras-hub", "jax"]),
    "GPT, keras-hub, TensorFlow, bfloat16": (
        *("keras_hub_mixed", "tensorflow"),
        ["keras-hub"],
    ),
    "LSTM, keras_tinygpt, TensorFlow, float32": (
        *("ours_lstm", "tensorflow"),
        ["tensorflow"],
    ),
    "LSTM, keras_tinygpt, JAX, float32": ("ours_lstm", "jax", ["jax"]),
    "LSTM, keras_tinygpt, PyTorch, float32": ("ours_lstm", "torch", ["torch"]),
    "LSTM, keras_tinygpt, PyTorch, bfloat16": ("ours_lstm_mixed", "torch", ["torch"]),
    "LSTM, torch.nn.LSTM, float32": ("torch_lstm", "torch", ["torch"]),
}


def ours(build=None, policy="float32"):
    """Our GPT, compiled as `train` compiles it; the steps are those of `fit`."""
    import keras

    import keras_tinygpt as tg
    from keras_tinygpt.training import compile_model

    keras.config.set_dtype_policy(policy)
    config = tg.GPTConfig.preset("mini", VOCAB)
    model = build(tg) if build else tg.build_gpt(config)
    compile_model(model, tg.TrainConfig(learning_rate=RATE))
    return _steps(model)


def ours_mixed():
    """The same in mixed_bfloat16."""
    return ours(policy="mixed_bfloat16")


def ours_lstm(policy="float32"):
    """Our LSTM."""
    return ours(lambda tg: tg.build_lstm(tg.LSTMConfig.preset("mini", VOCAB)), policy)


def ours_lstm_mixed():
    """The same in mixed_bfloat16."""
    return ours_lstm("mixed_bfloat16")


def keras_hub(policy="float32", jit_compile=True):
    """GPT2Backbone with a head, with XLA."""
    import keras
    import keras_hub as hub

    keras.config.set_dtype_policy(policy)
    backbone = hub.models.GPT2Backbone(
        vocabulary_size=VOCAB,
        num_layers=BLOCKS,
        num_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        dropout=DROPOUT,
        max_sequence_length=WINDOW,
    )
    tokens = keras.Input((WINDOW,), dtype="int32")
    mask = keras.ops.ones_like(tokens)
    hidden = backbone({"token_ids": tokens, "padding_mask": mask})
    model = keras.Model(tokens, keras.layers.Dense(VOCAB)(hidden))
    model.compile(
        optimizer=keras.optimizers.AdamW(RATE, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return _steps(model)


def keras_hub_mixed():
    """The same in mixed_bfloat16 without XLA, whose bfloat16 is slow on CPUs."""
    return keras_hub("mixed_bfloat16", jit_compile=False)


def _steps(model):
    inputs, targets = _batch()

    def run():
        for _ in range(STEPS):
            model.train_on_batch(inputs, targets)

    return run


def transformers(mixed=False, compiled=False):
    """GPT2LMHeadModel in a plain PyTorch loop with fused AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=WINDOW,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=HEADS,
            resid_pdrop=DROPOUT,
            embd_pdrop=DROPOUT,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
        )
    )
    return _torch_steps(model, lambda net, x: net(x).logits, mixed, compiled)


def transformers_mixed():
    """The same with bfloat16 autocast."""
    return transformers(mixed=True)


def transformers_compiled():
    """The same compiled by torch.compile, which needs a C++ compiler."""
    return transformers(mixed=True, compiled=True)


def torch_lstm():
    """Embedding, torch.nn.LSTM and a head."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(VOCAB, 64)
            self.lstm = torch.nn.LSTM(64, 256, batch_first=True)
            self.head = torch.nn.Linear(256, VOCAB)

        def forward(self, x):
            return self.head(self.lstm(self.embedding(x))[0])

    return _torch_steps(Network(), lambda net, x: net(x))


def _torch_steps(model, logits, mixed=False, compiled=False):
    import torch

    model.train()
    network = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), RATE, fused=True)
    inputs, targets = (torch.tensor(x, dtype=torch.long) for x in _batch())
    autocast = contextlib.nullcontext()
    if mixed:
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)

    def run():
        for _ in range(STEPS):
            with autocast:
                outputs = logits(network, inputs)
            loss = torch.nn.functional.cross_entropy(
                outputs.float().flatten(0, 1), targets.flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()

    return run


def _batch():
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (BATCH, WINDOW + 1), "int32")
    return ids[:, :-1], ids[:, 1:]


def work(maker):
    """Answers every line on standard input with the seconds of a few steps."""
    answers, sys.stdout = sys.stdout, sys.stderr
    if maker == "ceiling":
        from keras_tinygpt.speed import matmul_ceiling

        def answer(dtype):
            return matmul_ceiling(dtype)

    else:
        run = globals()[maker]()
        run()  # compiles

        def answer(_):
            started = time.perf_counter()
            run()
            return time.perf_counter() - started

    for line in sys.stdin:
        print(answer(line.strip()), file=answers, flush=True)


def operations():
    """Operations per token of the two shapes."""
    import keras_tinygpt as tg
    from keras_tinygpt.speed import flops_per_token

    return {
        "GPT": flops_per_token(tg.build_gpt(tg.GPTConfig.preset("mini", VOCAB))),
        "LSTM": flops_per_token(tg.build_lstm(tg.LSTMConfig.preset("mini", VOCAB))),
    }


def main():
    """Runs the contenders round by round, prints and records the medians."""
    chosen = dict(CONTENDERS)
    if not shutil.which(os.environ.get("CXX", "g++")):
        chosen.pop("GPT, transformers, compiled, bfloat16")
        print("left out: torch.compile (needs a C++ compiler)")
    probe = start({"ceiling": ("ceiling", "torch", ["torch"])}, __file__)
    ceilings = {"float32": [], "bfloat16": []}
    contenders = start(chosen, __file__)
    times = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for dtype, rates in ceilings.items():
            rates += [process.seconds(dtype) for process in probe.values()]
        for name, contender in contenders.items():
            times[name].append(contender.seconds("go"))
    for contender in (*contenders.values(), *probe.values()):
        contender.close()
    flops, rows = operations(), []
    for name, seconds in times.items():
        rate = STEPS * BATCH * WINDOW / float(np.median(seconds))
        gflops = rate * flops[name.split(",")[0]] / 1e9
        ceiling = ceilings[name.split(", ")[-1]]
        share = f"{1e9 * gflops / np.median(ceiling):.0%}" if ceiling else ""
        rows.append([name, f"{round(rate, -1):,.0f}", f"{gflops:.0f}", share])
        print(f"{name:<42} {rate:>8,.0f} tokens/s  {gflops:>5.0f} GFLOP/s  {share:>4}")
    limits = ", ".join(
        f"{dtype} {np.median(rates) / 1e9:.0f} GFLOP/s"
        for dtype, rates in ceilings.items()
        if rates
    )
    print(f"matrix products of 2,048 here: {limits}")
    if len(sys.argv) > 1:
        record(
            sys.argv[1],
            kind="table",
            command="python examples/benchmark_training.py",
            setting=(
                f"one optimizer step of {BATCH} windows of {WINDOW} tokens, dropout "
                f"{DROPOUT}, medians of {ROUNDS} runs in alternation; "
                f"{flops['GPT'] / 1e6:.2f} MFLOP a token (GPT), "
                f"{flops['LSTM'] / 1e6:.2f} (LSTM); matrix products of 2,048: {limits}"
            ),
            columns=["", "tokens/s", "GFLOP/s", "of the product"],
            rows=rows,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
