"""`tinygpt study`: run, tell, draw, write."""

import dataclasses
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_tinygpt.checks import check_int
from keras_tinygpt.files import write_json
from keras_tinygpt.plots import plot_study
from keras_tinygpt.studies.book import book_study
from keras_tinygpt.studies.context import context_results, draw_context
from keras_tinygpt.studies.filling import draw_filling, filling_results
from keras_tinygpt.studies.mini import mini_study, nanogpt_study
from keras_tinygpt.studies.quality import quality_results
from keras_tinygpt.studies.results import TABLES
from keras_tinygpt.studies.reversal import draw_reversal, reversal_results
from keras_tinygpt.studies.study import Study, by_name, last_nats, run_study
from keras_tinygpt.studies.translation import dates_results, draw_dates
from keras_tinygpt.training import TrainingStopped


def study_command(options: Any, argv: list[str]) -> Path:
    """Runs one study; returns the results file.

    Args:
        options: a `cli.StudyOptions`.
        argv: the flags as typed, for the line that says how to go on.
    """
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in UNREAD.get(options.name, ()) and value != field.default:
            raise ValueError(
                f"{field.name} must be left out for the {options.name} study, which "
                f"does not read it, got {value!r}"
            )
    check_int("seeds", options.seeds)
    if options.steps is not None:
        check_int("steps", options.steps)
    shared = {"context": "book"}.get(options.name, options.name)
    folder = options.folder or Path("saved_models", "studies", shared)
    out = options.out or options.folder or Path("saved_models", "studies", options.name)
    for name, path in (("out", out), ("folder", folder)):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{name}: {path} cannot be made: {error.strerror}") from error
    run, draw = STUDIES[options.name]
    try:
        results = run(options, folder)
    except KeyboardInterrupt as error:
        command = shlex.join(["tinygpt", "study", *argv])
        number = getattr(error, "signal", signal.SIGINT)
        raise TrainingStopped(number, f"go on with: {command}") from None
    results["command"] = shlex.join(["tinygpt", "study", *argv])
    write_json(out / f"{options.name}.json", results)
    print(f"\n{TABLES[results['kind']](results)}\n")
    figures = draw(results, folder, out)
    saved = [f"{options.name}.json", *(path.name for path in figures)]
    print(f"saved {out}: {', '.join(saved)}")
    return out / f"{options.name}.json"


def _compare(make: Callable[..., Study]) -> Callable[[Any, Path], dict[str, Any]]:
    def run(options: Any, folder: Path) -> dict[str, Any]:
        study = make()
        if options.corpus is not None:
            study = dataclasses.replace(study, corpus=options.corpus)
        return run_study(
            study,
            folder,
            seeds=options.seeds,
            only=options.only,
            steps=options.steps,
        )

    return run


def draw_study(results: dict[str, Any], folder: Path, out: Path) -> list[Path]:
    """Draws the two-panel figure and prints the samples."""
    groups = by_name(results)
    for name, rows in groups.items():
        print(f"--- {name}, temperature 0.8\n{rows[0]['sample']}\n")
    path = out / f"{results['study']}.png"
    plot_study(
        {name: rows[0]["history"] for name, rows in groups.items()},
        {name: [last_nats(row) for row in rows] for name, rows in groups.items()},
        path,
        title=results["title"],
        part=list(results["rows"][0]["scores"])[-1],
        baselines={
            name: list(scores.values())[-1]["nats"]
            for name, scores in results["ngrams"].items()
        },
    )
    return [path]


Runner = Callable[[Any, Path], dict[str, Any]]
Drawer = Callable[[dict[str, Any], Path, Path], list[Path]]  # runs, then figures
STUDIES: dict[str, tuple[Runner, Drawer]] = {
    "book": (_compare(book_study), draw_study),
    "mini": (_compare(mini_study), draw_study),
    "nanogpt": (_compare(nanogpt_study), draw_study),
    "quality": (quality_results, lambda results, folder, out: []),
    "context": (context_results, draw_context),
    "reversal": (reversal_results, draw_reversal),
    "dates": (dates_results, draw_dates),
    "filling": (filling_results, draw_filling),
}
UNREAD = {
    "quality": ("seeds", "only"),
    "context": ("seeds",),
    "reversal": ("corpus", "only"),
    "dates": ("corpus", "only"),
    "filling": ("only",),
}
