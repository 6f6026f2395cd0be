"""What each preset is trained with.

The rates were chosen on validation parts, in short runs with the whole schedule. mini,
on that of tiny Shakespeare: GPT 0.004, 0.008, 0.016 (600 updates: 1.730, 1.690, 1.698
nats), LSTM 0.004, doubled up to 0.064 (1,000 updates: 1.642, 1.543, 1.490, 1.460,
1.444). book, on the last ninth of the training part: GPT 0.004, 0.008, 0.016 (1,200
updates: 1.587, 1.543, 1.558), LSTM 0.016, 0.032, 0.064 (1.594, 1.527, 1.506).
"""

import dataclasses
from typing import Any

from keras_tinygpt.models import GPTConfig, LSTMConfig
from keras_tinygpt.training import TrainConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Shape and training of a preset."""

    model: GPTConfig | LSTMConfig
    training: TrainConfig


TRAININGS: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt", "book"): {"steps": 1200, "learning_rate": 8e-3},
    ("gpt", "mini"): {"learning_rate": 8e-3},
    ("gpt", "tiny"): {
        "optimizer": "muon",
        "learning_rate": 0.02,
        "schedule": "linear",
        "decay_fraction": 0.6,
        "final_learning_rate_fraction": 0.0,
    },
    ("lstm", "book"): {"steps": 1200, "learning_rate": 0.064},
    ("lstm", "mini"): {"learning_rate": 0.064},
}


def recipe(architecture: str, preset: str, vocab_size: int = 1) -> Recipe:
    """Returns the recipe of a preset; ValueError if there is none."""
    if (architecture, preset) not in TRAININGS:
        known = [name for kind, name in TRAININGS if kind == architecture]
        raise ValueError(
            f"preset for architecture {architecture!r} must be one of "
            f"{', '.join(known)}, got {preset!r}"
        )
    config = GPTConfig if architecture == "gpt" else LSTMConfig
    return Recipe(
        config.preset(preset, vocab_size),
        TrainConfig(**TRAININGS[architecture, preset]),
    )
