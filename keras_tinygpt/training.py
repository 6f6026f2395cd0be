"""Training: one config, one call around Keras' own `compile` and `fit`.

The run is indexed by optimizer steps: a precomputed schedule says which windows each
step sees, an epoch is the stretch between two validations, and checkpoints are written
at epoch boundaries and when a signal stops the run. Whatever `train` does can be done
by hand with `make_optimizer`, `WindowDataset` and `model.fit`.
"""

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.checks import (
    check_bool,
    check_choice,
    check_float,
    check_ids,
    check_int,
)
from keras_tinygpt.distribution import (
    check_strategy,
    count_replicas,
    strategy_scope,
    summing_optimizer,
)
from keras_tinygpt.files import (
    file_sha256,
    read_sealed,
    replace_file,
    sealed,
    write_csv,
    write_json,
)
from keras_tinygpt.models.configured import check_predicts_next_tokens
from keras_tinygpt.models.initialization import fingerprint
from keras_tinygpt.text.windows import (
    WindowDataset,
    even_starts,
    fingerprint_array,
    window_schedule,
)

OPTIMIZERS = ("adamw", "adam", "muon")
SCHEDULES = ("cosine", "linear", "constant")
DEFAULT_SEQUENCE_LENGTH = 128
STEP_FILE = re.compile(r"step_\d{7,}\.npz")
RUN_KEYS = ("step", "schedule_fingerprint", "initial_fingerprint")
# Operations that take two cores half a minute; compiling takes up to ten seconds and
# saves a quarter.
WORTH_COMPILING = 2e12
MAX_WINDOWS = 10**9  # the schedule is kept in memory, 8 bytes a window


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to train.

    Args:
        steps: number of optimizer updates; with batch_size at most a billion windows.
        batch_size: windows per update.
        sequence_length: tokens per window; None means the model's window.
        optimizer: adamw, adam (no weight decay) or muon (AdamW for embeddings, head
            and vectors).
        learning_rate: peak rate.
        adam_learning_rate_ratio: with muon, the AdamW rate as a share of learning_rate.
        schedule: cosine or linear decay after the warm-up, or constant.
        final_learning_rate_fraction: share of the peak rate reached at the last step.
        decay_fraction: share of the steps after the warm-up during which a linear
            schedule falls; before that it stays at the peak.
        warmup_steps: updates of linear rise from 0 to the peak rate, at most steps;
            None means 100, or a tenth of a shorter run.
        weight_decay: decoupled decay per update and unit of rate, on matrices only.
        beta_2: decay of Adam's second moment.
        clip_norm: largest norm of the whole gradient; None means no clipping.
        gradient_accumulation_steps: parts an update's batch is computed in, to save
            memory; must divide batch_size. The result is that of the whole batch.
        ema_momentum: decay per update of a running average of the weights which is
            used for validation and kept at the end; None means none. With accumulated
            gradients the average is at most one update behind that of the whole batch.
        validate_every: updates between validations, log lines and checkpoints.
        validation_windows: most windows scored at each validation.
        restore_best: whether the weights with the lowest validation loss are kept at
            the end, rather than the last ones.
        seed: seed of the window schedule.
        jit_compile: whether XLA compiles the step; None means the faster choice: always
            on JAX, never on PyTorch, on TensorFlow if the run is long enough to gain by
            it what compiling takes.
    """

    steps: int = 3000
    batch_size: int = 64
    sequence_length: int | None = None
    optimizer: str = "adamw"
    learning_rate: float = 2e-3
    adam_learning_rate_ratio: float = 0.2
    schedule: str = "cosine"
    final_learning_rate_fraction: float = 0.1
    decay_fraction: float = 1.0
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    beta_2: float = 0.99
    clip_norm: float | None = 1.0
    gradient_accumulation_steps: int = 1
    ema_momentum: float | None = None
    validate_every: int = 250
    validation_windows: int = 256
    restore_best: bool = True
    seed: int = 0
    jit_compile: bool | None = None

    def __post_init__(self):
        for name in ("steps", "batch_size", "validate_every", "validation_windows"):
            check_int(name, getattr(self, name))
        if self.steps * self.batch_size > MAX_WINDOWS:
            raise ValueError(
                f"steps x batch_size must be at most {MAX_WINDOWS:,} windows, "
                f"got {self.steps} x {self.batch_size}"
            )
        if self.sequence_length is not None:
            check_int("sequence_length", self.sequence_length)
        check_int("seed", self.seed, 0, 2**32 - 1)
        if self.warmup_steps is not None:
            check_int("warmup_steps", self.warmup_steps, 0, self.steps)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_float("learning_rate", self.learning_rate, low_open=True)
        check_float(
            "adam_learning_rate_ratio", self.adam_learning_rate_ratio, low_open=True
        )
        check_float(
            "final_learning_rate_fraction", self.final_learning_rate_fraction, 0.0, 1.0
        )
        check_float("decay_fraction", self.decay_fraction, 0.0, 1.0, low_open=True)
        check_float("weight_decay", self.weight_decay)
        check_float("beta_2", self.beta_2, 0.0, 1.0, high_open=True)
        if self.clip_norm is not None:
            check_float("clip_norm", self.clip_norm, low_open=True)
        check_int("gradient_accumulation_steps", self.gradient_accumulation_steps)
        if self.batch_size % self.gradient_accumulation_steps:
            raise ValueError(
                "gradient_accumulation_steps must divide batch_size="
                f"{self.batch_size}, got {self.gradient_accumulation_steps}"
            )
        if self.ema_momentum is not None:
            check_float("ema_momentum", self.ema_momentum, 0.0, 1.0, high_open=True)
        check_bool("restore_best", self.restore_best)
        if self.jit_compile is not None:
            check_bool("jit_compile", self.jit_compile)


@dataclasses.dataclass
class TrainResult:
    """What a run did.

    Args:
        history: one dict per validation: step, loss (running mean since the one
            before), valid_loss (nats), learning_rate, seconds since the start.
        seconds: wall time of the run, compilation and validation included.
        tokens_per_second: training tokens per second, median over the stretches
            between validations, compilation and validation left out.
        best_step: step with the lowest validation loss.
        best_valid_loss: that loss in nats.
        schedule_fingerprint: sha256 of the window starts.
        initial_fingerprint: sha256 of the weights before the first step.
    """

    history: list[dict[str, float]]
    seconds: float
    tokens_per_second: float
    best_step: int
    best_valid_loss: float
    schedule_fingerprint: str
    initial_fingerprint: str


class TrainingDiverged(ArithmeticError):
    """The loss became NaN or infinite; the message names the step."""


class TrainingStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run; what it had done is saved.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, signal_number: int, message: str = ""):
        super().__init__(message)
        self.signal = signal_number


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class StepSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Warm-up, plateau and decay over optimizer updates, float32.

    Keras counts micro-batches when gradients are accumulated; this schedule divides by
    `gradient_accumulation_steps`, so that it runs on updates either way.

    Args:
        config: a `TrainConfig`.
    """

    def __init__(self, config: TrainConfig):
        super().__init__()
        self.config = config
        self.warmup_steps = config.warmup_steps
        if config.warmup_steps is None:
            self.warmup_steps = min(100, config.steps // 10)
        decay_steps = max(1, config.steps - self.warmup_steps)
        if config.schedule == "cosine":
            self._after_warmup = keras.optimizers.schedules.CosineDecay(
                config.learning_rate,
                decay_steps,
                alpha=config.final_learning_rate_fraction,
            )
        elif config.schedule == "linear":
            length = max(1, round(decay_steps * config.decay_fraction))
            self._decay_start = decay_steps - length
            self._after_warmup = keras.optimizers.schedules.PolynomialDecay(
                config.learning_rate,
                length,
                config.learning_rate * config.final_learning_rate_fraction,
            )

    def __call__(self, step):
        config = self.config
        step = keras.ops.cast(step, "float32")
        step = keras.ops.floor(step / config.gradient_accumulation_steps)
        after = step - self.warmup_steps
        if config.schedule == "constant":
            rate = keras.ops.full_like(step, config.learning_rate)
        elif config.schedule == "linear":
            rate = self._after_warmup(keras.ops.maximum(after - self._decay_start, 0.0))
        else:
            rate = self._after_warmup(keras.ops.maximum(after, 0.0))
        warmup = config.learning_rate * (step + 1.0) / max(1, self.warmup_steps)
        return keras.ops.where(after < 0.0, warmup, rate)

    def get_config(self):
        return {"config": dataclasses.asdict(self.config)}

    @classmethod
    def from_config(cls, config):
        return cls(TrainConfig(**config["config"]))


def make_optimizer(
    config: TrainConfig, model: keras.Model
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of `config`, with weight decay on matrices only.

    Pass it to `model.compile` when you write the training script yourself; with
    tf.distribute, in the scope of the strategy.
    """
    common: dict[str, Any] = {
        "learning_rate": StepSchedule(config),
        "global_clipnorm": config.clip_norm,
    }
    classes = {
        "adam": keras.optimizers.Adam,
        "adamw": keras.optimizers.AdamW,
        "muon": keras.optimizers.Muon,
    }
    make = classes[config.optimizer]
    replicas = count_replicas(model)
    if keras.backend.backend() == "tensorflow" and replicas > 1 and config.clip_norm:
        make = summing_optimizer(make)
        common["global_clipnorm"] = config.clip_norm / replicas
    if config.gradient_accumulation_steps > 1:
        common["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if config.ema_momentum is not None:
        # Keras averages after every part of a batch.
        momentum = config.ema_momentum ** (1 / config.gradient_accumulation_steps)
        common.update(use_ema=True, ema_momentum=momentum)
    if config.optimizer == "adam":
        return make(beta_2=config.beta_2, **common)
    if config.optimizer == "adamw":
        optimizer = make(
            weight_decay=config.weight_decay, beta_2=config.beta_2, **common
        )
    else:
        optimizer = make(
            weight_decay=config.weight_decay,
            adam_weight_decay=config.weight_decay,
            adam_beta_2=config.beta_2,
            adam_lr_ratio=config.adam_learning_rate_ratio,
            exclude_layers=["head"],
            **common,
        )
    vectors = [v for v in model.trainable_variables if len(v.shape) < 2]
    optimizer.exclude_from_weight_decay(var_list=vectors)
    return optimizer


def compile_model(model: keras.Model, config: TrainConfig) -> None:
    """Calls `model.compile` with the optimizer of `config` and the cross-entropy.

    With sample weights the loss is the mean over what they count.
    """
    jit_compile = config.jit_compile
    if jit_compile is None:
        jit_compile = _gains_by_xla(model, config)
    with strategy_scope(model):
        optimizer = make_optimizer(config, model)
        # Left to the first step, this would make TensorFlow trace that step twice.
        optimizer.build(model.trainable_variables)
        model.compile(
            optimizer=optimizer,
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            jit_compile=jit_compile,
        )


def _gains_by_xla(model: keras.Model, config: TrainConfig) -> bool:
    """Whether the run is faster with its step compiled."""
    if keras.backend.backend() != "tensorflow":
        return keras.backend.backend() == "jax"
    tokens = config.steps * config.batch_size * model_window(model)
    operations = 6 * model.count_params() * tokens
    return operations >= WORTH_COMPILING and count_replicas(model) == 1


def model_window(model: keras.Model, sequence_length: int | None = None) -> int:
    """Tokens per window: as given, else the model's own, else the default."""
    limit = getattr(getattr(model, "config", None), "max_sequence_length", None)
    if sequence_length is None:
        return limit or DEFAULT_SEQUENCE_LENGTH
    check_int("sequence_length", sequence_length)
    positions = getattr(getattr(model, "config", None), "positions", None)
    if positions == "learned" and sequence_length > limit:
        raise ValueError(
            f"sequence_length must be at most max_sequence_length={limit} with "
            f"learned positions, got {sequence_length}"
        )
    return sequence_length


def train(
    model: keras.Model,
    train_ids: np.ndarray,
    valid_ids: np.ndarray,
    config: TrainConfig | None = None,
    *,
    directory: str | os.PathLike | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    resume: bool = False,
    tensorboard: bool = False,
    verbose: bool = True,
) -> TrainResult:
    """Compiles and fits `model` on windows of `train_ids`.

    Args:
        model: int (B, T) -> logits (B, T, V), built with `build_gpt`, `build_lstm` or
            by hand.
        train_ids: int array (n,), any integer dtype; a memory map is fine.
        valid_ids: int array (n,), scored on even windows at each validation.
        config: a `TrainConfig`; None means its defaults.
        directory: where checkpoints, `history.csv` and TensorBoard logs go; None
            keeps everything in memory.
        callbacks: more Keras callbacks; one that sets `model.stop_training` ends the
            run, after a validation.
        resume: whether to go on from the last checkpoint in `directory`.
        tensorboard: whether to write TensorBoard logs (needs that package).
        verbose: whether to show the progress bar and a line per validation.

    Returns:
        A `TrainResult`; `model` holds the best or the last weights.

    Raises:
        ValueError: for token ids outside the vocabulary, parts shorter than a window,
            batches that the replicas of a distribution cannot share equally, or a
            checkpoint of another run.
        TrainingDiverged: when the loss is no longer finite; names the step. The last
            checkpoint is kept.
        TrainingStopped: after Ctrl-C or SIGTERM, in the main thread with a
            `directory`; the step is finished and saved first. `resume` goes on as if
            nothing had happened. A second signal stops at once.
    """
    config = config or TrainConfig()
    check_predicts_next_tokens(model)
    length = model_window(model, config.sequence_length)
    check_int("vocab_size", model.output_shape[-1], 2)
    for name, ids in (("train_ids", train_ids), ("valid_ids", valid_ids)):
        check_ids(ids, model.output_shape[-1], name, least=1)
    starts = window_schedule(
        len(train_ids),
        length,
        config.steps,
        config.batch_size,
        seed=config.seed,
        name="train_ids",
    )
    check_strategy(model)
    replicas = count_replicas(model)
    _check_replicas(config, replicas)
    validation = _pipeline(_validation_dataset(valid_ids, length, config, replicas))
    initial = fingerprint(model)
    compile_model(model, config)
    run = _Run(config, fingerprint_array(starts), initial)
    store = None
    if directory is not None:
        store = _Checkpoints(Path(directory) / "checkpoints", run)
        if resume:
            store.restore(model)
    elif resume:
        raise ValueError("resume needs a directory, got directory=None")
    if run.step >= config.steps:
        if config.ema_momentum is not None:  # as `fit` does at its end
            optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
            optimizer.finalize_variable_values(model.trainable_variables)
        return run.finish(model, store)

    parts = config.gradient_accumulation_steps
    micro = starts.reshape(config.steps * parts, -1)
    every = min(config.validate_every, config.steps)
    stop = _StopRequest(store is not None)
    recorder = _Recorder(run, store, length, every, stop, verbose)
    all_callbacks = []
    if config.ema_momentum is not None:
        all_callbacks.append(keras.callbacks.SwapEMAWeights())
    all_callbacks.append(recorder)
    if tensorboard:
        all_callbacks.append(_tensorboard(directory))
    with stop, contextlib.closing(recorder):
        while run.step < config.steps:
            # A run stopped between two validations finishes that stretch by itself.
            epoch, done = divmod(run.step, every)
            last = epoch + 1 if done else -(-config.steps // every)
            model.fit(
                _pipeline(WindowDataset(train_ids, micro[run.step * parts :], length)),
                steps_per_epoch=(every - done) * parts,
                initial_epoch=epoch,
                epochs=last,
                validation_data=validation,
                callbacks=[*all_callbacks, *callbacks],
                shuffle=False,  # the order of the schedule is part of the run
                verbose=0,
            )
            if run.step < min(last * every, config.steps):
                break  # a callback has stopped it
            if done and run.step < config.steps:
                store.restore(model)  # fit ends by putting averages into the weights
    return run.finish(model, store)


def _check_replicas(config: TrainConfig, replicas: int) -> None:
    """Raises ValueError unless every batch has equal parts for all replicas."""
    accumulated = config.gradient_accumulation_steps
    if config.batch_size // accumulated % replicas:
        raise ValueError(
            f"batch_size / gradient_accumulation_steps must be divisible by the "
            f"{replicas} replicas, got {config.batch_size} / {accumulated}"
        )
    if replicas > 1 and keras.backend.backend() == "tensorflow":
        if accumulated > 1:
            raise ValueError(
                "gradient_accumulation_steps must be 1 with tf.distribute, got "
                f"{accumulated}"
            )
        if config.jit_compile:
            raise ValueError("jit_compile must be False with tf.distribute, got True")


def _validation_dataset(
    ids, length: int, config: TrainConfig, replicas: int = 1
) -> WindowDataset:
    """At most `validation_windows` even windows in batches of one shape."""
    starts = even_starts(len(ids), length, name="valid_ids")
    if len(starts) > config.validation_windows:
        picked = np.linspace(0, len(starts) - 1, config.validation_windows)
        starts = starts[np.round(picked).astype("int64")]
    batch_size = min(len(starts), config.batch_size) // replicas * replicas
    if not batch_size:
        raise ValueError(
            f"valid_ids must hold a window of {length} tokens for each of the "
            f"{replicas} replicas, got {len(starts)} (validation_windows="
            f"{config.validation_windows})"
        )
    whole = len(starts) // batch_size * batch_size
    return WindowDataset(ids, starts[:whole].reshape(-1, batch_size), length)


def _pipeline(dataset: WindowDataset) -> Any:
    """The dataset in the form `fit` reads it best."""
    if keras.backend.backend() != "tensorflow":
        return dataset
    return dataset.as_tf_data()


def _tensorboard(directory) -> keras.callbacks.Callback:
    if directory is None:
        raise ValueError("tensorboard needs a directory, got directory=None")
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "tensorboard=True needs its package: "
            "pip install 'keras-tinygpt[tensorboard]'"
        ) from error
    return keras.callbacks.TensorBoard(str(Path(directory) / "tensorboard"))


@dataclasses.dataclass
class _Run:
    """State of a run that a checkpoint must hold beside the model."""

    config: TrainConfig
    schedule_fingerprint: str
    initial_fingerprint: str
    step: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    stretch_metrics: list[float] = dataclasses.field(default_factory=list)
    best_step: int = 0
    best_valid_loss: float = float("inf")
    best_sha256: str | None = None
    best_weights: list[np.ndarray] | None = None

    def finish(self, model: keras.Model, store: "_Checkpoints | None") -> TrainResult:
        if self.config.restore_best:
            if self.best_weights is not None:
                model.set_weights(self.best_weights)
            elif self.best_sha256 is not None:
                store.load_best(model)
        rates = [row["tokens_per_second"] for row in self.history]
        return TrainResult(
            history=self.history,
            seconds=self.seconds,
            tokens_per_second=float(np.median(rates)) if rates else 0.0,
            best_step=self.best_step,
            best_valid_loss=self.best_valid_loss,
            schedule_fingerprint=self.schedule_fingerprint,
            initial_fingerprint=self.initial_fingerprint,
        )


class _Checkpoints:
    """The last two states of a run and the best one, each file whole or absent.

    A checkpoint is an .npz of plain arrays: weights, states of the random generators
    (which a .keras file leaves out) and the optimizer's variables. `state.json` holds
    the rest and the sha256 of the files, the newest first.
    """

    def __init__(self, folder: Path, run: _Run):
        self.folder = folder
        self.run = run
        self.best = folder / "best.npz"
        self.state = folder / "state.json"
        self.history = folder.parent / "history.csv"
        folder.mkdir(parents=True, exist_ok=True)

    def save_best(self, model: keras.Model) -> None:
        weights = [_plain_array(weight) for weight in model.weights]
        replace_file(self.best, lambda path: np.savez(path, *weights))
        self.run.best_sha256 = file_sha256(self.best)

    def load_best(self, model: keras.Model) -> None:
        if _intact_sha256(self.best) != self.run.best_sha256:
            raise ValueError(f"{self.best} is missing or damaged")
        with np.load(self.best, allow_pickle=False) as arrays:
            model.set_weights([arrays[name] for name in arrays])

    def save_last(self, model: keras.Model) -> None:
        run = self.run
        name = f"step_{run.step:07d}.npz"
        arrays = {key: _plain_array(value) for key, value in _all_state(model).items()}
        replace_file(self.folder / name, lambda path: np.savez(path, **arrays))
        kept = {
            field.name: getattr(run, field.name)
            for field in dataclasses.fields(run)
            if field.name not in ("config", "best_weights")
            and (field.name != "best_valid_loss" or run.history)
        }
        newest = {"arrays": name, "sha256": file_sha256(self.folder / name), **kept}
        listed = self._read()["checkpoints"] if self.state.exists() else []
        earlier = [c for c in listed if c["arrays"] != name][:1]
        content = {"config": dataclasses.asdict(run.config)}
        write_json(self.state, sealed({**content, "checkpoints": [newest, *earlier]}))
        if run.history:
            write_csv(self.history, run.history)
        names = {checkpoint["arrays"] for checkpoint in (newest, *earlier)}
        for old in self.folder.glob("step_*.npz"):
            if old.name not in names:
                old.unlink()

    def _read(self) -> dict[str, Any]:
        content = read_sealed(self.state)
        try:
            saved, listed = dict(content["config"]), list(content["checkpoints"])
            for checkpoint in listed:
                if not STEP_FILE.fullmatch(checkpoint["arrays"]):
                    raise ValueError(f"no checkpoint is named {checkpoint['arrays']!r}")
                missing = {"sha256", *RUN_KEYS} - set(checkpoint)
                if missing:
                    raise ValueError(f"a checkpoint lacks {', '.join(missing)}")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.state} is damaged: {error}") from error
        return {"config": saved, "checkpoints": listed}

    def _newest_intact(self, checkpoints: list[dict[str, Any]]) -> dict[str, Any]:
        for checkpoint in checkpoints:
            path = self.folder / checkpoint["arrays"]
            if _intact_sha256(path) == checkpoint["sha256"]:
                return checkpoint
            print(f"{path} is missing or damaged; the checkpoint before it is used")
        raise ValueError(f"resume needs an intact checkpoint, none in {self.folder}")

    def restore(self, model: keras.Model) -> None:
        if not self.state.exists():
            raise ValueError(f"resume needs a checkpoint, found none in {self.folder}")
        content, run = self._read(), self.run
        state, saved = self._newest_intact(content["checkpoints"]), content["config"]
        name, _ = state.pop("arrays"), state.pop("sha256")
        for field, value in dataclasses.asdict(run.config).items():
            if saved.get(field) != value:
                raise ValueError(
                    f"resume needs {field}={saved.get(field)!r} as at the start of the "
                    f"run, got {value!r}"
                )
        for key, meaning in (
            ("schedule_fingerprint", "text and split"),
            ("initial_fingerprint", "model"),
        ):
            if state[key] != getattr(run, key):
                raise ValueError(
                    f"resume needs the {meaning} of the start of the run; the {key} "
                    f"in {self.state} differs"
                )
        variables = _all_state(model)
        with np.load(self.folder / name, allow_pickle=False) as arrays:
            saved = {key: arrays[key].shape for key in arrays}
            if saved != {key: tuple(v.shape) for key, v in variables.items()}:
                raise ValueError(f"{self.folder / name} holds another model")
            for key, variable in variables.items():
                variable.assign(arrays[key])
        for key, value in state.items():
            setattr(run, key, value)


def _plain_array(variable) -> np.ndarray:
    """A copy; bfloat16, which .npz files do not know, becomes float32."""
    array = keras.ops.convert_to_numpy(variable)
    return array.astype("float32" if array.dtype.name == "bfloat16" else array.dtype)


def _intact_sha256(path: Path) -> str | None:
    return file_sha256(path) if path.is_file() else None


def _all_state(model: keras.Model) -> dict[str, Any]:
    """Every variable training changes, metrics left out, by part and place.

    Paths would not do: Keras numbers random generators through the whole process.
    """
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    parts = {
        "model": [v for v in model.variables if id(v) not in metrics],
        "optimizer": model.optimizer.variables,
    }
    return {
        f"{part}/{index}": variable
        for part, variables in parts.items()
        for index, variable in enumerate(variables)
    }


class _StopRequest:
    """Remembers the first Ctrl-C or SIGTERM; the second has its usual effect."""

    def __init__(self, active: bool):
        self.active, self.signal = active, 0
        self._handlers: dict[int, Any] = {}

    def __enter__(self):
        in_main = threading.current_thread() is threading.main_thread()
        if self.active and in_main:
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number, frame):
        self.signal = number
        self.__exit__()

    def __exit__(self, *error):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}


class _Recorder(keras.callbacks.Callback):
    """Progress, history, divergence guard, checkpoints, end of the run."""

    def __init__(self, run: _Run, store, length: int, every: int, stop, verbose):
        super().__init__()
        self.run, self.store, self.every, self.stop = run, store, every, stop
        self.parts = run.config.gradient_accumulation_steps
        self.tokens = run.config.batch_size * length
        self.progress = _Progress(run) if verbose else None

    def on_train_begin(self, logs=None):
        self.micro_step = self.run.step * self.parts
        self.started = time.perf_counter() - self.run.seconds

    def on_epoch_begin(self, epoch, logs=None):
        self.stretch = (time.perf_counter(), self.micro_step // self.parts)
        self.compiled = False
        for variable, value in zip(
            self._metric_variables(), self.run.stretch_metrics, strict=False
        ):
            variable.assign(value)  # the mean loss since the last validation
        self.run.stretch_metrics = []

    def on_train_batch_end(self, batch, logs=None):
        self.micro_step += 1
        run = self.run
        loss = float(logs["loss"])
        if not np.isfinite(loss):
            step = -(-self.micro_step // self.parts)
            kept = (
                f"; the checkpoint of step {run.step} in {self.store.folder} is kept"
                if self.store and run.step
                else ""
            )
            raise TrainingDiverged(f"the loss became {loss} at step {step}{kept}")
        step, rest = divmod(self.micro_step, self.parts)
        if rest:
            return
        now, (since, first) = time.perf_counter(), self.stretch
        self.rate = self.tokens * (step - first) / max(now - since, 1e-9)
        if not self.compiled:  # the first step of a stretch may compile
            self.stretch, self.compiled = (now, step), True
        if self.progress:
            self.progress.update(step, logs["loss"], self.rate)
        if step >= run.config.steps:
            self.model.stop_training = True
        elif self.stop.signal and self.store and step % self.every:
            self._save_and_stop(step)

    def _metric_variables(self):
        return [v for metric in self.model.metrics for v in metric.variables]

    def _save_and_stop(self, step: int):
        """Between two validations."""
        run = self.run
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        run.step, run.seconds = step, time.perf_counter() - self.started
        run.stretch_metrics = [float(v) for v in self._metric_variables()]
        self.store.save_last(self.model)
        raise TrainingStopped(self.stop.signal)

    def on_epoch_end(self, epoch, logs=None):
        run = self.run
        run.step = self.micro_step // self.parts
        run.seconds = time.perf_counter() - self.started
        row = {
            "step": run.step,
            "loss": float(logs["loss"]),
            "valid_loss": float(logs["val_loss"]),
            "learning_rate": float(self.model.optimizer.learning_rate),
            "tokens_per_second": self.rate,
            "seconds": run.seconds,
        }
        if not np.isfinite(row["valid_loss"]):
            raise TrainingDiverged(
                f"the validation loss became {row['valid_loss']} at step {run.step}"
            )
        logs.update(row)
        run.history.append(row)
        if row["valid_loss"] < run.best_valid_loss:
            run.best_valid_loss, run.best_step = row["valid_loss"], run.step
            self._keep_best()
        if self.store:
            self.store.save_last(self.model)
        if self.progress:
            self.progress.line(row)
        if self.stop.signal and run.step < run.config.steps:
            raise TrainingStopped(self.stop.signal)

    def _keep_best(self):
        if self.run.config.ema_momentum is None:
            self._snapshot()
            return
        swap = keras.callbacks.SwapEMAWeights()
        swap.set_model(self.model)
        swap.on_test_begin()
        self._snapshot()
        swap.on_test_end()

    def _snapshot(self):
        if self.store:
            self.store.save_best(self.model)
        else:
            self.run.best_weights = [_plain_array(w) for w in self.model.weights]

    def close(self):
        if self.progress:
            self.progress.close()


class _Progress:
    """Keras' progress bar over the whole run on a terminal; plain lines elsewhere."""

    def __init__(self, run: _Run):
        self.run = run
        self.bar = None

    def update(self, step: int, loss: float, rate: float) -> None:
        if not os.isatty(1):
            return
        if self.bar is None:
            self.bar = keras.utils.Progbar(
                self.run.config.steps,
                width=20,
                stateful_metrics=["loss", "tokens/s"],
                unit_name="step",
            )
        values = [("loss", float(loss)), ("tokens/s", round(rate))]
        self.bar.update(step, values=values, finalize=False)

    def line(self, row: dict[str, float]) -> None:
        steps, done = self.run.config.steps, int(row["step"])
        left = row["seconds"] / done * (steps - done)
        self.close()
        print(
            f"step {done:>{len(str(steps))}}/{steps}"
            f"  loss {row['loss']:.4f}  valid {row['valid_loss']:.4f}"
            f"  {row['tokens_per_second']:,.0f} tokens/s"
            f"  {left:.0f} s left",
            flush=True,
        )

    def close(self) -> None:
        if self.bar is not None:
            print()
            self.bar = None
