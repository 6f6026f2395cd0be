"""Training tiny models: recipes, equal runs, checkpoints, errors."""

import dataclasses
import json
import math
import os
import signal

import keras
import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt.training import (
    StepSchedule,
    TrainingDiverged,
    TrainingStopped,
    compile_model,
    make_optimizer,
)

VOCAB, WINDOW = 11, 7
IDS = np.random.default_rng(0).integers(0, VOCAB, 1009).astype("uint8")
# A repeating text, so that a few steps lower the loss a lot.
PATTERN = np.tile(np.arange(VOCAB), 97).astype("uint8")


XLA = keras.backend.backend() != "torch"


def tiny_model(seed=0, **changes):
    config = tg.GPTConfig(VOCAB, WINDOW, 1, 2, hidden_dim=12, **changes)
    return tg.build_gpt(config, seed=seed)


def tiny_config(**changes):
    return tg.TrainConfig(
        **{
            "steps": 6,
            "batch_size": 4,
            "validate_every": 3,
            "learning_rate": 0.01,
            "jit_compile": False,
            **changes,
        }
    )


def run(config, model=None, ids=PATTERN, **settings):
    model = model or tiny_model()
    result = tg.train(model, ids, ids[:200], config, verbose=False, **settings)
    return model, result


def weights_of(model):
    return [keras.ops.convert_to_numpy(w) for w in model.weights]


@pytest.mark.backend
def test_xla_compiles_where_it_gains():
    def choice(steps, **changes):
        model = tiny_model()
        compile_model(model, tg.TrainConfig(steps=steps, **changes))
        return model.jit_compile

    backend = keras.backend.backend()
    assert choice(10**6) == (backend != "torch")
    assert choice(10) == (backend == "jax")
    assert choice(10, jit_compile=XLA) == XLA
    assert not choice(10**6, jit_compile=False)


@pytest.mark.backend
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls(optimizer):
    config = tiny_config(
        steps=60, validate_every=20, optimizer=optimizer, jit_compile=XLA
    )
    model, result = run(config)
    losses = [row["valid_loss"] for row in result.history]
    assert [row["step"] for row in result.history] == [20, 40, 60]
    assert losses[-1] < losses[0] < math.log(VOCAB) + 0.1
    assert result.best_valid_loss == min(losses)
    assert result.tokens_per_second > 0
    assert len(result.schedule_fingerprint) == 64


@pytest.mark.backend
def test_the_same_seed_gives_the_same_weights():
    steps = 200 if keras.backend.backend() == "tensorflow" else 30
    config = tiny_config(steps=steps, validate_every=steps // 2, jit_compile=None)
    first, result = run(config, tiny_model(dropout=0.1), ids=IDS)
    second, again = run(config, tiny_model(dropout=0.1), ids=IDS)
    assert tg.fingerprint(first) == tg.fingerprint(second)
    assert result.schedule_fingerprint == again.schedule_fingerprint
    assert [row["valid_loss"] for row in result.history] == [
        row["valid_loss"] for row in again.history
    ]


class StopAt(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.left = batch

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True


@pytest.mark.backend
@pytest.mark.parametrize("parts", [1, 2])
def test_a_callback_ends_the_run(tmp_path, parts):
    config = tiny_config(steps=9, gradient_accumulation_steps=parts)
    early = keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=100)
    _, result = run(config, callbacks=[early])
    assert [row["step"] for row in result.history] == [3, 6]
    for directory in (None, tmp_path):
        stop = StopAt(4 * parts)
        _, result = run(config, callbacks=[stop], directory=directory)
        assert [row["step"] for row in result.history] == [3, 4]
    model, result = run(config, directory=tmp_path, resume=True)
    assert [row["step"] for row in result.history] == [3, 4, 6, 9]


@pytest.mark.backend
def test_averages_of_a_complete_run_are_there_again(tmp_path):
    config = tiny_config(ema_momentum=0.9, restore_best=False)
    model, _ = run(config, directory=tmp_path)
    again, _ = run(config, directory=tmp_path, resume=True)
    assert tg.fingerprint(model) == tg.fingerprint(again)


def test_averages_count_updates_not_parts_of_them():
    settings = {"steps": 20, "clip_norm": None, "restore_best": False}
    averages, plain = (
        [
            np.concatenate([w.ravel() for w in weights_of(run(config)[0])])
            for parts in (1, 4)
            for config in [
                tiny_config(
                    **settings, gradient_accumulation_steps=parts, ema_momentum=momentum
                )
            ]
        ]
        for momentum in (0.9, None)
    )
    apart = np.abs(averages[0] - averages[1]).mean()
    assert np.abs(plain[0] - plain[1]).mean() < apart / 5
    assert apart < np.abs(averages[0] - plain[0]).mean() / 5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_accumulated_gradients_equal_the_large_batch(optimizer):
    config = tiny_config(
        steps=7, warmup_steps=3, clip_norm=0.5, restore_best=False, optimizer=optimizer
    )
    whole, _ = run(config)
    parts, _ = run(dataclasses.replace(config, gradient_accumulation_steps=2))
    half, _ = run(dataclasses.replace(config, batch_size=config.batch_size // 2))

    def largest_difference(model):
        pairs = zip(weights_of(whole), weights_of(model), strict=True)
        return max(np.abs(one - two).max() for one, two in pairs)

    # Both optimizers divide by the size of the gradient, which blows up its rounding.
    assert largest_difference(parts) < 4e-3
    assert largest_difference(half) > 1e-2


def test_a_number_of_steps_that_validations_do_not_divide():
    model, result = run(tiny_config(steps=7, optimizer="adam"))
    assert [row["step"] for row in result.history] == [3, 6, 7]
    assert int(model.optimizer.iterations) == 7


@pytest.mark.parametrize("parts", [1, 4])
def test_schedule_values_by_hand(parts):
    config = tg.TrainConfig(
        steps=110,
        warmup_steps=10,
        learning_rate=1.0,
        gradient_accumulation_steps=parts,
    )
    rates = [float(StepSchedule(config)(step * parts)) for step in (0, 9, 10, 60, 110)]
    # Linear rise; then 0.1 + 0.9 (1 + cos(pi x)) / 2 at x = 0, 0.5, 1.
    np.testing.assert_allclose(rates, [0.1, 1.0, 1.0, 0.55, 0.1], atol=1e-5)
    linear = dataclasses.replace(config, schedule="linear", decay_fraction=0.5)
    rates = [float(StepSchedule(linear)(step * parts)) for step in (10, 60, 85, 110)]
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.55, 0.1], atol=1e-5)
    constant = dataclasses.replace(config, schedule="constant")
    assert float(StepSchedule(constant)(77 * parts)) == 1.0


def test_the_schedule_survives_serialisation():
    schedule = StepSchedule(tg.TrainConfig(steps=50, schedule="linear"))
    config = keras.saving.serialize_keras_object(schedule)
    again = keras.saving.deserialize_keras_object(config)
    assert float(again(13)) == float(schedule(13))


def test_weight_decay_is_on_matrices_only():
    # Zero gradients: what decay moves is all that moves.
    model = tiny_model()
    config = tiny_config(weight_decay=0.5, schedule="constant", warmup_steps=0)
    optimizer = make_optimizer(config, model)
    before = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    zeros = [keras.ops.zeros_like(v) for v in model.trainable_variables]
    optimizer.apply(zeros, model.trainable_variables)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        factor = 1 - 0.01 * 0.5 if old.ndim == 2 else 1.0
        new = keras.ops.convert_to_numpy(variable)
        np.testing.assert_allclose(new, old * factor, rtol=1e-5, atol=1e-8)


def test_clipping_bounds_the_first_update():
    model, _ = run(tiny_config(steps=1, clip_norm=1e-12, weight_decay=0.0))
    for new, old in zip(weights_of(model), weights_of(tiny_model()), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-4)


def test_averaged_weights_are_validated_and_kept(tmp_path):
    config = tiny_config(steps=9, ema_momentum=0.9, restore_best=False)
    averaged, result = run(config, directory=tmp_path)
    plain, _ = run(tiny_config(steps=9, restore_best=False))
    differ = [
        np.abs(a - b).max()
        for a, b in zip(weights_of(averaged), weights_of(plain), strict=True)
    ]
    assert max(differ) > 1e-3
    dataset = tg.WindowDataset(
        PATTERN[:200], np.arange(0, 196, 7)[:28].reshape(7, 4), 7
    )
    loss = averaged.evaluate(dataset, verbose=0)
    assert loss == pytest.approx(result.history[-1]["valid_loss"], abs=1e-5)


def test_the_best_weights_are_kept():
    # A rate this high makes later steps worse on random text.
    config = tiny_config(
        steps=40, validate_every=5, learning_rate=0.3, schedule="constant"
    )
    model, result = run(config, ids=IDS)
    assert result.best_step < 40
    dataset = tg.WindowDataset(IDS[:200], np.arange(0, 196, 7)[:28].reshape(7, 4), 7)
    loss = model.evaluate(dataset, verbose=0)
    assert loss == pytest.approx(result.best_valid_loss, abs=1e-5)


@pytest.mark.backend
def test_resume_continues_to_the_same_weights(tmp_path):
    config = tiny_config(steps=9, ema_momentum=0.5, restore_best=False)

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    model = tiny_model(dropout=0.3)
    with pytest.raises(KeyboardInterrupt):
        run(config, model, directory=tmp_path / "a", callbacks=[Stop()])
    state = json.loads((tmp_path / "a/checkpoints/state.json").read_text())
    assert [kept["step"] for kept in state["checkpoints"]] == [6, 3]
    resumed, result = run(
        config, tiny_model(dropout=0.3), directory=tmp_path / "a", resume=True
    )
    whole, expected = run(config, tiny_model(dropout=0.3), directory=tmp_path / "b")
    assert [row["step"] for row in result.history] == [3, 6, 9]
    for one, two in zip(weights_of(resumed), weights_of(whole), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    rows = (tmp_path / "a/history.csv").read_text().splitlines()
    assert len(rows) == 4
    assert result.best_step == expected.best_step


class Signal(keras.callbacks.Callback):
    """Sends itself a signal after some steps of this process."""

    def __init__(self, steps, number):
        super().__init__()
        self.left, self.number = steps, number

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def interruptible():
    """A suite started in the background passes on that SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.backend
@pytest.mark.usefixtures("interruptible")
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """Stopped twice, within a stretch and at its end; weights, states and history."""
    config = tiny_config(steps=11, validate_every=4, ema_momentum=0.5)
    folder, exact = tmp_path / "a", keras.backend.backend() == "tensorflow"
    for first, number in ((2, signal.SIGTERM), (6, signal.SIGINT)):
        with pytest.raises(TrainingStopped) as stopped:
            run(
                config,
                tiny_model(dropout=0.3),
                directory=folder,
                resume=folder.exists(),
                callbacks=[Signal(first, number)],
            )
        assert stopped.value.signal == number
    state = json.loads((folder / "checkpoints/state.json").read_text())
    assert [kept["step"] for kept in state["checkpoints"]] == [8, 4]
    resumed, result = run(
        config, tiny_model(dropout=0.3), directory=folder, resume=True
    )
    whole, expected = run(config, tiny_model(dropout=0.3), directory=tmp_path / "b")
    tolerance = 0 if exact else 1e-6
    for one, two in zip(weights_of(resumed), weights_of(whole), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)
    for name in ("step", "loss", "valid_loss", "learning_rate"):
        one = [row[name] for row in result.history]
        two = [row[name] for row in expected.history]
        np.testing.assert_allclose(one, two, rtol=0, atol=tolerance)
    last = "checkpoints/step_0000011.npz"
    with np.load(folder / last) as one, np.load(tmp_path / "b" / last) as two:
        for name in one:
            np.testing.assert_allclose(one[name], two[name], rtol=0, atol=tolerance)
    assert result.best_step == expected.best_step


@pytest.mark.usefixtures("interruptible")
def test_signals_have_their_usual_effect_after_a_run(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    run(tiny_config(), directory=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # nothing to save without a directory
        run(tiny_config(), callbacks=[Signal(2, signal.SIGINT)])


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    config = tiny_config(steps=6)
    whole, _ = run(config, directory=tmp_path)
    newest = tmp_path / "checkpoints/step_0000006.npz"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    resumed, _ = run(config, directory=tmp_path, resume=True)
    assert (
        "step_0000006.npz is missing or damaged; the check" in capsys.readouterr().out
    )
    for one, two in zip(weights_of(resumed), weights_of(whole), strict=True):
        np.testing.assert_array_equal(one, two)
    for path in (tmp_path / "checkpoints").glob("step_*.npz"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="resume needs an intact checkpoint, none in"):
        run(config, directory=tmp_path, resume=True)
    (tmp_path / "checkpoints/state.json").write_text("{}")
    with pytest.raises(ValueError, match="state.json is damaged"):
        run(config, directory=tmp_path, resume=True)


def test_bfloat16_weights_are_kept(tmp_path):
    config = tiny_config(clip_norm=None)  # Keras clips no bfloat16 embeddings
    models = [
        tg.build_gpt(tg.GPTConfig(VOCAB, WINDOW, 1, 2, hidden_dim=12), dtype="bfloat16")
        for _ in range(2)
    ]
    for model, resume in zip(models, (False, True), strict=True):
        run(config, model, directory=tmp_path, resume=resume)
    for one, two in zip(weights_of(models[0]), weights_of(models[1]), strict=True):
        np.testing.assert_array_equal(one.astype("float32"), two.astype("float32"))


def test_damaged_best_weights_are_not_used(tmp_path):
    run(tiny_config(), directory=tmp_path)
    (tmp_path / "checkpoints/best.npz").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="best.npz is missing or damaged"):
        run(tiny_config(), directory=tmp_path, resume=True)


def test_resume_refuses_another_run(tmp_path):
    run(tiny_config(), directory=tmp_path)
    with pytest.raises(ValueError, match="resume needs learning_rate=0.01 .* got 0.5"):
        run(tiny_config(learning_rate=0.5), directory=tmp_path, resume=True)
    with pytest.raises(ValueError, match="resume needs the text and split"):
        run(tiny_config(), directory=tmp_path, resume=True, ids=PATTERN[:-1])
    with pytest.raises(ValueError, match="found none in"):
        run(tiny_config(), directory=tmp_path / "other", resume=True)
    with pytest.raises(ValueError, match="resume needs a directory"):
        run(tiny_config(), resume=True)


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    model, first = run(tiny_config(), directory=tmp_path)
    again, result = run(tiny_config(), directory=tmp_path, resume=True)
    assert result.history == first.history
    for one, two in zip(weights_of(model), weights_of(again), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_diverged_run_names_the_step_and_keeps_the_checkpoint(tmp_path):
    model = tiny_model()

    class Poison(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                head = self.model.get_layer("head").bias
                head.assign(np.full(VOCAB, np.nan, "float32"))

    with pytest.raises(TrainingDiverged, match="loss became nan at step 4; .* step 3"):
        run(tiny_config(), model, directory=tmp_path, callbacks=[Poison()])
    state = json.loads((tmp_path / "checkpoints/state.json").read_text())
    (newest,) = state["checkpoints"]
    assert newest["step"] == 3
    with np.load(tmp_path / "checkpoints" / newest["arrays"]) as kept:
        assert all(np.isfinite(kept[name]).all() for name in kept)


def test_a_plain_keras_script_works_with_our_dataset():
    model = tiny_model()
    compile_model(model, tiny_config())
    starts = tg.window_schedule(len(PATTERN), WINDOW, 8, 4)
    history = model.fit(
        tg.WindowDataset(PATTERN, starts, WINDOW), shuffle=False, verbose=0
    )
    assert history.history["loss"][0] < math.log(VOCAB) + 0.2


def test_any_keras_model_can_be_trained():
    tokens = keras.Input((None,), dtype="int32")
    logits = keras.layers.Dense(VOCAB)(keras.layers.Embedding(VOCAB, 5)(tokens))
    model = keras.Model(tokens, logits)
    _, result = run(tiny_config(sequence_length=5), model)
    assert len(result.history) == 2


def test_half_precision_trains():
    model = tg.build_gpt(
        tg.GPTConfig(VOCAB, WINDOW, 1, 2, hidden_dim=12), dtype="mixed_float16"
    )
    _, result = run(tiny_config(steps=30, validate_every=15), model)
    assert result.history[-1]["valid_loss"] < result.history[0]["valid_loss"]


def test_progress_lines(capsys):
    tg.train(tiny_model(), PATTERN, PATTERN[:200], tiny_config())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step 3/6  loss ")
    assert "tokens/s" in lines[0] and "s left" in lines[0]


def test_tensorboard_needs_a_directory():
    with pytest.raises(ValueError, match="tensorboard needs a directory"):
        run(tiny_config(), tensorboard=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 10**12}, "at most 1,000,000,000 windows, got 1000000000000 x 64"),
        ({"batch_size": -3}, "batch_size must be at least 1, got -3"),
        ({"learning_rate": 0.0}, r"learning_rate must be .*\(0, inf\), got 0.0"),
        ({"learning_rate": float("nan")}, "learning_rate must be .*got nan"),
        ({"optimizer": "sgd"}, "optimizer must be one of .* got 'sgd'"),
        ({"schedule": "step"}, "schedule must be one of"),
        ({"warmup_steps": 4000}, "warmup_steps must be between 0 and 3000, got 4000"),
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"gradient_accumulation_steps": 3}, "must divide batch_size=64, got 3"),
        ({"ema_momentum": 1.0}, "ema_momentum must be"),
        ({"seed": -1}, "seed must be between 0"),
        ({"validate_every": 0}, "validate_every must be at least 1"),
        ({"restore_best": 1}, "restore_best must be True or False"),
    ],
)
def test_bad_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        tg.TrainConfig(**changes)


def test_bad_ids(tmp_path):
    with pytest.raises(
        ValueError, match="train_ids must lie between 0 and 10 .*got 11"
    ):
        tg.train(tiny_model(), [0, 11] * 50, PATTERN[:50], tiny_config())
    with pytest.raises(
        ValueError, match="train_ids has 5 tokens, at least 8 are needed"
    ):
        run(tiny_config(), ids=PATTERN[:5], directory=tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match="valid_ids has 3 tokens, at least 8"):
        tg.train(tiny_model(), PATTERN, PATTERN[:3], tiny_config())
    with pytest.raises(ValueError, match="train_ids must be a one-dimensional integer"):
        tg.train(tiny_model(), np.zeros((20, 3)), PATTERN, tiny_config())
    with pytest.raises(ValueError, match="sequence_length must be at most"):
        run(tiny_config(sequence_length=WINDOW + 1))
