"""Time and memory of preparing a large generated text, and of training on its ids.

Usage: python examples/benchmark_prepare.py MEGABYTES [RESULT.json]

Each stage is a process of its own; its files are deleted at the end.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from contenders import record

import keras_tinygpt as tg

TOKENIZER, PROCESSES, STEPS = "char", 2, 20


def write_text(path, megabytes):
    """Words of the embedded text, as often as they come there, in random order."""
    random = np.random.default_rng(0)
    words = np.array(tg.load_corpus("five-nights").text.split(" "), object)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(" ".join(random.choice(words, 200_000)) + "\n")


def prepare(text, out):
    """Tokens of each part, and the peak of the largest worker."""
    workers = [0]

    def look(done, total):
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        workers.extend(memory("VmHWM", pid) for pid in pids)

    prepared = tg.prepare(text, out, TOKENIZER, processes=PROCESSES, progress=look)
    return {name: len(ids) for name, ids in prepared.parts.items()}, max(workers)


def train(out):
    """Reads windows all over the ids."""
    prepared = tg.load_prepared(out)
    config = tg.GPTConfig.preset("mini", prepared.tokenizer.vocab_size)
    training = tg.TrainConfig(STEPS, batch_size=16, validation_windows=64)
    parts = prepared.parts["train"], prepared.parts["valid"]
    tg.train(tg.build_gpt(config), *parts, training, verbose=False)


def imports():
    """What every other stage needs too."""


def memory(what, pid="self"):
    """Megabytes: VmHWM, the most there was; RssAnon, what is the process' own now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.split(f"{what}:")[1].split()[0]) / 1e3)


def stage(name, *arguments):
    """Runs a stage alone; returns its row."""
    command = [sys.executable, __file__, "--stage", name, *map(str, arguments)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    value, seconds, peak, own = json.loads(result.stdout.splitlines()[-1])
    print(name, value, f"{seconds:.0f} s, {peak} and {own} MB", flush=True)
    worker = value[1] if name == "prepare" else ""
    return [name, f"{seconds:.0f}", peak, worker, own]


def main():
    megabytes = int(sys.argv[1])
    with tempfile.TemporaryDirectory(dir=".") as folder:
        text, out = Path(folder, "text.txt"), Path(folder, "ids")
        write_text(text, megabytes)
        size = text.stat().st_size
        rows = [stage("import"), stage("prepare", text, out), stage("train", out)]
        size_of_ids = sum(path.stat().st_size for path in out.glob("*.bin"))
    if len(sys.argv) > 2:
        record(
            sys.argv[2],
            packages=("keras", "tensorflow"),
            kind="table",
            command=f"python examples/benchmark_prepare.py {megabytes}",
            setting=f"{size / 1e6:,.0f} MB of generated text, {PROCESSES} processes; "
            f"{size_of_ids / 1e6:,.0f} MB of ids; {STEPS} steps of 16 windows of 128; "
            "memory in MB",
            columns=["stage", "seconds", "peak", "peak of a worker", "own at the end"],
            rows=rows,
        )


if sys.argv[1] == "--stage":
    run = {"prepare": prepare, "train": train, "import": imports}[sys.argv[2]]
    started = time.perf_counter()
    value = run(*sys.argv[3:])
    seconds = time.perf_counter() - started
    print(json.dumps([value, seconds, memory("VmHWM"), memory("RssAnon")]))
else:
    main()
