"""Plots as PNG files, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

# Okabe and Ito's colours, told apart with any colour vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", ":", "-.")


def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a matplotlib figure as PNG."""
    FigureCanvasAgg(figure).print_png(str(path))


def _finish(
    figure: Figure, labels: tuple[str, str], title: str, path: str | Path
) -> None:
    """Labels, title, grid and legend of a figure with one pair of axes; writes it."""
    (axes,) = figure.axes
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)


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
    _finish(figure, ("optimizer step", "loss (nats per token)"), title, path)


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
    styles = [(color, line) for line in LINES for color in COLORS]
    for (color, line), (name, values) in zip(styles, lines.items(), strict=False):
        axes.plot(places, values, line, color=color, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))
    axes.set_xticks(places, [f"{place:,}" for place in places])
    _finish(figure, labels, title, path)


def plot_bars(
    values: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    label: str = "held-out loss (nats per token)",
    title: str = "Comparison",
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draws the mean of several runs as a bar, their range as a whisker, each a dot.

    Args:
        values: one number per run, by name; bars are in this order, first on top.
        path: PNG file to write.
        label: of the horizontal axis.
        title: of the plot.
        baselines: values drawn as vertical lines, by name.
    """
    height = 1.3 + 0.45 * len(values) + (0.3 if baselines else 0.0)
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    highest = max(max(runs) for runs in values.values())
    for row, runs in enumerate(values.values()):
        mean = sum(runs) / len(runs)
        axes.barh(row, mean, color=COLORS[row % len(COLORS)], alpha=0.75, height=0.65)
        axes.plot([min(runs), max(runs)], [row, row], color="black", linewidth=1.2)
        if len(runs) > 1:
            axes.plot(runs, [row] * len(runs), "o", color="black", markersize=3.5)
        axes.annotate(
            f"{mean:.3f}", (0, row), (6, 0), textcoords="offset points", va="center"
        )
    for index, (name, value) in enumerate((baselines or {}).items()):
        axes.axvline(value, color="0.35", linestyle=(":", "-.")[index % 2], label=name)
    axes.set_yticks(range(len(values)), list(values), parse_math=False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(highest, *(baselines or {"": 0.0}).values()))
    axes.set_xlabel(label)
    axes.set_title(title, parse_math=False)
    axes.grid(axis="x", alpha=0.25)
    if baselines:
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
    save_figure(figure, path)


def plot_study(
    histories: Mapping[str, Sequence[Mapping[str, Any]]],
    values: Mapping[str, Sequence[float]],
    path: str | Path,
    *,
    title: str,
    part: str = "held-out",
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Draws validation curves on the left and the final losses on the right.

    Args:
        histories: validation rows (step, valid_loss) of one run, by name.
        values: final loss of every run, by the same names.
        path: PNG file to write.
        title: of the figure.
        part: of the text that the final losses are on.
        baselines: losses on that part, in nats, drawn as lines by name.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    styles = [(color, line) for line in LINES for color in COLORS]
    for index, (name, history) in enumerate(histories.items()):
        color, line = styles[index]
        steps = [row["step"] for row in history]
        losses = [row["valid_loss"] for row in history]
        curves.plot(steps, losses, color=color, linestyle=line, label=name, marker=".")
    for index, runs in enumerate(values.values()):
        mean = sum(runs) / len(runs)
        bars.plot([min(runs), max(runs)], [index, index], color="black", linewidth=1)
        bars.plot(runs, [index] * len(runs), "o", color=styles[index][0], alpha=0.6)
        bars.annotate(
            f"{mean:.3f}",
            (max(runs), index),
            (9, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    for index, (name, value) in enumerate((baselines or {}).items()):
        line = (":", "-.")[index % 2]
        bars.axvline(value, color="0.45", linestyle=line, label=name)
    bars.set_yticks(range(len(values)), list(values), parse_math=False)
    bars.invert_yaxis()
    bars.margins(x=0.2)
    bars.set_xlabel(f"final {part} loss (nats per token), a dot a seed")
    if baselines:
        bars.legend(
            fontsize="small", loc="lower right", framealpha=1.0, edgecolor="none"
        )
    bars.grid(axis="x", alpha=0.25)
    curves.set_xlabel("optimizer step")
    curves.set_ylabel("validation loss (nats per token)")
    curves.grid(alpha=0.25)
    curves.legend(frameon=False, fontsize="small")
    figure.suptitle(title, parse_math=False)
    save_figure(figure, path)
