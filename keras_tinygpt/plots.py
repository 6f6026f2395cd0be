"""Plots as PNG files, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a matplotlib figure as PNG."""
    FigureCanvasAgg(figure).print_png(str(path))


def plot_history(
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    path: str | Path,
    *,
    baselines: Mapping[str, float] | None = None,
    title: str = "Training",
) -> None:
    """Draws loss against step, training dashed and validation solid.

    Args:
        histories: `TrainResult.history` by model name.
        path: PNG file to write.
        baselines: losses in nats drawn as horizontal lines, by name.
        title: of the plot.
    """
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for color, (name, history) in zip(COLORS, histories.items(), strict=False):
        steps = [row["step"] for row in history]
        marker = "o" if len(steps) < 3 else None
        axes.plot(
            steps,
            [row["loss"] for row in history],
            color=color,
            linestyle="--",
            marker=marker,
            label=f"{name}, training",
        )
        axes.plot(
            steps,
            [row["valid_loss"] for row in history],
            color=color,
            marker=marker,
            label=f"{name}, held out",
        )
    for index, (name, nats) in enumerate((baselines or {}).items()):
        axes.axhline(nats, color="0.45", linestyle=(":", "-.")[index % 2], label=name)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_lines(
    lines: Mapping[str, Sequence[float]],
    places: Sequence[float],
    path: str | Path,
    *,
    labels: tuple[str, str],
    title: str,
) -> None:
    """Draws named lines over common places on two logarithmic axes.

    Args:
        lines: values by name, each as many as `places`.
        places: positive positions on the horizontal axis, all of them ticked.
        path: PNG file to write.
        labels: of the horizontal and the vertical axis.
        title: of the plot.
    """
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for color, (name, values) in zip(COLORS, lines.items(), strict=False):
        axes.plot(places, values, color=color, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)
