"""Runs that are killed or whose disk is full: nothing is lost, nothing half-written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, check_one_line_error

# Children are forked before TensorFlow has started any thread of its own.
SCRIPT = """
import os, random, resource, signal, sys, time
import numpy as np
import keras_tinygpt as tg

IDS = np.tile(np.arange(11), 97).astype("uint8")
CONFIG = tg.TrainConfig(
    steps=60, batch_size=4, validate_every=3, learning_rate=0.01, jit_compile=False
)

def train(folder, limit=None):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    model = tg.build_gpt(tg.GPTConfig(11, 7, 1, 2, hidden_dim=12, dropout=0.3))
    resume = os.path.exists(folder + "/checkpoints/state.json")
    tg.train(
        model, IDS, IDS[:200], CONFIG, directory=folder, resume=resume, verbose=False
    )
    print(folder, tg.fingerprint(model), flush=True)

def child(*arguments):
    pid = os.fork()
    if pid:
        return pid
    try:
        train(*arguments)
    except OSError as error:
        print("stopped", error.strerror, flush=True)
        os._exit(7)
    os._exit(0)

def ended(pid):
    return os.waitpid(pid, 0)[1]
"""


def run_script(code, folder):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT + code],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow"},
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line.split() for line in result.stdout.splitlines()]
    return {name: value for name, value, *_ in lines}


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_runs_end_like_an_undisturbed_one(tmp_path, kills):
    """SIGKILL at random moments; every start goes on from the last checkpoint."""
    printed = run_script(
        f"""
start = time.monotonic()
assert ended(child("whole")) == 0
seconds = time.monotonic() - start
draw = random.Random({kills})
for _ in range({kills}):
    pid = child("killed")
    time.sleep(draw.uniform(0.2, 0.9) * seconds)
    os.kill(pid, signal.SIGKILL)
    ended(pid)
assert ended(child("killed")) == 0
""",
        tmp_path,
    )
    assert printed["killed"] == printed["whole"]
    names = sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())
    kept = [path.name for path in (tmp_path / "killed/checkpoints").iterdir()]
    assert names == sorted(name for name in kept if not name.startswith(".tmp-"))


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    """A limit on the size of files stands for the full disk."""
    printed = run_script(
        """
assert os.waitstatus_to_exitcode(ended(child("full", 9000))) == 7
assert not any(name.startswith(".tmp") for name in os.listdir("full/checkpoints"))
assert ended(child("full")) == 0
assert ended(child("whole")) == 0
""",
        tmp_path,
    )
    assert printed["stopped"] == "File"
    assert printed["full"] == printed["whole"]
    state = json.loads((tmp_path / "full/checkpoints/state.json").read_text())
    assert state["checkpoints"][0]["step"] == 60


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "command",
    [
        ["train", "text.txt", "--steps", "1"],
        ["prepare", "text.txt"],
        ["export", "tiny-shakespeare"],
        ["inspect", "tiny-shakespeare", "--text", "abc"],
        ["study", "book", "--steps", "1"],
    ],
    ids=lambda command: command[0],
)
def test_a_target_that_cannot_be_written(command, tmp_path, monkeypatch, capsys):
    """Not even by root; it is noticed before there is anything to lose."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("Now is the winter of our discontent\n" * 60)
    error = check_one_line_error(capsys, *command, "--out", "/proc/run")
    assert "/proc/" in error and "run" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
