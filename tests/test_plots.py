"""Plots are PNG files of a sensible size, drawn without a display."""

import pytest

from keras_tinygpt.plots import (
    plot_bars,
    plot_history,
    plot_lines,
)


def rows(count):
    return [
        {"step": 10 * i, "loss": 3.0 / i, "valid_loss": 3.1 / i}
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize("count", [1, 2, 12])
def test_history(tmp_path, count):
    path = tmp_path / "curve.png"
    plot_history(
        {"gpt": rows(count), "lstm": rows(count)},
        path,
        baselines={"3-gram": 1.9, "5-gram": 1.8},
    )
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_lines(tmp_path):
    path, lines = tmp_path / "lines.png", {"fast": [900, 500], "slow": [9, 2]}
    plot_lines(lines, [128, 2048], path, labels=("length", "rate"), title="Speed")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_bars(tmp_path):
    path = tmp_path / "bars.png"
    values = {"gpt": [1.52, 1.55, 1.54], "lstm, $ one": [1.58], "none": [2.3, 2.5]}
    plot_bars(values, path, baselines={"3-gram": 2.09, "5-gram": 1.83})
    assert path.read_bytes().startswith(b"\x89PNG")
    plot_bars({"gpt": [1.5]}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_more_lines_than_colours(tmp_path):
    path = tmp_path / "lines.png"
    lines = {f"model {i}": [1.0 + i, 2.0 + i, 3.0 + i] for i in range(7)}
    plot_lines(lines, [1, 2, 4], path, labels=("tokens", "nats"), title="Seven")
    assert path.read_bytes().startswith(b"\x89PNG")
