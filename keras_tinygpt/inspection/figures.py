"""The figures of `tinygpt inspect`."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from keras_tinygpt.inspection.causes import Causes
from keras_tinygpt.inspection.heads import HeadMetrics
from keras_tinygpt.inspection.predictions import surprise_color
from keras_tinygpt.inspection.probes import PositionProbe
from keras_tinygpt.plots import COLORS, LINES, save_figure

VISIBLE = {" ": "\u2423", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"}
MOST_LABELS = 64
MOST_COLUMNS = 6
# White to dark blue: an ordered scale that survives grey print.
SEQUENTIAL = ListedColormap(matplotlib.colormaps["Blues"](np.linspace(0.0, 1.0, 64)))


def visible(text: str) -> str:
    """The text with blanks as symbols and what the font lacks as an empty box."""
    font = get_font(findfont(FontProperties()))
    shown = []
    for character in text:
        character = VISIBLE.get(character, character)
        if unicodedata.category(character)[0] == "C":
            character = "\u25a1"
        shown.append(character if font.get_char_index(ord(character)) else "\u25a1")
    return "".join(shown)


def plot_attention(
    weights: np.ndarray,
    labels: Sequence[str],
    path: str | Path,
    *,
    key_labels: Sequence[str] | None = None,
    blocks: Sequence[int] | None = None,
    title: str = "Attention weights",
) -> None:
    """Draws the maps of every head of some blocks, each block on rows of its own.

    Args:
        weights: array (L, N, T, S).
        labels: text of each token that reads, T of them.
        path: PNG file to write.
        key_labels: text of each token that is read, S of them; None means `labels`.
        blocks: their numbers; None means the first and the last.
        title: of the figure.
    """
    if blocks is None:
        blocks = sorted({0, len(weights) - 1})
    num_heads, height, length = weights.shape[1:]
    side = float(np.clip(0.115 * length, 2.2, 6.0))
    lines = -(-num_heads // MOST_COLUMNS)  # of maps, for each block
    columns = -(-num_heads // lines)
    rows = lines * len(blocks)
    figure = Figure(
        figsize=(
            side * columns + 1.2,
            (side * height / length + 0.35) * rows + 0.5,
        ),
        dpi=130,
        layout="constrained",
    )
    grid = figure.subplots(rows, columns, squeeze=False)
    size = float(np.clip(72 * side / length * 0.85, 4.0, 10.0))  # points
    for row, column in np.ndindex(rows, columns):
        axes = grid[row, column]
        block, head = blocks[row // lines], row % lines * columns + column
        if head >= num_heads:
            axes.axis("off")
            continue
        image = axes.imshow(
            weights[block, head], cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="equal"
        )
        axes.set_title(f"block {block}, head {head}", fontsize=9)
        _label_tokens(axes, labels, key_labels or labels, size)
    grid[-1, 0].set_xlabel("key: token read", fontsize=9)
    grid[-1, 0].set_ylabel("query: token reading", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.7, pad=0.01, aspect=30).set_label("weight")
    figure.suptitle(title, fontsize=11, parse_math=False)
    save_figure(figure, path)


def _label_tokens(axes, queries: Sequence[str], keys: Sequence[str], size) -> None:
    """Writes the tokens along both axes, or numbers where they are too many."""
    axes.tick_params(length=0, pad=1.5)
    if max(len(queries), len(keys)) > MOST_LABELS:
        return
    for set_ticks, labels in ((axes.set_yticks, queries), (axes.set_xticks, keys)):
        shown = [visible(label) for label in labels]
        set_ticks(range(len(labels)), shown, fontsize=size, parse_math=False)


def plot_heads(metrics: HeadMetrics, path: str | Path) -> None:
    """Draws the averages of every head as tables of colour, block against head."""
    panels = {
        "mean distance (tokens)": metrics.distance,
        "entropy, share of maximum": metrics.entropy_share,
        "weight on the token itself": metrics.own,
        "weight on the one before": metrics.previous,
        "weight on the first token": metrics.first,
    }
    blocks, heads = metrics.distance.shape
    figure = Figure(
        figsize=(3 * max(2.4, 0.62 * heads + 0.9), 2 * (0.42 * blocks + 1.1)),
        layout="constrained",
    )
    grid = figure.subplots(2, 3).flat
    for axes, (name, values) in zip(grid, panels.items(), strict=False):
        top = 1.0 if name != "mean distance (tokens)" else max(1.0, values.max())
        _table(axes, values, name, top, "{:.1f}" if top > 1 else "{:.2f}")
    grid[5].axis("off")
    grid[5].text(
        0.02,
        0.5,
        f"means over {metrics.windows}\nwindows of {metrics.profile.shape[-1]}\ntokens",
        va="center",
        fontsize=10,
        transform=grid[5].transAxes,
    )
    save_figure(figure, path)


def _table(axes, values, name: str, top: float, form: str, low: float = 0.0) -> None:
    """A block-by-head table with a number in every cell."""
    axes.imshow(values, cmap=SEQUENTIAL, vmin=low, vmax=top, aspect="auto")
    for (block, head), value in np.ndenumerate(values):
        text = form.format(value) if np.isfinite(value) else "-"
        color = "white" if value > low + 0.6 * (top - low) else "black"
        axes.text(head, block, text, ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(values.shape[1]))
    axes.set_yticks(range(values.shape[0]))
    axes.set_xlabel("head", fontsize=9)
    axes.set_ylabel("block", fontsize=9)
    axes.set_title(name, fontsize=9)


def plot_profiles(metrics: HeadMetrics, path: str | Path) -> None:
    """Draws the mean weight k tokens back, a panel a block, a line a head."""
    blocks, heads, length = metrics.profile.shape
    columns = min(blocks, 2)
    rows = -(-blocks // columns)
    figure = Figure(figsize=(4.4 * columns, 2.8 * rows + 0.4), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    places = np.arange(length) + 1
    for block in range(blocks):
        axes = grid[block]
        for head in range(heads):
            color = COLORS[head % len(COLORS)]
            style = LINES[head // len(COLORS) % len(LINES)]
            values = np.maximum(metrics.profile[block, head], 1e-4)
            axes.plot(places, values, color=color, linestyle=style, label=f"{head}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(1e-4, 1.3)
        ticks = [k for k in (0, 1, 3, 7, 15, 31, 63, 127, 255, 511) if k < length]
        axes.set_xticks([k + 1 for k in ticks], [str(k) for k in ticks])
        axes.minorticks_off()
        axes.set_title(f"block {block}", fontsize=10)
        axes.grid(alpha=0.25)
    for axes in list(grid)[blocks:]:
        axes.axis("off")
    figure.supxlabel("tokens back (0: the token itself)", fontsize=10)
    figure.supylabel("mean weight", fontsize=10)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, names, title="head", loc="outside right center", frameon=False
    )
    save_figure(figure, path)


def plot_causes(causes: Causes, path: str | Path) -> None:
    """Draws effect against weight for every head, a dot a key of a query."""
    blocks, heads, length = causes.weights.shape[:3]
    figure = Figure(
        figsize=(max(5.0, 2.1 * heads + 0.5), max(3.6, 1.95 * blocks + 0.7)),
        layout="constrained",
    )
    grid = figure.subplots(blocks, heads, squeeze=False, sharex=True, sharey=True)
    readable = np.tril(np.ones((length, length), "bool"))
    for block, head in np.ndindex(blocks, heads):
        axes = grid[block, head]
        weights = causes.weights[block, head][readable]
        effects = causes.effects[block, head][readable]
        last = (causes.weights[block, head, -1], causes.effects[block, head, -1])
        axes.loglog(weights, effects, ".", color="0.72", markersize=2)
        axes.loglog(*last, ".", color=COLORS[0], markersize=4.5)
        axes.set_xlim(1e-4, 1.5)
        value = causes.correlation[block, head]
        shown = f"{value:.2f}" if np.isfinite(value) else "undefined"
        axes.set_title(f"block {block}, head {head}: {shown}", fontsize=9)
        axes.grid(alpha=0.2)
        axes.tick_params(labelsize=8)
    high = causes.effects.max()
    if high > 0:
        grid[0, 0].set_ylim(high * 1e-5, high * 2)
    figure.supxlabel("attention weight (blue: the last query)", fontsize=10)
    figure.supylabel("change of the logits without the value", fontsize=10)
    figure.suptitle("Effect against weight, and their rank correlation", fontsize=11)
    save_figure(figure, path)


def plot_position_probe(probes: Mapping[str, PositionProbe], path: str | Path) -> None:
    """Draws how well a linear probe reads the position at each depth."""
    lines = {name: probe.r_squared for name, probe in probes.items()}
    axes, figure = _by_depth(lines)
    axes.axhline(0, color="0.35", linewidth=0.8)
    axes.set_ylim(min(-0.05, *(values.min() - 0.05 for values in lines.values())), 1.05)
    axes.set_ylabel("variance of the position explained")
    axes.set_title("Reading the position from the token vectors")
    save_figure(figure, path)


def plot_similarity(similarities: Mapping[str, np.ndarray], path: str | Path) -> None:
    """Draws how alike the token vectors are at each depth."""
    axes, figure = _by_depth(similarities)
    axes.set_ylim(min(-0.05, *(v.min() - 0.05 for v in similarities.values())), 1.05)
    axes.set_ylabel("mean cosine of two tokens")
    axes.set_title("Do the token vectors collapse?")
    save_figure(figure, path)


def _by_depth(lines: Mapping[str, np.ndarray]):
    """Lines over depth, before the blocks and after each."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, values) in enumerate(lines.items()):
        axes.plot(
            range(len(values)),
            values,
            color=COLORS[index],
            linestyle=LINES[index % len(LINES)],
            marker="osD^"[index % 4],
            label=name,
        )
    depths = range(max(map(len, lines.values())))
    axes.set_xticks(depths, ["input", *[f"block {i}" for i in list(depths)[:-1]]])
    axes.set_xlabel("after")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return axes, figure


def plot_next_tokens(
    labels: Sequence[str],
    probabilities: Sequence[float],
    chances: Sequence[float],
    path: str | Path,
    *,
    title: str = "Next token",
) -> None:
    """Draws candidates as two bars each: by the model, and after the filters.

    Args:
        labels: text of each candidate.
        probabilities: by the model alone.
        chances: after temperature and filters.
        path: PNG file to write.
        title: of the plot.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    places = np.arange(len(labels))
    axes.bar(places - 0.2, probabilities, 0.4, color=COLORS[0], label="model")
    axes.bar(
        places + 0.2,
        chances,
        0.4,
        color=COLORS[1],
        hatch="//",
        edgecolor="white",
        label="after temperature and filters",
    )
    shown = [visible(label) for label in labels]
    axes.set_xticks(places, shown, fontsize=12, parse_math=False)
    axes.set_ylabel("probability")
    axes.set_title(title, fontsize=10, parse_math=False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_surprise(
    pieces: Sequence[tuple[str, float]], path: str | Path, *, per_row: int = 64
) -> None:
    """Draws the nats of each character as a bar over it, in rows like lines of text.

    Args:
        pieces: from `character_surprise`.
        path: PNG file to write.
        per_row: characters in a row.
    """
    rows = [pieces[i : i + per_row] for i in range(0, len(pieces), per_row)]
    figure = Figure(figsize=(11.0, 1.45 * len(rows) + 0.6), layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False, sharey=True)[:, 0]
    for axes, row in zip(grid, rows, strict=True):
        nats = [cost for _, cost in row]
        colors = [surprise_color(cost) for cost in nats]
        axes.bar(
            range(len(row)), nats, 0.9, color=colors, edgecolor="0.4", linewidth=0.5
        )
        axes.set_xlim(-0.7, min(per_row, len(pieces)) - 0.3)
        labels = [visible(text) for text, _ in row]
        axes.set_xticks(range(len(row)), labels, fontsize=10, parse_math=False)
        axes.tick_params(axis="x", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
    mean = sum(cost for _, cost in pieces[1:]) / max(1, len(pieces) - 1)
    figure.supylabel("surprise (nats)", fontsize=10)
    figure.suptitle(f"Surprise per character, mean {mean:.2f} nats", fontsize=11)
    save_figure(figure, path)
