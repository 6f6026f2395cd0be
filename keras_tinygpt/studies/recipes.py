"""What each preset is trained with.

Chosen on validation parts. mini, on that of tiny Shakespeare: GPT, 600 updates with
beta_2 0.99, at 0.004, 0.008, 0.016: 1.730, 1.690, 1.698 nats, yet after all 3,000
updates 0.008 had 1.4116 and 0.004 with beta_2 0.999 had 1.4110; LSTM, 1,000 updates, at
0.004, doubled up to 0.064: 1.642, 1.543, 1.490, 1.460, 1.444. book, 1,200 updates on
the last ninth of the training part: GPT, AdamW at 0.004, 0.008, 0.016: 1.587, 1.543,
1.558, Muon at 0.02 without dropout, with 0.1, with 0.2: 1.532, 1.468, 1.548; LSTM at
0.016, 0.032, 0.064: 1.594, 1.527, 1.506, the last with dropout 0.2: 1.501.
"""

import dataclasses
from typing import Any

from keras_tinygpt.checks import check_choice
from keras_tinygpt.models import GPTConfig, LSTMConfig
from keras_tinygpt.training import TrainConfig


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Shape and training of a preset."""

    model: GPTConfig | LSTMConfig
    training: TrainConfig


MUON: dict[str, Any] = {
    "optimizer": "muon",
    "learning_rate": 0.02,
    "schedule": "linear",
    "decay_fraction": 0.6,
    "final_learning_rate_fraction": 0.0,
}
TRAININGS: dict[tuple[str, str], dict[str, Any]] = {
    ("gpt", "book"): {"steps": 1200, **MUON},
    ("gpt", "mini"): {"learning_rate": 0.004, "beta_2": 0.999},
    ("gpt", "tiny"): MUON,
    ("lstm", "book"): {"steps": 1200, "learning_rate": 0.064},
    ("lstm", "mini"): {"learning_rate": 0.064},
}
DROPOUTS = {("gpt", "book"): 0.1, ("lstm", "book"): 0.2}  # the protocol has none


def recipe(architecture: str, preset: str, vocab_size: int = 1) -> Recipe:
    """Returns the recipe of a preset; ValueError if there is none."""
    check_choice("architecture", architecture, ("gpt", "lstm"))
    if (architecture, preset) not in TRAININGS:
        known = [name for kind, name in TRAININGS if kind == architecture]
        raise ValueError(
            f"preset for architecture {architecture!r} must be one of "
            f"{', '.join(known)}, got {preset!r}"
        )
    config = GPTConfig if architecture == "gpt" else LSTMConfig
    shape, name = config.preset(preset, vocab_size), (architecture, preset)
    shape = dataclasses.replace(shape, dropout=DROPOUTS.get(name, shape.dropout))
    return Recipe(shape, TrainConfig(**TRAININGS[name]))
