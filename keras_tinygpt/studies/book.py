"""The book study: the same small budget for every way to tell positions, and an LSTM.

After the matched comparison of a textbook chapter: contiguous 90/10 split, windows of
100 characters, 64 a batch, 2,501 updates of Adam at 0.002 with the gradient's norm
clipped at 1, no dropout, the last weights scored on separate windows. Variants start
from the same tensors wherever their shapes agree and see the same windows.

Two more rows get a recipe of their own within as many parameters and as many updates of
the same windows: dropout 0.2 for both; for the GPT what the `tiny` preset is made of,
nothing searched; for the LSTM AdamW and a cosine decay from the rate of its preset,
chosen among five (`recipes`).
"""

import dataclasses
from typing import Any

from keras_tinygpt.models import GPTConfig, LSTMConfig
from keras_tinygpt.studies.recipes import recipe
from keras_tinygpt.studies.study import Study, Variant
from keras_tinygpt.text.corpus import EMBEDDED_NAME
from keras_tinygpt.training import TrainConfig

PROTOCOL = TrainConfig(
    steps=2501,
    batch_size=64,
    optimizer="adam",
    learning_rate=2e-3,
    schedule="constant",
    warmup_steps=0,
    beta_2=0.999,
    clip_norm=1.0,
    validate_every=250,
    restore_best=False,
)
SHAPES = {
    "GPT, sinusoidal positions": {"positions": "sinusoidal"},
    "GPT, no positions": {"positions": "none"},
    "GPT, learned positions": {"positions": "learned"},
    # Rotation needs an even head width; the others have 4 heads of 21.
    "GPT, rotary positions, 6 heads": {"positions": "rotary", "num_heads": 6},
    "GPT, alibi positions": {"positions": "alibi"},
}


def book_study(own_recipes: bool = True) -> Study:
    """Returns the study, with or without the two rows under recipes of their own."""
    variants = [
        Variant(name, GPTConfig.preset("book", 1, **changes), PROTOCOL)
        for name, changes in SHAPES.items()
    ]
    variants.append(Variant("LSTM", LSTMConfig.preset("book", 1), PROTOCOL))
    if own_recipes:
        variants += _own_recipes()
    return Study(
        name="book",
        title="Positions and recurrence under one protocol",
        corpus=EMBEDDED_NAME,
        split=(0.9, 0.1),
        variants=tuple(variants),
        scored=("train", "valid"),
        method="windows",
        prompt="The ",
    )


def _own_recipes() -> list[Variant]:
    tiny, lstm = recipe("gpt", "tiny"), recipe("lstm", "book")
    book = GPTConfig.preset("book", 1, num_heads=6)
    size = (
        *("max_sequence_length", "num_layers", "num_heads"),
        *("hidden_dim", "intermediate_dim"),
    )
    shape = _with(tiny.model, book, size)
    budget = ("steps", "batch_size", "clip_norm", "validate_every", "restore_best")
    gpt = Variant("GPT, own recipe", shape, _with(tiny.training, PROTOCOL, budget))
    training = _with(lstm.training, PROTOCOL, budget)
    return [gpt, Variant("LSTM, own recipe", lstm.model, training)]


def _with(config: Any, other: Any, names: tuple[str, ...]) -> Any:
    """A config with some fields of another."""
    return dataclasses.replace(config, **{name: getattr(other, name) for name in names})
