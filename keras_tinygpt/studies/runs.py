"""One training run from config to scores, as commands and studies share it."""

import contextlib
import dataclasses
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.evaluation import Scores, evaluate
from keras_tinygpt.models import (
    GPTConfig,
    LSTMConfig,
    NGram,
    build_gpt,
    build_lstm,
    fingerprint,
)
from keras_tinygpt.models.gpt import remat_scope
from keras_tinygpt.text import Corpus, Prepared
from keras_tinygpt.training import TrainConfig, TrainResult, model_window, train

CHECKPOINT = "checkpoints/state.json"
NGRAMS = ((3, 0.1), (5, 0.01))  # order and add-k of the printed baselines


@dataclasses.dataclass(frozen=True)
class Run:
    """One model to train.

    Args:
        name: of the row in tables.
        folder: where its checkpoints and its bundle go.
        config: shape of the model.
        training: how to train; its seed is that of the weights too.
        precision: Keras dtype policy.
        rematerialize: whether blocks are computed again for the backward pass.
    """

    name: str
    folder: Path
    config: GPTConfig | LSTMConfig
    training: TrainConfig
    precision: str = "float32"
    rematerialize: bool = False

    @property
    def started(self) -> bool:
        """Whether the folder holds a checkpoint to go on from."""
        return (self.folder / CHECKPOINT).exists()


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table of models; counted models have no steps and no seconds."""

    name: str
    parameters: int | None
    steps: int | None
    seconds: float | None
    scores: dict[str, Scores]  # by part
    tokens_per_character: dict[str, float] | None = None  # by part

    def bits_per_character(self, part: str) -> float:
        """Bits per token times the tokens per character of the part's text."""
        return self.scores[part].bits_per_token * self.tokens_per_character[part]

    def part_scores(self) -> dict[str, dict[str, float]]:
        """The scores as plain numbers."""
        scores = {name: dataclasses.asdict(s) for name, s in self.scores.items()}
        if self.tokens_per_character is not None:
            for name in scores:
                scores[name]["bits_per_character"] = self.bits_per_character(name)
        return scores


def fit_run(
    run: Run,
    parts: dict[str, np.ndarray],
    *,
    resume: bool,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    tensorboard: bool = False,
) -> tuple[keras.Model, TrainResult]:
    """Builds and trains the model of a run; `resume` goes on from a checkpoint."""
    build = build_gpt if isinstance(run.config, GPTConfig) else build_lstm
    scope = remat_scope(run.config) if run.rematerialize else contextlib.nullcontext()
    with scope:
        model = build(run.config, seed=run.training.seed, dtype=run.precision)
    print(
        f"\n{run.name}: {model.count_params():,} parameters, "
        f"{run.training.steps:,} steps of {run.training.batch_size} windows of "
        f"{model_window(model, run.training.sequence_length)} tokens",
        flush=True,
    )
    result = train(
        model,
        parts["train"],
        parts["valid"],
        run.training,
        directory=run.folder,
        callbacks=callbacks,
        resume=resume and run.started,
        tensorboard=tensorboard,
    )
    return model, result


def score_run(
    run: Run,
    model: keras.Model,
    result: TrainResult,
    parts: dict[str, np.ndarray],
    method: str | None = None,
) -> Row:
    """Scores a trained model on the given parts; `method` as in `evaluate`."""
    scores = {name: evaluate(model, ids, method) for name, ids in parts.items()}
    return Row(
        run.name, model.count_params(), run.training.steps, result.seconds, scores
    )


def count_ngrams(parts: dict[str, np.ndarray], vocab_size: int) -> list[Row]:
    """Counts n-grams in the training part and scores them on the others."""
    rows = []
    for order, k in NGRAMS:
        if min(map(len, parts.values())) <= order:
            continue
        model = NGram(order, k, vocab_size).fit(parts["train"])
        scores = {
            name: Scores.from_losses(
                model.nats(ids) * (len(ids) - order + 1), len(ids) - order + 1
            )
            for name, ids in parts.items()
            if name != "train"
        }
        rows.append(Row(f"{order}-gram, add {k}", None, None, None, scores))
    return rows


def run_metrics(
    run: Run,
    model: keras.Model,
    result: TrainResult,
    row: Row,
    corpus: Corpus | Prepared,
    source: str,
    parts: dict[str, np.ndarray],
) -> dict[str, Any]:
    """What a bundle records about its run; `source` is how the corpus was named."""
    return {
        "name": run.name,
        "corpus": {"name": corpus.name, "source": source, "sha256": corpus.sha256},
        "split": {name: len(ids) for name, ids in parts.items()},
        "architecture": "gpt" if isinstance(run.config, GPTConfig) else "lstm",
        "parameters": row.parameters,
        "precision": run.precision,
        "training": dataclasses.asdict(run.training),
        "scores": row.part_scores(),
        "seconds": round(result.seconds, 1),
        "tokens_per_second": round(result.tokens_per_second),
        "best_step": result.best_step,
        "fingerprints": {
            "initial": result.initial_fingerprint,
            "final": fingerprint(model),
            "schedule": result.schedule_fingerprint,
        },
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What the figures were made with."""
    return {
        "keras": keras.version(),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "backend": keras.backend.backend(),
    }


def print_table(rows: list[Row]) -> None:
    """Prints rows that were scored on the same parts.

    `bits` is per token, `bits/char` per character of the text, which compares models
    with different tokenizers; it is left out where a row does not know it.
    """
    names = list(rows[0].scores)
    by_character = all(row.tokens_per_character for row in rows)
    width = max(len(row.name) for row in rows)
    head = f"{'model':<{width}}  {'parameters':>10}  {'steps':>6}  {'seconds':>7}"
    for name in names:
        head += f"  {name + ' nats':>10}  {'perplexity':>10}  {'bits':>5}"
        head += f"  {'bits/char':>9}" if by_character else ""
    print(f"\n{head}")
    for row in rows:
        cells = [
            f"{'' if row.parameters is None else format(row.parameters, ','):>10}",
            f"{'' if row.steps is None else format(row.steps, ','):>6}",
            f"{'' if row.seconds is None else format(row.seconds, '.0f'):>7}",
        ]
        for name in names:
            score = row.scores[name]
            cells.append(
                f"{score.nats:>10.4f}  {score.perplexity:>10.2f}  "
                f"{score.bits_per_token:>5.2f}"
            )
            if by_character:
                cells.append(f"{row.bits_per_character(name):>9.4f}")
        print("  ".join([f"{row.name:<{width}}", *cells]))
