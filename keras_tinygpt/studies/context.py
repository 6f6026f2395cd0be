"""The context study: what context is worth, past the window too, and what it costs.

Loss by position says how much each further token of context helps. The models of the
book study, trained on windows of 100 tokens, are then read with windows up to eight
times as long. Sinusoids, rotations and distance penalties are formulas and simply go
on; a learned table has no rows there and needs a rule. Two are compared: `repeated`
(position p uses row p mod T) and `stretched` (the T rows are interpolated linearly over
the longer window).
"""

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt import bundle
from keras_tinygpt.evaluation import losses_by_position
from keras_tinygpt.layers import CausalMultiHeadAttention
from keras_tinygpt.models import GPT, GPTConfig, LSTMConfig, build_gpt, build_lstm
from keras_tinygpt.plots import plot_lines
from keras_tinygpt.studies.book import book_study
from keras_tinygpt.studies.runs import versions
from keras_tinygpt.studies.study import run_study
from keras_tinygpt.text import encode_corpus, load_corpus, split_parts
from keras_tinygpt.training import TrainConfig, compile_model

FACTORS = (1, 2, 4, 8)  # windows, in trained windows
LENGTHS = (128, 256, 512, 1024, 2048)  # tokens, of the cost
TIMED_STEPS = 5
VOCAB_SIZE = 65
COST_GPT = GPTConfig.preset("mini", VOCAB_SIZE, dropout=0.0)
COST_LSTM = LSTMConfig.preset("mini", VOCAB_SIZE)
EXTENSION_RULES = ("repeated", "stretched")


def extend_positions(model: GPT, length: int, rule: str) -> GPT:
    """Returns a copy of a GPT with learned positions whose table has more rows.

    Args:
        model: GPT with `positions="learned"` and T rows.
        length: rows of the new table, at least T.
        rule: "repeated" or "stretched", see above.
    """
    config = dataclasses.replace(model.config, max_sequence_length=length)
    longer = GPT(config)
    rows = np.arange(length)
    for new, old in zip(longer.weights, model.weights, strict=True):
        values = keras.ops.convert_to_numpy(old)
        if old.path.startswith("position_embedding"):
            trained = len(values)
            if rule == "repeated":
                values = values[rows % trained]
            else:
                places = rows * (trained - 1) / max(1, length - 1)
                low = np.floor(places).astype(int)
                share = (places - low)[:, None]
                high = np.minimum(low + 1, trained - 1)
                values = (1 - share) * values[low] + share * values[high]
        new.assign(values)
    return longer


def context_results(options: Any, folder: Path) -> dict[str, Any]:
    """Trains what the book study has not, measures loss and cost."""
    study = book_study(own_recipes=False)
    if options.corpus is not None:
        study = dataclasses.replace(study, corpus=options.corpus)
    run_study(study, folder, seeds=1, only=options.only, steps=options.steps)
    losses, rows = {}, []
    for variant in study.variants:
        path = folder / f"{variant.slug}-seed0"
        if not (path / bundle.METRICS).exists():
            continue
        language_model = bundle.load(path)
        ids = encode_corpus(load_corpus(study.corpus), language_model.tokenizer)
        held_out = split_parts(ids, study.split)["valid"]
        trained = language_model.model.config.max_sequence_length
        factors = [f for f in FACTORS if f * trained < len(held_out)]
        for name, models in _readings(variant.name, language_model.model, factors):
            curves = {
                factor: losses_by_position(model, held_out, factor * trained, 16)
                for factor, model in models.items()
            }
            if name not in losses:
                losses[name] = binned(curves[factors[-1]])
            rows.append(
                {
                    "name": name,
                    "window": trained,
                    # all curves end with the same text distance: the last T targets
                    "nats": {
                        str(f * trained): round(float(c[-trained:].mean()), 4)
                        for f, c in curves.items()
                    },
                }
            )
            print(f"{name}: {rows[-1]['nats']}", flush=True)
    return {
        "kind": "context",
        "study": "context",
        "losses": losses,
        "rows": rows,
        "cost": measure_cost(LENGTHS if options.steps is None else LENGTHS[:2]),
        "versions": versions(),
    }


def binned(losses: np.ndarray) -> dict[str, float]:
    """Means over 1, 2, 3 to 4, 5 to 8, ... tokens of context, by the last of each."""
    means, first = {}, 0
    while first < len(losses):
        last = min(max(1, 2 * first), len(losses))
        means[str(last)] = round(float(losses[first:last].mean()), 4)
        first = last
    return means


def _readings(name: str, model: keras.Model, factors: list[int]):
    """Pairs of a name and, by factor, the model that reads windows of that length."""
    learned = getattr(model.config, "positions", None) == "learned"
    if not learned:
        yield name, dict.fromkeys(factors, model)
        return
    trained = model.config.max_sequence_length
    for rule in EXTENSION_RULES:
        yield (
            f"{name}, {rule}",
            {f: extend_positions(model, f * trained, rule) for f in factors},
        )


def measure_cost(lengths: tuple[int, ...]) -> list[dict[str, float]]:
    """Seconds of a training step of one window, by its length T.

    The prediction counts the multiplications of the `mini` shape: per block
    `12 T D^2` in projections and `2 T^2 D` in attention, scaled to the shortest T.
    """
    rows = []
    for length in lengths:
        gpt = dataclasses.replace(COST_GPT, max_sequence_length=length)
        lstm = dataclasses.replace(COST_LSTM, max_sequence_length=length)
        products = 12 * length * gpt.hidden_dim**2 + 2 * length**2 * gpt.hidden_dim
        rows.append(
            {
                "length": length,
                "gpt": _seconds_per_step(build_gpt(gpt), length),
                "attention": _attention_seconds(gpt, length),
                "lstm": _seconds_per_step(build_lstm(lstm), length),
                "products": products,
            }
        )
        print({k: round(v, 4) for k, v in rows[-1].items()}, flush=True)
    return rows


def _seconds_per_step(model: keras.Model, length: int) -> float:
    compile_model(model, TrainConfig())
    window = np.arange(length, dtype="int32")[None] % VOCAB_SIZE
    return _median_seconds(lambda: model.train_on_batch(window, window))


def _attention_seconds(config: GPTConfig, length: int) -> float:
    """One forward pass of one attention layer."""
    inputs = keras.Input((None, config.hidden_dim))
    layer = CausalMultiHeadAttention(config.num_heads)
    model = keras.Model(inputs, layer(inputs))
    model.compile(jit_compile=keras.backend.backend() != "torch")
    x = np.ones((1, length, config.hidden_dim), "float32")
    return _median_seconds(lambda: model.predict_on_batch(x))


def _median_seconds(call) -> float:
    call()  # compiles
    seconds = []
    for _ in range(TIMED_STEPS):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 5)


def draw_context(results: dict[str, Any], folder: Path, out: Path) -> list[Path]:
    """Draws loss by position past the window, and cost by length."""
    paths = [out / "context_loss.png", out / "context_cost.png"]
    window, losses = results["rows"][0]["window"], results["losses"]
    plot_lines(
        {name: list(means.values()) for name, means in losses.items()},
        [int(place) for place in next(iter(losses.values()))],
        paths[0],
        labels=("tokens of context, up to", "held-out loss (nats per token)"),
        title=f"Trained on windows of {window} tokens",
    )
    cost = results["cost"]
    scale = cost[0]["gpt"] / cost[0]["products"]
    plot_lines(
        {
            "GPT, one step": [row["gpt"] for row in cost],
            "GPT, predicted": [row["products"] * scale for row in cost],
            "one attention layer, forward": [row["attention"] for row in cost],
            "LSTM, one step": [row["lstm"] for row in cost],
        },
        [row["length"] for row in cost],
        paths[1],
        labels=("tokens in the window", "seconds"),
        title="Cost by context length (mini shape, one window)",
    )
    return paths
