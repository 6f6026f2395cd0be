"""Time to quality: seconds until the unseen part of tiny Shakespeare is read well.

On the split of the mini study and the backend in use, one after the other: the recipe
of the mini GPT in float32, the same in mixed_bfloat16, and a short run of the tiny
shape in mixed_bfloat16, on copies of the training part with invented names. Every 50
updates the test part is scored; the clock stands still meanwhile, and includes
compilation and the making of the copies. A run ends where it reaches the published loss
of the mini GPT; one that never does counts with its best.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.evaluation import evaluate
from keras_tinygpt.models import build_gpt
from keras_tinygpt.studies.mini import mini_study
from keras_tinygpt.studies.recipes import recipe
from keras_tinygpt.studies.runs import versions
from keras_tinygpt.studies.study import Variant, training_ids
from keras_tinygpt.text import (
    CharTokenizer,
    encode_corpus,
    load_corpus,
    split_parts,
)
from keras_tinygpt.training import TrainConfig, train

TARGET = 1.5481  # nats per character of the published mini GPT
SCORED_EVERY = 50
SHORT_STEPS, SHORT_COPIES = 1000, 2  # 700 end at 1.5600
COLUMNS = [
    *("model", "parameters", "steps x batch", "precision", "steps until then"),
    *("test nats then", "seconds until then", "times as fast"),
]


def quality_variants() -> list[Variant]:
    """Returns the runs, the one that the others are compared with first."""
    mini, tiny = recipe("gpt", "mini"), recipe("gpt", "tiny")
    short = dataclasses.replace(tiny.training, steps=SHORT_STEPS, batch_size=32)
    shape = dataclasses.replace(tiny.model, dropout=0.0)
    return [
        Variant("mini GPT", mini.model, mini.training),
        Variant("mini GPT", mini.model, mini.training, "mixed_bfloat16"),
        Variant(
            "tiny GPT, short, invented names",
            *(shape, short, "mixed_bfloat16"),
            renamed_copies=SHORT_COPIES,
        ),
    ]


def quality_results(options: Any, folder: Path) -> dict[str, Any]:
    """Trains each until it reaches the target; returns a results file of kind "table".

    Args:
        options: a `cli.StudyOptions`; `steps` replaces the budgets.
        folder: not used, as nothing is kept of the runs.
    """
    study = mini_study()
    corpus = load_corpus(options.corpus or study.corpus)
    tokenizer = CharTokenizer.from_text(corpus)
    parts = split_parts(encode_corpus(corpus, tokenizer), study.split)
    rows, first = [], None
    for variant in quality_variants():
        steps = options.steps or variant.training.steps
        training = dataclasses.replace(
            variant.training,
            steps=steps,
            validate_every=SCORED_EVERY,
            validation_windows=1,
        )
        config = dataclasses.replace(variant.config, vocab_size=tokenizer.vocab_size)
        model = build_gpt(config, dtype=variant.precision)
        probe = _train_until(model, parts, training, tokenizer, variant.renamed_copies)
        step, nats, seconds = probe.result()
        first = first or seconds
        rows.append(
            [
                *(variant.name, f"{model.count_params():,}"),
                *(f"{steps:,} x {training.batch_size}", variant.precision, step),
                *(f"{nats:.4f}", f"{seconds:.0f}", f"{first / seconds:.1f}"),
            ]
        )
    return {
        "kind": "table",
        "study": "quality",
        "setting": f"seconds to {TARGET} test nats, or to a recipe's best",
        "columns": COLUMNS,
        "rows": rows,
        "versions": versions(),
    }


class _Reached(Exception):
    """Ends a run."""


class _Probe(keras.callbacks.Callback):
    """Scores the model while the clock stands still; raises _Reached at the target."""

    def __init__(self, ids: np.ndarray, target: float):
        super().__init__()
        self.ids, self.target = ids, target
        self.started, self.paused = time.perf_counter(), 0.0
        self.scores: list[tuple[int, float, float]] = []  # step, nats, seconds

    def on_epoch_end(self, epoch, logs=None):
        now = time.perf_counter()
        nats = evaluate(self.model, self.ids).nats
        seconds = now - self.started - self.paused
        self.scores.append((logs["step"], nats, seconds))
        print(f"  test {nats:.4f} after {seconds:.0f} s of training", flush=True)
        self.paused += time.perf_counter() - now
        if nats <= self.target:
            raise _Reached

    def result(self) -> tuple[int, float, float]:
        """Step, nats and seconds of the best score."""
        return min(self.scores, key=lambda score: score[1])


def _train_until(
    model: keras.Model,
    parts: dict[str, np.ndarray],
    training: TrainConfig,
    tokenizer: CharTokenizer,
    renamed_copies: int,
) -> _Probe:
    """Trains until the test part is read well; returns the probe that saw it."""
    probe = _Probe(parts["test"], TARGET)
    ids = training_ids(parts["train"], tokenizer, renamed_copies, training.seed)
    with contextlib.suppress(_Reached):
        train(model, ids, parts["valid"], training, callbacks=[probe])
    return probe
