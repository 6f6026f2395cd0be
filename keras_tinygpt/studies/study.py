"""A study: several models under stated budgets over several seeds, on one text.

Every (variant, seed) is one run in a folder of its own. A run that is complete is read
instead of repeated, an interrupted one is continued, so a study can be stopped and
started at will, or spread over several calls. What it found is one JSON file, from
which tables and figures are made.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_tinygpt import bundle
from keras_tinygpt.checks import check_int
from keras_tinygpt.models import GPTConfig, LSTMConfig
from keras_tinygpt.studies.runs import (
    Run,
    count_ngrams,
    fit_run,
    run_metrics,
    score_run,
)
from keras_tinygpt.text import (
    CharTokenizer,
    Corpus,
    encode_corpus,
    load_corpus,
    rename_speakers,
    split_parts,
)
from keras_tinygpt.training import TrainConfig

SAMPLE_TOKENS = 200
SAMPLE_TEMPERATURE = 0.8
KEPT = (
    "parameters",
    "precision",
    "training",
    "renamed_copies",
    "scores",
    "seconds",
    "tokens_per_second",
    "best_step",
    "fingerprints",
    "history",
    "sample",
    "versions",
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of a study.

    Args:
        name: of the row.
        config: shape; its vocab_size is replaced by the text's.
        training: budget and optimizer; its seed is replaced by the run's.
        precision: Keras dtype policy.
        renamed_copies: of the training part, each with other names of its speakers;
            half of the windows are drawn from these.
    """

    name: str
    config: GPTConfig | LSTMConfig
    training: TrainConfig
    precision: str = "float32"
    renamed_copies: int = 0

    @property
    def slug(self) -> str:
        """The name as part of a folder name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclasses.dataclass(frozen=True)
class Study:
    """What is compared on what.

    Args:
        name: of the study.
        title: of its figure.
        corpus: text file or known name.
        split: fractions or counts of the parts.
        variants: the rows, first the one the others are compared with.
        scored: names of the parts that are scored; the last one is the result.
        method: how, as in `evaluate`; None means each model's best.
        prompt: start of the samples.
    """

    name: str
    title: str
    corpus: str
    split: tuple[float, ...]
    variants: tuple[Variant, ...]
    scored: tuple[str, ...]
    method: str | None
    prompt: str


def run_study(
    study: Study,
    folder: Path,
    *,
    seeds: int = 1,
    only: Sequence[str] = (),
    steps: int | None = None,
) -> dict[str, Any]:
    """Trains what is missing and returns the results of all complete runs.

    Args:
        study: what to run.
        folder: where the runs go, one folder each.
        seeds: runs per variant, with seeds 0, 1, ...
        only: names of the variants to train; none means all.
        steps: replaces every budget, for a quick trial.

    Returns:
        The content of a results file of kind "study".
    """
    check_int("seeds", seeds)
    names = [variant.name for variant in study.variants]
    for name in only:
        if name not in names:
            raise ValueError(f"only must be among {'; '.join(names)}, got {name!r}")
    corpus = load_corpus(study.corpus)
    tokenizer = CharTokenizer.from_text(corpus)
    parts = split_parts(encode_corpus(corpus, tokenizer), study.split)
    tokenizer.encode(study.prompt)
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items())
    print(f"{corpus.name}: vocabulary {tokenizer.vocab_size}; tokens: {sizes}")
    counts = count_ngrams(parts, tokenizer.vocab_size)
    for count in counts:
        scores = ", ".join(f"{k} {s.nats:.4f}" for k, s in count.scores.items())
        print(f"{count.name}: {scores}")

    rows = []
    for variant in study.variants:
        for seed in range(seeds):
            run = _run(variant, seed, tokenizer.vocab_size, folder, steps)
            copies = variant.renamed_copies
            done = _finished(run, copies, corpus, parts)
            if done is None and (not only or variant.name in only):
                done = _train(study, run, copies, corpus, tokenizer, parts)
            if done is not None:
                rows.append({"name": variant.name, "seed": seed, **done})
                print(f"{variant.name}, seed {seed}: {_summary(done)}", flush=True)
    if not rows:
        raise ValueError(f"only must name a variant with runs, got {'; '.join(only)}")
    return {
        "kind": "study",
        "study": study.name,
        "title": study.title,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "split": {name: len(ids) for name, ids in parts.items()},
        "method": study.method or "strided (GPT), stateful (LSTM)",
        "ngrams": {count.name: count.part_scores() for count in counts},
        "prompt": study.prompt,
        "rows": rows,
    }


def _run(
    variant: Variant, seed: int, vocab_size: int, folder: Path, steps: int | None
) -> Run:
    changes: dict[str, Any] = {"seed": seed}
    if steps is not None:
        changes["steps"] = steps
        changes["warmup_steps"] = min(variant.training.warmup_steps or 0, steps // 10)
    return Run(
        variant.name,
        folder / f"{variant.slug}-seed{seed}",
        dataclasses.replace(variant.config, vocab_size=vocab_size),
        dataclasses.replace(variant.training, **changes),
        variant.precision,
    )


def _finished(
    run: Run, renamed_copies: int, corpus: Corpus, parts
) -> dict[str, Any] | None:
    """What a complete run recorded, or None; an error if it was another run."""
    path = run.folder / bundle.METRICS
    if not path.exists():
        return None
    metrics = json.loads(path.read_text("utf-8"))["metrics"]
    metrics.setdefault("renamed_copies", 0)  # which earlier runs do not record
    try:  # fields that came later have their defaults
        saved = {
            "training": TrainConfig(**metrics["training"]),
            "config": type(run.config)(**metrics["config"]),
            "precision": metrics["precision"],
            "renamed_copies": metrics["renamed_copies"],
            "split": metrics["split"],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not of a study: {error}") from error
    expected = {
        "training": run.training,
        "config": run.config,
        "precision": run.precision,
        "renamed_copies": renamed_copies,
        "split": {name: len(ids) for name, ids in parts.items()},
    }
    for key, value in expected.items():
        if saved[key] != value:
            raise ValueError(f"{run.folder} holds a run with another {key}; remove it")
    if metrics["corpus"]["sha256"] != corpus.sha256:
        raise ValueError(f"{run.folder} holds a run on another text; remove it")
    return {key: metrics[key] for key in KEPT}


def _train(
    study: Study, run: Run, renamed_copies: int, corpus: Corpus, tokenizer, parts
) -> dict[str, Any]:
    train_ids = training_ids(
        parts["train"], tokenizer, renamed_copies, run.training.seed
    )
    model, result = fit_run(run, {**parts, "train": train_ids}, resume=True)
    scored = {name: parts[name] for name in study.scored}
    row = score_run(run, model, result, scored, study.method)
    kept = ("step", "loss", "valid_loss", "seconds")
    metrics = {
        **run_metrics(run, model, result, row, corpus, study.corpus, parts),
        "config": dataclasses.asdict(run.config),
        "renamed_copies": renamed_copies,
        "history": [{k: round(entry[k], 4) for k in kept} for entry in result.history],
        "sample": _sample(model, tokenizer, study.prompt),
    }
    bundle.save(run.folder, model, tokenizer, metrics, overwrite=True)
    return {key: metrics[key] for key in KEPT}


def training_ids(
    ids: np.ndarray, tokenizer: CharTokenizer, renamed_copies: int, seed: int
) -> np.ndarray:
    """Returns `ids`, or alternately `ids` and one of the copies, speakers renamed."""
    if not renamed_copies:
        return ids
    text, first = tokenizer.decode(ids), renamed_copies * seed
    copies = []
    for number in range(renamed_copies):
        copies += [ids, tokenizer.encode(rename_speakers(text, first + number))]
    return np.concatenate(copies)


def _sample(model, tokenizer, prompt: str) -> str:
    return bundle.LanguageModel(model, tokenizer).generate(
        prompt, SAMPLE_TOKENS, temperature=SAMPLE_TEMPERATURE, seed=0
    )


def _summary(done: dict[str, Any]) -> str:
    scores = ", ".join(f"{name} {s['nats']:.4f}" for name, s in done["scores"].items())
    prints = done["fingerprints"]
    return (
        f"{scores}; {done['seconds']:.0f} s; weights {prints['initial'][:8]}, "
        f"schedule {prints['schedule'][:8]}"
    )


def by_name(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a study by variant, in order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in results["rows"]:
        groups.setdefault(row["name"], []).append(row)
    return groups


def last_nats(row: dict[str, Any]) -> float:
    """The result of one run: nats on the last part that was scored."""
    return list(row["scores"].values())[-1]["nats"]


def paired_differences(results: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Nats of each run less those of the first variant with the same seed."""
    groups = by_name(results)
    first = {row["seed"]: last_nats(row) for row in next(iter(groups.values()))}
    return {
        name: {
            row["seed"]: last_nats(row) - first[row["seed"]]
            for row in rows
            if row["seed"] in first
        }
        for name, rows in groups.items()
    }


def spread(values: Sequence[float]) -> str:
    """Mean and, for several runs, standard deviation as text."""
    mean = f"{np.mean(values):.4f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1):.4f}"
