"""Whole processes that continue a prompt, by format: start-up, speed, size.

Exports tiny-shakespeare to every format and runs a fresh process for each, once for one
new token and once for 101. Needs the extras onnx, litert and openvino.

Usage: python examples/benchmark_formats.py [RESULT.json]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from contenders import record

import keras_tinygpt as tg
from keras_tinygpt.export import formats

ROUNDS, MORE = 3, 100
HERE = Path(__file__).resolve().parent
TENSORFLOW = """
import sys, tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
model.generate_text(["ROMEO:"], int(sys.argv[4]), 0, 0.8, 0, 1.0, "")
"""


def command(kind, folder):
    """The process, less the number of new tokens."""
    if kind == "bundle":
        launch = [sys.executable, "-m", "keras_tinygpt.cli", "generate"]
    elif kind == "saved_model":
        launch = [sys.executable, "-c", TENSORFLOW]
    else:
        launch = [sys.executable, str(HERE / f"generate_{kind}.py")]
    return [*launch, str(folder), "ROMEO:", "--max-new-tokens"]


def main():
    """Exports, measures in alternation, prints and records."""
    lm, folders = tg.load("tiny-shakespeare"), {}
    with tempfile.TemporaryDirectory() as root:
        for kind, export in {
            "bundle": lambda model, tokenizer, path: tg.save(path, model, tokenizer),
            "saved_model": tg.export_saved_model,
            "onnx": formats.export_onnx,
            "litert": formats.export_litert,
            "openvino": formats.export_openvino,
        }.items():
            folders[kind] = export(lm.model, lm.tokenizer, Path(root) / kind)
        times = {(kind, new): [] for kind in folders for new in (1, 1 + MORE)}
        for _ in range(ROUNDS):
            for kind, new in times:
                start = time.perf_counter()
                arguments = [*command(kind, folders[kind]), str(new)]
                subprocess.run(arguments, check=True, capture_output=True)
                times[kind, new].append(time.perf_counter() - start)
        rows = []
        for kind, folder in folders.items():
            first, whole = (np.median(times[kind, new]) for new in (1, 1 + MORE))
            size = sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())
            rows.append([kind, f"{first:.2f}", f"{whole:.2f}", f"{size / 1e6:.1f}"])
            print(*rows[-1])
    if len(sys.argv) > 1:
        packages = ("keras", "tensorflow", "onnxruntime", "ai-edge-litert", "openvino")
        record(
            sys.argv[1],
            packages=packages,
            kind="table",
            command="python examples/benchmark_formats.py",
            setting=f"seconds of whole processes, medians of {ROUNDS} runs",
            columns=["format", "1 new token", f"{1 + MORE} new tokens", "MB"],
            rows=rows,
        )


if __name__ == "__main__":
    main()
