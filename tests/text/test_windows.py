"""Tests of keras_tinygpt.text.windows."""

import doctest
import hashlib

import keras
import numpy as np
import pytest
from helpers import JIT
from hypothesis import given
from hypothesis import strategies as st

from keras_tinygpt.text import (
    WindowDataset,
    even_starts,
    fingerprint_array,
    split_ids,
    window_schedule,
    windows,
)


def test_docstring_examples():
    assert doctest.testmod(windows).failed == 0


def test_splits_are_contiguous_views():
    ids = np.arange(23, dtype=np.uint8)
    for parts in (
        split_ids(ids),
        split_ids(ids, (0.9, 0.1)),
        split_ids(ids, counts=(20, 3)),
        split_ids(ids, counts=(20, -1)),
    ):
        assert [len(part) for part in parts] == [20, 3]
        np.testing.assert_array_equal(np.concatenate(parts), ids)
        assert all(part.base is ids for part in parts)
    assert [len(part) for part in split_ids(ids, counts=(13, 5))] == [13, 5]
    assert [len(part) for part in split_ids(ids[:10], (0.7, 0.2, 0.1))] == [7, 2, 1]
    assert len(split_ids(ids, (1.0,))[0]) == len(split_ids(ids, counts=[-1])[0]) == 23
    assert split_ids([2, 3, 5], counts=(1, 2))[1].tolist() == [3, 5]


@given(
    count=st.integers(7, 1000),
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_fractions_lose_nothing(count, shares):
    fractions = [share / sum(shares) for share in shares]
    try:
        parts = split_ids(np.arange(count), fractions)
    except ValueError:
        assert min(fractions) * count < 1
        return
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(count))
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fractions": (0.9, 0.2)}, r"fractions must add up to 1, got \[0.9, 0.2\]"),
        ({"fractions": ()}, "fractions must add up to 1"),
        (
            {"fractions": (1.0, 0.0)},
            r"fractions\[1\] must be a finite number in \(0, 1",
        ),
        ({"fractions": (0.98, 0.02)}, None),
        ({"fractions": (0.02, 0.98)}, "23 tokens, too few for part 0"),
        ({"counts": (20, 4)}, r"at most the 23 ids, got \(20, 4\)"),
        ({"counts": (20, 3, -1)}, r"at most the 23 ids, got \(20, 3, -1\)"),
        ({"counts": (-1, 3)}, r"counts\[0\] must be at least 1, got -1"),
        ({"counts": (20, 0)}, r"counts\[1\] must be at least 1, got 0"),
        ({"counts": (20, 2.0)}, r"counts\[1\] must be an integer"),
        ({"counts": ()}, "counts must have at least one entry"),
        ({"counts": (20, 3), "fractions": (0.9, 0.1)}, "counts, got both"),
    ],
)
def test_bad_splits(arguments, message):
    if message is None:
        assert len(split_ids(np.arange(23), **arguments)[1]) == 1
        return
    with pytest.raises(ValueError, match=message):
        split_ids(np.arange(23), **arguments)


def test_only_flat_integer_ids_are_split():
    for ids in (np.zeros((2, 3), int), np.zeros(5)):
        with pytest.raises(ValueError, match="ids must be a one-dimensional integer"):
            split_ids(ids)
    with pytest.raises(ValueError, match="ids has 0 tokens, too few for part 0"):
        split_ids([])


def test_a_schedule_is_a_function_of_its_arguments():
    schedule = window_schedule(101, 7, steps=13, batch_size=5, seed=3)
    assert schedule.shape == (13, 5) and schedule.dtype == np.int64
    np.testing.assert_array_equal(schedule, window_schedule(101, 7, 13, 5, seed=3))
    np.testing.assert_array_equal(schedule, window_schedule(101, 7, 17, 5, seed=3)[:13])
    assert (schedule != window_schedule(101, 7, 13, 5, seed=2)).any()
    # Drawn once and kept, so that a change of NumPy's streams does not go unnoticed.
    assert window_schedule(101, 7, 2, 3).tolist() == [[12, 1, 88], [24, 36, 44]]


def test_a_schedule_covers_all_starts_evenly():
    # 94 cells of 500 draws on average: a cell outside 500 +- 6 sqrt(500) has
    # probability 2e-9, any of them 2e-7; and the seed is fixed.
    schedule = window_schedule(101, 7, steps=1000, batch_size=47, seed=0)
    counts = np.bincount(schedule.ravel())
    assert len(counts) == 101 - 7
    assert np.abs(counts - 500).max() < 6 * np.sqrt(500)


def test_one_window_is_enough():
    assert window_schedule(8, 7, 3, 2).tolist() == [[0, 0]] * 3
    assert even_starts(8, 7).tolist() == [0]


def test_too_few_tokens():
    message = "train_ids has 57 tokens, at least 101 are needed for one window of 100"
    with pytest.raises(ValueError, match=message):
        window_schedule(57, 100, 3, 2)
    with pytest.raises(ValueError, match=message.replace("train_ids", "valid_ids")):
        window_schedule(57, 100, 3, 2, name="valid_ids")
    with pytest.raises(ValueError, match="ids has 100 tokens, at least 101"):
        even_starts(100, 100)
    with pytest.raises(ValueError, match="ids has 5 tokens, at least 8"):
        WindowDataset(np.arange(5), [[0]], 7)


@pytest.mark.parametrize("name", ["num_ids", "sequence_length", "steps", "batch_size"])
def test_bad_schedule_arguments(name):
    arguments = {"num_ids": 101, "sequence_length": 7, "steps": 3, "batch_size": 2}
    for value in (-1, 2.0, True):
        with pytest.raises(ValueError, match=f"{name} must be"):
            window_schedule(**{**arguments, name: value})
    with pytest.raises(ValueError, match="seed must be at least 0"):
        window_schedule(**arguments, seed=-1)


@given(
    length=st.integers(1, 7),
    rest=st.integers(1, 50),
    stride=st.integers(1, 9) | st.none(),
)
def test_even_starts_fit_and_none_is_missing(length, rest, stride):
    starts = even_starts(length + rest, length, stride)
    step = stride or length
    assert starts.dtype == np.int64
    assert starts[0] == 0 and (np.diff(starts) == step).all()
    assert starts[-1] + length < length + rest <= starts[-1] + step + length


def test_bad_strides():
    for stride in (0, 1.5):
        with pytest.raises(ValueError, match="stride must be"):
            even_starts(101, 7, stride)


def test_fingerprints_see_numbers_only(monkeypatch):
    array = np.array([[1, -2, 3], [5, 7, 11]])
    expected = hashlib.sha256(
        b"".join(
            value.to_bytes(8, "little", signed=True) for value in (1, -2, 3, 5, 7, 11)
        )
    ).hexdigest()
    assert fingerprint_array(array) == expected
    assert fingerprint_array(array.astype(">i2").reshape(-1)) == expected
    assert fingerprint_array(array.T.copy().T) == expected
    assert fingerprint_array(array + 1) != expected
    monkeypatch.setattr(windows, "_CHUNK_ITEMS", 4)
    assert fingerprint_array(array) == expected
    with pytest.raises(ValueError, match="array must hold integers, got dtype float64"):
        fingerprint_array([0.5])


def test_items_are_windows_and_their_next_tokens(tmp_path):
    ids = np.arange(100, 129, dtype=np.uint8)
    ids.tofile(tmp_path / "ids.bin")
    starts = np.array([[0, 3], [21, 5], [2, 2]])
    for source in (ids, np.memmap(tmp_path / "ids.bin", np.uint8, "r"), list(ids)):
        dataset = WindowDataset(source, starts, 7)
        assert len(dataset) == len(list(dataset)) == 3
        inputs, targets = dataset[1]
        assert inputs.dtype == targets.dtype == np.int32
        assert type(inputs) is np.ndarray
        assert inputs.tolist() == [list(range(121, 128)), list(range(105, 112))]
        assert targets.tolist() == [list(range(122, 129)), list(range(106, 113))]
    narrow = WindowDataset(ids, starts.astype(np.uint8), 7)  # 21 + 7 in uint8 is fine
    np.testing.assert_array_equal(narrow[1][0], dataset[1][0])


def test_a_resumed_dataset_starts_further_on():
    starts = np.arange(10).reshape(5, 2)
    dataset = WindowDataset(np.arange(23), starts, 7, start_step=3)
    assert len(dataset) == 2
    assert dataset[0][0][:, 0].tolist() == [6, 7]
    dataset.start_step = 1
    assert dataset[0][0][:, 0].tolist() == [2, 3]
    for index in (4, -1):
        with pytest.raises(IndexError, match="between 0 and 3"):
            dataset[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": np.zeros(23)}, "ids must be a one-dimensional integer array"),
        ({"starts": [0, 1]}, r"starts must be an integer array \(steps, batch\)"),
        ({"starts": [[0.0]]}, "starts must be an integer array"),
        ({"starts": np.zeros((0, 2), int)}, "starts must not be empty"),
        ({"starts": [[0, 16]]}, "starts must lie between 0 and 15 for 23 ids, got 16"),
        ({"starts": [[-1, 3]]}, "got -1"),
        ({"sequence_length": 0}, "sequence_length must be at least 1"),
        ({"start_step": 3}, "start_step must be between 0 and 2, got 3"),
        ({"start_step": -1}, "start_step must be between 0 and 2"),
    ],
)
def test_bad_dataset_arguments(arguments, message):
    good = {"ids": np.arange(23), "starts": [[0, 15], [3, 5]], "sequence_length": 7}
    with pytest.raises(ValueError, match=message):
        WindowDataset(**{**good, **arguments})


class MeanInput(keras.layers.Layer):
    """Multiplies its inputs by a weight that starts at 1."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs):
        return self.scale * keras.ops.cast(inputs, "float32")

    def compute_output_shape(self, input_shape):
        return input_shape


def fit_means(dataset, **arguments) -> list[float]:
    """Returns the mean input of each epoch, as the compiled training step saw it."""
    inputs = keras.Input((dataset.sequence_length,), dtype="int32")
    model = keras.Model(inputs, MeanInput()(inputs))
    model.compile(
        keras.optimizers.SGD(0.0),
        loss=lambda targets, outputs: keras.ops.mean(outputs, axis=-1),
        jit_compile=JIT,
    )
    history = model.fit(dataset, shuffle=False, verbose=0, **arguments)
    return history.history["loss"]


def test_epochs_continue_through_the_schedule():
    ids = np.arange(1000)
    starts = window_schedule(1000, 5, steps=12, batch_size=3)
    expected = starts.reshape(4, 9).mean(axis=1) + 2  # 4 epochs of 3 steps
    dataset = WindowDataset(ids, starts, 5)
    found = fit_means(dataset, steps_per_epoch=3, epochs=4)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    found = fit_means(dataset, steps_per_epoch=3, epochs=2)  # part of the schedule
    np.testing.assert_allclose(found, expected[:2], rtol=1e-6)
    found = fit_means(dataset, steps_per_epoch=3, epochs=1)  # each fit starts over
    np.testing.assert_allclose(found, expected[:1], rtol=1e-6)


def test_a_resumed_fit_continues_through_the_schedule():
    starts = window_schedule(1000, 5, steps=12, batch_size=3)
    expected = starts.reshape(4, 9).mean(axis=1) + 2
    dataset = WindowDataset(np.arange(1000), starts, 5)

    def resume(logs=None):
        dataset.start_step = 6

    callback = keras.callbacks.LambdaCallback(on_train_begin=resume)
    found = fit_means(
        dataset, steps_per_epoch=3, epochs=4, initial_epoch=2, callbacks=[callback]
    )
    np.testing.assert_allclose(found, expected[2:], rtol=1e-6)


def test_the_batches_as_a_tf_data_set():
    ids = np.arange(41, dtype="uint16")
    dataset = WindowDataset(ids, window_schedule(41, 5, 7, 3), 5, start_step=2)
    pipeline = dataset.as_tf_data()
    assert len(pipeline) == 5
    assert [spec.shape.as_list() for spec in pipeline.element_spec] == [[3, 5], [3, 5]]
    for batch, expected in zip(pipeline, dataset, strict=True):
        assert np.array_equal(batch[0], expected[0])
        assert np.array_equal(batch[1], expected[1])


def test_a_data_source_for_grain():
    grain = pytest.importorskip("grain", reason="needs the package grain")
    ids = np.arange(41)
    dataset = WindowDataset(ids, window_schedule(41, 5, 7, 3), 5)
    pipeline = grain.MapDataset.source(dataset).map(lambda batch: batch[1] - batch[0])
    assert len(pipeline) == 7
    assert all(np.array_equal(batch, np.ones((3, 5))) for batch in pipeline)
