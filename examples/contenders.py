"""Processes that are timed in alternation, as the benchmarks beside this file do it.

A worker is the benchmark script itself, called with `--worker MAKER`; it stays alive,
reads a question a line and answers each with a number.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("keras", "tensorflow", "jax", "torch", "transformers", "keras-hub")


def installed(packages):
    """Whether all packages are there."""
    try:
        return all(importlib.metadata.version(name) for name in packages)
    except importlib.metadata.PackageNotFoundError:
        return False


def record(path, packages=PACKAGES, **result):
    """Writes a results file: what is given, and the versions of what was timed."""
    there = [name for name in packages if installed([name])]
    result["versions"] = {name: importlib.metadata.version(name) for name in there}
    Path(path).write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def run_worker(script, backend, *arguments):
    """Calls `script --worker ARGUMENTS` as a process of its own.

    Returns the JSON of its last line; its other lines are dropped.
    """
    result = subprocess.run(
        [sys.executable, script, "--worker", *map(str, arguments)],
        env={**os.environ, "KERAS_BACKEND": backend},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(result.stdout.splitlines()[-1])


def peak_bytes():
    """The most memory that this process has held so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


class Contender:
    """A process that answers a question with the seconds of one run."""

    def __init__(self, script, maker, backend):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, script, "--worker", maker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "KERAS_BACKEND": backend},
        )

    def seconds(self, question):
        """The time of one run; RuntimeError with its last words if it died."""
        print(question, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.errors.seek(0)
            raise RuntimeError((self.errors.read().strip() or "no output")[-300:])
        return float(answer)

    def close(self):
        """Lets the process end."""
        self.process.stdin.close()
        self.process.wait()


def start(contenders, script):
    """Processes by name, of the contenders whose packages are installed.

    `contenders` maps names to (maker, Keras backend, packages).
    """
    running = {}
    for name, (maker, backend, packages) in contenders.items():
        if installed(packages):
            running[name] = Contender(script, maker, backend)
        else:
            print(f"left out: {name} (needs {' and '.join(packages)})")
    return running
