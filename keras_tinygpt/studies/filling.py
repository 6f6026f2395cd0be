"""The filling study: hidden characters, told from both sides or from the left alone.

An encoder and a GPT of the same shape see the same windows equally often. The encoder
is asked for the hidden characters of a text; the GPT for the same ones, each as the
next character of the true text before it.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.bundle import load, save
from keras_tinygpt.generation import fill_masks
from keras_tinygpt.generation.decoding import CORES
from keras_tinygpt.inspection.figures import plot_attention
from keras_tinygpt.inspection.maps import attention_maps
from keras_tinygpt.models import (
    Encoder,
    EncoderConfig,
    GPTConfig,
    build_encoder,
    build_gpt,
)
from keras_tinygpt.models.transformer import TransformerConfig
from keras_tinygpt.studies.runs import versions
from keras_tinygpt.text import (
    EMBEDDED_NAME,
    CharTokenizer,
    Corpus,
    MaskedWindowDataset,
    WindowDataset,
    encode_corpus,
    even_starts,
    load_corpus,
    split_ids,
    window_schedule,
)
from keras_tinygpt.training import TrainConfig, compile_model

MASK = "\u2588"
MASK_RATE = 0.15
SHOWN = f"The b{MASK}ll ra{MASK}g tw{MASK}ce."
TRAINING = TrainConfig(steps=1500, batch_size=32, learning_rate=3e-3)


def mask_tokenizer(corpus: Corpus) -> CharTokenizer:
    """Returns the tokenizer of a corpus with `MASK` as its last character."""
    vocabulary = CharTokenizer.from_text(corpus).vocabulary
    return CharTokenizer([*vocabulary, MASK])


def train_on_windows(
    model: keras.Model, ids: np.ndarray, config: TrainConfig, seed: int = 0
) -> keras.Model:
    """Trains in place: an encoder to fill in, a GPT to continue, the same windows."""
    length = model.config.max_sequence_length
    starts = window_schedule(len(ids), length, config.steps, config.batch_size, seed)
    if isinstance(model, Encoder):
        vocab_size = model.config.vocab_size
        dataset = MaskedWindowDataset(
            ids, starts, length, vocab_size, vocab_size - 1, MASK_RATE, seed
        )
    else:
        dataset = WindowDataset(ids, starts, length)
    compile_model(model, config)
    model.fit(dataset, epochs=1, shuffle=False, verbose=0)
    return model


def share_told(model: keras.Model, ids: np.ndarray) -> float:
    """Share of hidden characters that a model's most probable one is right about.

    Args:
        model: an encoder, or a GPT that reads the true text before each.
        ids: int array (n,); its separate windows are read, their first character left
            out.
    """
    length, mask = model.config.max_sequence_length, model.config.vocab_size - 1
    windows = even_starts(len(ids), length)[:, None] + np.arange(length)
    windows = np.asarray(ids)[windows].astype("int32")
    random = np.random.Generator(np.random.Philox(0))
    hidden = random.random(windows.shape) < MASK_RATE
    hidden[:, 0] = False
    is_encoder = isinstance(model, Encoder)
    inputs = np.where(hidden, mask, windows) if is_encoder else windows
    logits = model.predict(inputs, verbose=0)[..., :mask]
    told = logits.argmax(axis=-1)
    if not is_encoder:
        told = np.roll(told, 1, axis=1)  # what comes next, one place further on
    return float(np.mean(told[hidden] == windows[hidden]))


def fill_text(model: Encoder, tokenizer: CharTokenizer, text: str) -> str:
    """Returns `text` with a character in the place of each `MASK`."""
    mask = tokenizer.vocab_size - 1
    return tokenizer.decode(fill_masks(model, tokenizer.encode(text), mask))


def filling_results(options: Any, folder: Path) -> dict[str, Any]:
    """Trains both models for each seed and measures them; see `cli.StudyOptions`."""
    corpus = load_corpus(options.corpus or EMBEDDED_NAME)
    tokenizer, config = mask_tokenizer(corpus), TRAINING
    if options.steps is not None:
        config = dataclasses.replace(config, steps=options.steps)
    train_ids, held_out = split_ids(encode_corpus(corpus, tokenizer))
    commonest = np.bincount(train_ids).argmax()
    share = np.mean(held_out == commonest)
    rows = [["the commonest character", "nothing", "", "", "", f"{share:.1%}"]]
    shape = EncoderConfig.preset("tiny", vocab_size=tokenizer.vocab_size)
    for seed in range(options.seeds):
        encoder, gpt = build_encoder(shape, seed), build_gpt(_as_gpt(shape), seed)
        for name, reads, model in (
            ("encoder", "both sides", encoder),
            ("GPT", "the left side", gpt),
        ):
            started = time.process_time()
            train_on_windows(model, train_ids, config, seed)
            seconds = time.process_time() - started
            budget = f"{config.steps:,} x {config.batch_size}"
            right = f"{share_told(model, held_out):.1%}"
            size = f"{model.count_params():,}"
            rows.append([name, reads, size, budget, f"{seconds:.0f}", right])
            print(*rows[-1], sep="  ")
        save(folder / f"encoder-seed{seed}", encoder, tokenizer, overwrite=True)
    return {
        "kind": "table",
        "study": "filling",
        "setting": f"held-out tenth of {corpus.name}, {MASK_RATE:.0%} hidden",
        "columns": [
            "model",
            "reads",
            "parameters",
            "steps x batch",
            "CPU seconds",
            "told",
        ],
        "rows": rows,
        "cores": CORES,
        "versions": versions(),
    }


def _as_gpt(config: EncoderConfig) -> GPTConfig:
    """The same shape, read from the left alone."""
    fields = dataclasses.fields(TransformerConfig)
    return GPTConfig(**{field.name: getattr(config, field.name) for field in fields})


def draw_filling(results: dict[str, Any], folder: Path, out: Path) -> list[Path]:
    """Draws what each character of a text reads while three of them are hidden."""
    language_model = load(folder / "encoder-seed0")
    model, tokenizer = language_model.model, language_model.tokenizer
    print(f"{SHOWN} -> {fill_text(model, tokenizer, SHOWN)}")
    maps = attention_maps(model, tokenizer.encode(SHOWN))
    print(maps)
    path = out / "filling.png"
    title = "An encoder's attention: hidden characters read both sides"
    plot_attention(maps.weights, list(SHOWN), path, title=title)
    return [path]
