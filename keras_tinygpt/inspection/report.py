"""Everything this package can show of one model, as a folder of figures and numbers."""

from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.checks import check_ids
from keras_tinygpt.files import write_json
from keras_tinygpt.generation.sampling import SamplingConfig
from keras_tinygpt.inspection import figures
from keras_tinygpt.inspection.causes import causes
from keras_tinygpt.inspection.heads import head_metrics
from keras_tinygpt.inspection.leaks import leak_test
from keras_tinygpt.inspection.maps import attention_maps
from keras_tinygpt.inspection.parts import find_blocks
from keras_tinygpt.inspection.predictions import (
    character_surprise,
    next_tokens,
    print_surprise,
    surprise,
)
from keras_tinygpt.inspection.probes import (
    position_probe,
    token_similarity,
    without_positions,
)
from keras_tinygpt.models.configured import check_predicts_next_tokens
from keras_tinygpt.models.gpt import GPT
from keras_tinygpt.training import model_window

MAP_TOKENS = 32  # more of them cannot be read along the sides of a map
MOST_TOKENS = 1024  # of the text whose surprise is drawn
MOST_WINDOWS = 256  # of the held-out text that the heads are measured on
OF_ATTENTION = "attention maps, head metrics, causes, position probe, token similarity"


def write_report(
    model: keras.Model,
    tokenizer: Any,
    text: Any,
    held_out: Any,
    folder: Path,
    sampling: SamplingConfig | None = None,
) -> dict[str, Any]:
    """Inspects a model, prints the main figures and writes the rest to a folder.

    Args:
        model: functional model, int (B, T) -> logits (B, T, V).
        tokenizer: the model's.
        text: int array (n,), n >= 3, the text that is shown; its first 1,024 tokens.
        held_out: int array (m,), more than two windows, on which heads are measured.
        folder: existing folder for the PNG files, `inspection.json` and, for models
            with attention, `maps.npz` (weights, effects and mean weights in full).
        sampling: filters of the next-token view.

    Returns:
        What `inspection.json` holds.
    """
    check_predicts_next_tokens(model)
    text = check_ids(text, model.output_shape[-1], "text", least=3)[:MOST_TOKENS]
    report: dict[str, Any] = {"parameters": model.count_params(), "skipped": {}}
    report["leak"] = _leaks(model)
    try:
        find_blocks(model)
    except ValueError as error:
        report["skipped"] = {"what": OF_ATTENTION, "why": str(error)}
        print(f"not for this model: {OF_ATTENTION} ({error})")
    else:
        report |= _attention(model, tokenizer, text[:MAP_TOKENS], held_out, folder)
        report |= _depth(model, held_out, folder)
    report |= _predictions(model, tokenizer, text, folder, sampling)
    write_json(folder / "inspection.json", report)
    return report


def _leaks(model) -> dict[str, Any]:
    found = {}
    for name, training in (("inference", False), ("training", True)):
        leak = leak_test(model, training=training)
        found[name] = None if leak is None else leak._asdict()
        print(f"leak test, {name} mode: {'none' if leak is None else leak}")
    return found


def _attention(model, tokenizer, text, held_out, folder: Path) -> dict[str, Any]:
    """Maps, head metrics and causes."""
    text = text[: model_window(model)]
    labels = [tokenizer.decode([token]) for token in text.tolist()]
    maps = attention_maps(model, text)
    print(maps)
    figures.plot_attention(maps.weights, labels, folder / "attention.png")
    metrics = head_metrics(model, held_out, max_windows=MOST_WINDOWS)
    print(f"\nheads over {metrics.windows} windows:\n{metrics.table()}\n")
    figures.plot_heads(metrics, folder / "heads.png")
    figures.plot_profiles(metrics, folder / "profiles.png")
    measured = causes(model, text)
    print("rank correlation of weight and effect, a row a block:")
    for row in measured.correlation:
        print("  ".join(f"{value:6.3f}" for value in row))
    figures.plot_causes(measured, folder / "causes.png")
    np.savez_compressed(
        folder / "maps.npz",
        tokens=text,
        weights=maps.weights,
        effects=measured.effects,
        mean_map=metrics.mean_map,
    )
    return {
        "attention": {
            "text": "".join(labels),
            "largest_forbidden_weight": maps.forbidden_weight,
            "largest_row_sum_error": maps.row_sum_error,
        },
        "heads": metrics.numbers(),
        "causes": {
            "rank_correlation": _finite(measured.correlation),
            "rank_correlation_of_last_query": _finite(measured.last_correlation),
        },
    }


def _finite(values: np.ndarray) -> list:
    """Nested lists with None for NaN, which JSON cannot hold."""
    return np.where(np.isfinite(values), values, None).tolist()


def _depth(model, held_out, folder: Path) -> dict[str, Any]:
    """Position probes and similarity of the token vectors."""
    probes = {"as trained": position_probe(model, held_out)}
    if isinstance(model, GPT) and model.config.positions != "none":
        bare = without_positions(model)
        probes["positional signal removed"] = position_probe(bare, held_out)
    figures.plot_position_probe(probes, folder / "positions.png")
    similarities = token_similarity(model, held_out)
    figures.plot_similarity(similarities, folder / "similarity.png")
    return {
        "position_probe": {
            name: {
                "r_squared": probe.r_squared.tolist(),
                "mean_error": probe.mean_error.tolist(),
            }
            for name, probe in probes.items()
        },
        "token_similarity": {name: x.tolist() for name, x in similarities.items()},
    }


def _predictions(model, tokenizer, text, folder: Path, sampling) -> dict[str, Any]:
    """Next-token view after the text, and the surprise along it."""
    candidates = next_tokens(model, text, sampling)
    labels = [tokenizer.decode([candidate.token]) for candidate in candidates]
    context = figures.visible(tokenizer.decode(text[-24:]))
    figures.plot_next_tokens(
        labels,
        [candidate.probability for candidate in candidates],
        [candidate.chance for candidate in candidates],
        folder / "next_tokens.png",
        title=f"after \u2026{context}",
    )
    nats = surprise(model, text)
    pieces = character_surprise(tokenizer, text, nats)
    figures.plot_surprise(pieces, folder / "surprise.png")
    print(f"\nsurprise, mean {nats.mean():.4f} nats per token:")
    print_surprise(pieces)
    print(f"\nnext: {', '.join(map(_candidate, labels[:5], candidates[:5]))}")
    return {
        "next_tokens": [
            {"text": label, **candidate._asdict()}
            for label, candidate in zip(labels, candidates, strict=True)
        ],
        "surprise": {
            "mean_nats": float(nats.mean()),
            "characters": [[piece, cost] for piece, cost in pieces],
        },
    }


def _candidate(label: str, candidate) -> str:
    return f"{label!r} {candidate.probability:.3f} -> {candidate.chance:.3f}"
