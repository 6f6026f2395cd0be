"""Tokens per second of generation, this package against its peers, in alternation.

Every contender is a process of its own that stays alive; the parent asks them for one
run after another, round by round, and reports medians. Shape: 128 wide, 4 blocks, 4
heads, 65 tokens, window 128; prompt 16, 112 new tokens, temperature 0.8, top_k 40.
The extras jax, torch and peers bring all contenders; those that are not installed are
left out.

Usage: python examples/benchmark_generation.py [RESULT.json]
"""

import sys
import time

import numpy as np
from contenders import record, start

PROMPT, NEW, VOCAB, WINDOW = 16, 112, 65, 128
BATCHES, ROUNDS = (1, 64), 5
CONTENDERS = {  # name: (maker, Keras backend, packages)
    "keras_tinygpt, TensorFlow": ("ours", "tensorflow", ["tensorflow"]),
    "keras_tinygpt, JAX": ("ours", "jax", ["jax"]),
    "keras_tinygpt, PyTorch": ("ours", "torch", ["torch"]),
    "transformers, PyTorch": ("transformers", "torch", ["transformers", "torch"]),
    "keras-hub, TensorFlow": ("keras_hub", "tensorflow", ["keras-hub"]),
    "keras-hub, JAX": ("keras_hub", "jax", ["keras-hub", "jax"]),
}


def ours(prompts):
    """Our engine on whatever backend KERAS_BACKEND names."""
    import keras_tinygpt as tg

    model = tg.build_gpt(tg.GPTConfig(VOCAB, WINDOW, 4, 4, hidden_dim=128))
    return lambda seed: tg.generate(
        model, prompts, NEW, temperature=0.8, top_k=40, seed=seed
    )


def transformers(prompts):
    """GPT2LMHeadModel.generate with its cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=WINDOW, n_embd=128, n_layer=4, n_head=4
    )
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).eval()
    inputs = torch.tensor(prompts)

    def run(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            outputs = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=True,
                temperature=0.8,
                top_k=40,
                max_new_tokens=NEW,
                pad_token_id=0,
            )
        return outputs.numpy()

    return run


def keras_hub(prompts):
    """GPT2CausalLM.generate with a top-k sampler."""
    import keras_hub as hub

    backbone = hub.models.GPT2Backbone(
        vocabulary_size=VOCAB,
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=WINDOW,
    )
    model = hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(sampler=hub.samplers.TopKSampler(k=40, temperature=0.8))
    tokens = np.pad(prompts, ((0, 0), (0, NEW)))
    mask = np.pad(np.ones_like(prompts), ((0, 0), (0, NEW)))
    inputs = {"token_ids": tokens, "padding_mask": mask}
    return lambda seed: np.asarray(
        model.generate(inputs, stop_token_ids=None)["token_ids"]
    )


def work(maker):
    """Answers each batch size on standard input with a time in seconds."""
    answers, sys.stdout = sys.stdout, sys.stderr
    runs = {}
    for count, line in enumerate(sys.stdin):
        batch = int(line)
        if batch not in runs:
            prompts = np.random.default_rng(0).integers(0, VOCAB, (batch, PROMPT))
            runs[batch] = globals()[maker](prompts.astype("int32"))
            for seed in range(2):
                runs[batch](seed)
        start = time.perf_counter()
        outputs = runs[batch](count + 2)
        seconds = time.perf_counter() - start
        assert np.shape(outputs) == (batch, PROMPT + NEW), np.shape(outputs)
        print(seconds, file=answers, flush=True)


def main():
    """Runs the contenders round by round, prints and records the medians."""
    contenders = start(CONTENDERS, __file__)
    rows = [{"name": name, "tokens_per_second": {}} for name in contenders]
    for batch in BATCHES:
        times = {name: [] for name in contenders}
        for _ in range(ROUNDS):
            for name, contender in contenders.items():
                times[name].append(contender.seconds(batch))
        for row in rows:
            rate = round(batch * NEW / float(np.median(times[row["name"]])))
            row["tokens_per_second"][str(batch)] = rate
            print(
                f"{row['name']:<28} batch {batch:>3}  {rate:>8,} tokens/s", flush=True
            )
    for contender in contenders.values():
        contender.close()
    if len(sys.argv) > 1:
        record(
            sys.argv[1],
            kind="generation_speed",
            command="python examples/benchmark_generation.py",
            setting="tokens per second, medians of 5 runs in alternation",
            rows=rows,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2])
    else:
        main()
