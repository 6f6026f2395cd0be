"""The reversal study: a task whose algorithm is known, and heads that can be checked.

A sequence is `x1 .. xn | xn .. x1` over random symbols; the loss counts on the answer
only. To write answer token i the model has to look up input token n + 1 - i, so a head
that does the work puts its weight on an anti-diagonal. Which heads do is measured, not
guessed: the share of a head's attention that lies on the token to be copied.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import load, save
from keras_tinygpt.generation import generate
from keras_tinygpt.inspection.figures import plot_attention
from keras_tinygpt.inspection.maps import attention_maps, inspection_model
from keras_tinygpt.models import GPTConfig, build_gpt
from keras_tinygpt.studies.runs import versions
from keras_tinygpt.text import CharTokenizer
from keras_tinygpt.training import TrainConfig, make_optimizer

SYMBOLS = "abcdefghijklmnop"
SEPARATOR = "|"
LENGTH = 12  # symbols in a sequence
TEMPERATURES = (0.0, 0.1, 1.0, 2.0)
TESTED = 500  # sequences
REVERSAL_SHARE = 0.5  # of a head's weight, above which it is called a reversal head
CONFIG = GPTConfig(
    vocab_size=len(SYMBOLS) + 1,
    max_sequence_length=2 * LENGTH,
    num_layers=2,
    num_heads=4,
    hidden_dim=64,
    positions="learned",
)
TRAINING = TrainConfig(steps=1500, batch_size=64, learning_rate=2e-3, weight_decay=0.01)


def sequences(count: int, seed: int) -> np.ndarray:
    """Random problems with their answers: int32 (count, 2 LENGTH + 1)."""
    random = np.random.Generator(np.random.Philox(seed))
    symbols = random.integers(0, len(SYMBOLS), (count, LENGTH), "int32")
    separator = np.full((count, 1), len(SYMBOLS), "int32")
    return np.concatenate([symbols, separator, symbols[:, ::-1]], axis=1)


class _Problems(keras.utils.PyDataset):
    """Fresh problems for every step; targets before the separator weigh 0."""

    def __init__(self, config: TrainConfig, seed: int):
        super().__init__()
        self.config, self.seed = config, seed

    def __len__(self):
        return self.config.steps

    def __getitem__(self, index):
        rows = sequences(self.config.batch_size, self.seed * 10**6 + index + 1)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        weights = np.zeros(targets.shape, "float32")
        weights[:, LENGTH:] = 1.0
        return inputs, targets, weights


def train_reversal(seed: int, config: TrainConfig = TRAINING) -> keras.Model:
    """Returns a small GPT trained to reverse."""
    model = build_gpt(CONFIG, seed=seed)
    model.compile(
        optimizer=make_optimizer(config, model),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=keras.backend.backend() != "torch",
    )
    model.fit(_Problems(config, seed), epochs=1, shuffle=False, verbose=0)
    return model


def exact_match(model: keras.Model, rows: np.ndarray, temperature: float) -> float:
    """Share of problems (count, 2 LENGTH + 1) whose whole answer is right."""
    prompts = list(rows[:, : LENGTH + 1])
    outputs = generate(model, prompts, LENGTH, temperature=temperature, seed=0)
    return float(np.mean(np.all(np.stack(outputs) == rows, axis=1)))


def measure_heads(model: keras.Model, rows: np.ndarray) -> list[dict[str, Any]]:
    """Per head, over the answer rows: weight on the token to copy, mean entropy.

    Answer token i stands at input place LENGTH + i (the separator writes the first)
    and copies input token LENGTH - 1 - i.
    """
    inspected = inspection_model(model).predict_on_batch(rows[:, :-1])
    places, heads = np.arange(LENGTH), []
    for block, weights in enumerate(inspected["weights"]):
        answer = np.asarray(weights, "float32")[:, :, LENGTH:]  # (rows, N, LENGTH, S)
        copied = answer[:, :, places, LENGTH - 1 - places].mean(axis=(0, 2))
        logs = np.log(answer, where=answer > 0, out=np.zeros_like(answer))
        entropy = -(answer * logs).sum(axis=-1).mean(axis=(0, 2))
        for head, share in enumerate(copied):
            heads.append(
                {
                    "block": block,
                    "head": head,
                    "copied": round(float(share), 4),
                    "entropy": round(float(entropy[head]), 4),
                    "reversal": bool(share > REVERSAL_SHARE),
                }
            )
    return heads


def reversal_results(options: Any, folder: Path) -> dict[str, Any]:
    """Trains one model a seed and measures it; see `cli.StudyOptions`."""
    config = TRAINING
    if options.steps is not None:
        config = dataclasses.replace(config, steps=options.steps)
    tested, rows = sequences(TESTED, seed=0), []
    for seed in range(options.seeds):
        started = time.perf_counter()
        model = train_reversal(seed, config)
        seconds = time.perf_counter() - started
        row = {
            "seed": seed,
            "parameters": model.count_params(),
            "seconds": round(seconds, 1),
            "exact_match": {
                str(t): round(exact_match(model, tested, t), 4) for t in TEMPERATURES
            },
            "heads": measure_heads(model, tested[:100]),
        }
        rows.append(row)
        print(f"seed {seed}: {seconds:.0f} s, exact match {row['exact_match']}")
        tokenizer = CharTokenizer.from_text(SYMBOLS + SEPARATOR)
        save(folder / f"seed{seed}", model, tokenizer, overwrite=True)
    return {
        "kind": "reversal",
        "study": "reversal",
        "training": dataclasses.asdict(config),
        "length": LENGTH,
        "symbols": len(SYMBOLS),
        "tested": TESTED,
        "rows": rows,
        "versions": versions(),
    }


def draw_reversal(results: dict[str, Any], folder: Path, out: Path) -> list[Path]:
    """Draws every head's map for one problem that was not trained on."""
    model = load(folder / "seed0").model
    row = sequences(1, seed=0)[0]
    labels = [(SYMBOLS + SEPARATOR)[index] for index in row[:-1]]
    path = out / "reversal.png"
    plot_attention(
        attention_maps(model, row[:-1]).weights,
        labels,
        path,
        title="Reversing a sequence: answer rows read it backwards",
    )
    return [path]
