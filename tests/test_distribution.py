"""More devices: the losses of one, on virtual devices and on several processes."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import ROOT, token_ids

import keras_tinygpt as tg
from keras_tinygpt import distribution, training
from keras_tinygpt.distribution import LAYOUT, make_distribution

STEPS, STOP = 20, 12
V, T = 11, 7
slow = pytest.mark.slow
# Runs an example whose tg.train is stopped after STOP validations.
STOPPED = f"""
import runpy, sys, keras, keras_tinygpt as tg
train = tg.train
class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == {STOP} - 1:
            raise SystemExit(0)
tg.train = lambda *args, **options: train(*args, **options, callbacks=[Stop()])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(name, *arguments, stopped=False, launcher=(), **environment):
    path = str(ROOT / "examples" / name)
    assert len(Path(path).read_text("utf-8").splitlines()) < 40
    code = ("-c", STOPPED) if stopped else launcher
    return subprocess.Popen(
        [sys.executable, *code, path, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def run(*arguments, code=0, **options) -> str:
    process = start(*arguments, **options)
    try:
        out = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    assert process.returncode == code, out[-3000:]
    return out


def losses(out) -> np.ndarray:
    lines = re.findall(r"^loss (.*)$", out, re.M)
    return np.array([[float(value) for value in line.split()] for line in lines])


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def check_equal(out, expected):
    assert len(losses(out)) == len(losses(expected)) == STEPS
    np.testing.assert_allclose(losses(out), losses(expected), atol=1e-4)


@slow
@pytest.mark.parametrize(("shards", "spec"), [(1, "None, None"), (2, "None, 'model'")])
def test_virtual_devices_of_jax(tmp_path, shards, spec):
    pytest.importorskip("jax", reason="needs the extra [jax]")
    quick = "--xla_backend_optimization_level=0"
    many = f"{quick} --xla_force_host_platform_device_count="
    expected = run("train_sharded.py", STEPS, tmp_path / "1",
                   KERAS_BACKEND="jax", XLA_FLAGS=quick)  # fmt: skip
    assert losses(expected)[-1, 0] < losses(expected)[0, 0] - 1
    arguments = ("train_sharded.py", STEPS, tmp_path / "4", shards)
    devices = {"KERAS_BACKEND": "jax", "XLA_FLAGS": f"{many}4"}
    first = run(*arguments, stopped=True, **devices)
    assert f"query_key_value/kernel (84, 252) P({spec})" in first
    assert not len(losses(first))
    check_equal(run(*arguments, **devices), expected)
    devices["XLA_FLAGS"] = f"{many}{3 * shards}"
    out = run("train_sharded.py", STEPS, tmp_path / "3", shards, code=1, **devices)
    assert "must be divisible by the 3 replicas, got 8 / 1" in out


@slow
def test_virtual_devices_of_tensorflow(tmp_path):
    backend = {"KERAS_BACKEND": "tensorflow"}
    expected = run("train_mirrored.py", STEPS, tmp_path / "1", 1, **backend)
    arguments = ("train_mirrored.py", STEPS, tmp_path / "2", 2)
    assert not len(losses(run(*arguments, stopped=True, **backend)))
    out = run(*arguments, **backend)
    assert "2 replicas" in out
    check_equal(out, expected)
    out = run("train_mirrored.py", STEPS, tmp_path / "3", 3, code=1, **backend)
    assert "must be divisible by the 3 replicas, got 8 / 1" in out


def cluster(steps, folder, size=2) -> list[str]:
    """What the processes of a TensorFlow cluster on this machine print."""
    workers = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    with ExitStack() as stack:
        processes = []
        for index in range(size):
            task = {"type": "worker", "index": index}
            described = json.dumps({"cluster": {"worker": workers}, "task": task})
            processes.append(
                start(
                    "train_cluster.py",
                    steps,
                    folder / f"{size}-{index}",
                    KERAS_BACKEND="tensorflow",
                    TF_CONFIG=described,
                )  # fmt: skip
            )
            stack.callback(processes[-1].kill)
        outs = [process.communicate(timeout=400)[0] for process in processes]
    assert {process.returncode for process in processes} == {0}, outs
    return outs


@slow
def test_two_processes_of_tensorflow(tmp_path):
    expected = cluster(STEPS, tmp_path, size=1)[0]
    first, second = cluster(STOP, tmp_path), cluster(STEPS, tmp_path)
    for before, after in zip(first, second, strict=True):
        assert len(losses(before)) == STOP
        check_equal(before + after, expected)


@slow
def test_two_processes_of_pytorch(tmp_path):
    pytest.importorskip("torch", reason="needs the extra [torch]")

    def train(size, steps, path, code=0):
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node", str(size))
        launcher += ("--master-port", str(free_port()))
        return run("train_ddp.py", steps, path, launcher=launcher, code=code,
                   KERAS_BACKEND="torch")  # fmt: skip

    expected = train(1, STEPS, tmp_path / "one.pt")
    first = train(2, STOP, tmp_path / "two.pt")
    check_equal(first + train(2, STEPS, tmp_path / "two.pt"), expected)
    assert "processes must divide 8, got 3" in train(3, 1, tmp_path / "x.pt", code=1)


def small_model(**changes):
    return tg.build_gpt(tg.GPTConfig(V, T, 1, 2, hidden_dim=12, **changes), seed=1)


def train_a_little(model, **settings):
    text = token_ids(200, vocab_size=V)
    config = tg.TrainConfig(**{"steps": 2, "jit_compile": False, **settings})
    return tg.train(model, text[:150], text[150:], config, verbose=False)


def test_every_matrix_has_one_layout():
    """A pattern that no variable has, or two for one, would be a mistake."""
    models = [
        small_model(),
        small_model(activation="swiglu", qkv_bias=True),
        tg.build_lstm(tg.LSTMConfig(V, 6, num_layers=2)),
    ]
    separate = tg.layers.CausalMultiHeadAttention(2, fused_projections=False)
    separate.build((None, T, 12))
    paths = [w.path for model in models for w in model.weights]
    paths += [f"attention/{w.path.split('/', 1)[-1]}" for w in separate.weights]
    used = set()
    for path in paths:
        matches = [pattern for pattern in LAYOUT if re.fullmatch(pattern, path)]
        assert len(matches) <= 1, path
        if path.endswith(("kernel", "embeddings")):
            assert matches, path
        used.update(matches)
    assert used == set(LAYOUT)


@pytest.mark.backend
def test_distributions(monkeypatch):
    config = tg.GPTConfig(V, hidden_dim=12, num_heads=2, intermediate_dim=20)
    if keras.backend.backend() != "jax":
        with pytest.raises(ValueError, match="needs the jax backend, got "):
            make_distribution(config)
        return
    devices = keras.distribution.list_devices()[:1]
    plain = make_distribution(config, devices=devices)
    assert isinstance(plain, keras.distribution.DataParallel)
    assert plain.num_model_replicas == 1
    for shards, size, message in (
        (0, 1, "model_shards must be at least 1, got 0"),
        (2, 3, "model_shards must divide the number of devices 3, got 2"),
        (8, 8, "model_shards must divide the hidden_dim 12, got 8"),
        (3, 3, "model_shards must divide the intermediate_dim 20, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            make_distribution(config, shards, devices * size)
    with pytest.raises(ValueError, match="the embedding_dim 9, got 2"):
        make_distribution(tg.LSTMConfig(V, 6, embedding_dim=9), 2, devices * 2)


@pytest.mark.backend
def test_batches_that_do_not_divide(monkeypatch):
    monkeypatch.setattr(training, "count_replicas", lambda model: 3)
    with pytest.raises(ValueError, match="divisible by the 3 replicas, got 8 / 1"):
        train_a_little(small_model(), batch_size=8)
    with pytest.raises(ValueError, match="for each of the 3 replicas, got 2"):
        train_a_little(small_model(), batch_size=6, validation_windows=2)
    settings = {"batch_size": 12, "gradient_accumulation_steps": 2}
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(ValueError, match="must be 1 with tf.distribute, got 2"):
            train_a_little(small_model(), **settings)
        with pytest.raises(ValueError, match="jit_compile must be False with tf"):
            train_a_little(small_model(), batch_size=6, jit_compile=True)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="of TensorFlow")
def test_strategies_of_tensorflow(monkeypatch):
    import tensorflow as tf

    expected = train_a_little(small_model(), batch_size=4)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = small_model()
    result = train_a_little(model, batch_size=4)  # outside the scope
    assert result.best_valid_loss == pytest.approx(expected.best_valid_loss, abs=1e-5)
    assert distribution.count_replicas(model) == 1
    refused = "MultiWorkerMirroredStrategy"
    monkeypatch.setattr(tf.distribute, refused, tf.distribute.MirroredStrategy)
    with pytest.raises(ValueError, match=f"runs under, got {refused}"):
        train_a_little(model, batch_size=4)
