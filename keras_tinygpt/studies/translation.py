"""The dates study: one translation, by an encoder-decoder and by a GPT.

The GPT reads the source as the beginning of its text. Both have the same width and,
within a hundredth, the same number of weights, and see the same problems.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import load, save
from keras_tinygpt.generation import generate
from keras_tinygpt.generation.decoding import CORES
from keras_tinygpt.inspection.figures import plot_attention
from keras_tinygpt.inspection.maps import attention_maps
from keras_tinygpt.models import (
    EncoderDecoder,
    EncoderDecoderConfig,
    GPTConfig,
    build_encoder_decoder,
    build_gpt,
)
from keras_tinygpt.studies.dates import (
    SOURCE_LENGTH,
    START,
    TARGET_LENGTH,
    DateDataset,
    allowed_tokens,
    is_date,
    make_tokenizer,
    problems,
)
from keras_tinygpt.studies.runs import versions
from keras_tinygpt.training import TrainConfig, compile_model

TESTED = 500  # held-out problems
SHOWN = "Thursday, March 11, 2021"  # held out
TRAINING = TrainConfig(steps=1500, batch_size=64, learning_rate=2e-3, weight_decay=0.01)


def make_model(kind: str, seed: int = 0) -> keras.Model:
    """Returns the untrained "encoder-decoder" or "GPT" of the comparison."""
    vocab_size = make_tokenizer().vocab_size
    if kind == "GPT":
        config = GPTConfig(
            vocab_size=vocab_size,
            max_sequence_length=SOURCE_LENGTH + TARGET_LENGTH,
            num_layers=4,
            hidden_dim=64,
            intermediate_dim=5 * 64,  # makes up for the blocks' missing cross-attention
        )
        return build_gpt(config, seed=seed)
    config = EncoderDecoderConfig.preset(
        "mini",
        vocab_size=vocab_size,
        max_sequence_length=TARGET_LENGTH,
        max_source_length=SOURCE_LENGTH,
    )
    return build_encoder_decoder(config, seed=seed)


def train_on_dates(
    model: keras.Model, config: TrainConfig = TRAINING, seed: int = 0
) -> keras.Model:
    """Trains either kind of model in place."""
    as_prefix = not isinstance(model, EncoderDecoder)
    dataset = DateDataset(config.steps, config.batch_size, seed, as_prefix)
    compile_model(model, config)
    model.fit(dataset, epochs=1, shuffle=False, verbose=0)
    return model


def translate(
    model: keras.Model, sources: list[str], only_dates: bool = False, **settings: Any
) -> list[str]:
    """Returns what a model writes for each source, the most probable characters.

    Args:
        model: an encoder-decoder, or a GPT that reads the source first.
        sources: dates as people write them.
        only_dates: whether decoding is held to what may become a date.
        **settings: see `generate`.
    """
    tokenizer = make_tokenizer()
    settings = {"temperature": 0.0, **settings}
    if only_dates:
        settings["allowed_tokens"] = allowed_tokens(tokenizer)
    prompts = [tokenizer.encode(source + START) for source in sources]
    if isinstance(model, EncoderDecoder):
        settings["source_ids"] = [prompt[:-1] for prompt in prompts]
        prompts = [prompt[-1:] for prompt in prompts]
    outputs = generate(model, prompts, TARGET_LENGTH, **settings)
    return [tokenizer.decode(output[-TARGET_LENGTH:]) for output in outputs]


def measure(model: keras.Model, count: int = TESTED) -> dict[str, float]:
    """Shares of exact matches and of dates, written freely and held to dates."""
    sources, targets = problems(count, seed=0, held_out=True)
    shares = {}
    for name, only_dates in (("free", False), ("held to dates", True)):
        written = translate(model, sources, only_dates)
        pairs = zip(written, targets, strict=True)
        shares[f"exact, {name}"] = np.mean([text == target for text, target in pairs])
        shares[f"dates, {name}"] = np.mean([is_date(text) for text in written])
    return {name: float(share) for name, share in shares.items()}


def dates_results(options: Any, folder: Path) -> dict[str, Any]:
    """Trains both models for each seed and measures them; see `cli.StudyOptions`."""
    config, rows = TRAINING, []
    if options.steps is not None:
        config = dataclasses.replace(config, steps=options.steps)
    for seed in range(options.seeds):
        rows.append(_row("encoder-decoder, untrained", make_model("", seed), "", ""))
        for kind in ("encoder-decoder", "GPT"):
            model = make_model(kind, seed)
            started = time.process_time()
            train_on_dates(model, config, seed)
            seconds = f"{time.process_time() - started:.0f}"
            budget = f"{config.steps:,} x {config.batch_size}"
            rows.append(_row(kind, model, budget, seconds))
            path = folder / f"{kind}-seed{seed}"
            save(path, model, make_tokenizer(), overwrite=True)
    columns = ["model", "parameters", "steps x batch", "CPU seconds"]
    columns += ["exact match", "dates", "exact match, held to dates"]
    return {
        "kind": "table",
        "study": "dates",
        "setting": f"{TESTED} dates never trained on",
        "columns": [*columns, "dates, held to dates"],
        "rows": rows,
        "cores": CORES,
        "versions": versions(),
    }


def _row(name: str, model: keras.Model, budget: str, seconds: str) -> list[str]:
    shares = [f"{share:.1%}" for share in measure(model, TESTED).values()]
    row = [name, f"{model.count_params():,}", budget, seconds, *shares]
    print(*row, sep="  ")
    return row


def draw_dates(results: dict[str, Any], folder: Path, out: Path) -> list[Path]:
    """Draws what each character of a translation reads of its source."""
    model = load(folder / "encoder-decoder-seed0").model
    (written,) = translate(model, [SHOWN])
    tokenizer, path = make_tokenizer(), out / "dates.png"
    inputs = START + written[:-1]
    maps = attention_maps(model, tokenizer.encode(inputs), tokenizer.encode(SHOWN))
    print(maps)
    plot_attention(
        maps.cross_weights,
        list(written),
        path,
        key_labels=list(SHOWN),
        title="Cross-attention: what each character written reads of the source",
    )
    return [path]
