"""What holds for any input: configs, bundles, windows, masks, draws, numbers."""

import dataclasses
import json
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import to_numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

import keras_tinygpt as tg
from keras_tinygpt.generation.sampling import SamplingConfig, sample
from keras_tinygpt.layers import CausalMultiHeadAttention, causal_mask
from keras_tinygpt.layers.blocks import ACTIVATIONS, NORM_POSITIONS
from keras_tinygpt.layers.normalization import NORMALIZATIONS
from keras_tinygpt.training import OPTIMIZERS, SCHEDULES, StepSchedule

# Elsewhere every operation is compiled or dispatched by itself.
EXAMPLES = 40 if keras.backend.backend() == "tensorflow" else 10

gpt_configs = st.builds(
    lambda heads, width, **fields: tg.GPTConfig(
        num_heads=heads, hidden_dim=2 * heads * width, **fields
    ),
    heads=st.integers(1, 3),
    width=st.integers(1, 3),
    vocab_size=st.integers(1, 7),
    max_sequence_length=st.integers(1, 7),
    num_layers=st.integers(1, 2),
    num_kv_heads=st.sampled_from([None, 1]),
    intermediate_dim=st.sampled_from([None, 1, 5]),
    positions=st.sampled_from(["learned", "sinusoidal", "rotary", "alibi", "none"]),
    normalization=st.sampled_from(NORMALIZATIONS),
    norm_position=st.sampled_from(NORM_POSITIONS),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    dropout=st.sampled_from([0.0, 0.1]),
    qkv_bias=st.booleans(),
    use_bias=st.booleans(),
    qk_norm=st.booleans(),
    tie_embeddings=st.booleans(),
    scale_embeddings=st.booleans(),
    attention_window=st.sampled_from([None, 1, 3]),
)
lstm_configs = st.builds(
    tg.LSTMConfig,
    vocab_size=st.integers(1, 7),
    hidden_dim=st.integers(1, 5),
    num_layers=st.integers(1, 2),
    embedding_dim=st.sampled_from([None, 1, 3]),
    dropout=st.sampled_from([0.0, 0.5]),
)
train_configs = st.builds(
    tg.TrainConfig,
    steps=st.integers(10, 10**6),
    batch_size=st.sampled_from([4, 64]),
    sequence_length=st.sampled_from([None, 3]),
    optimizer=st.sampled_from(OPTIMIZERS),
    learning_rate=st.floats(1e-9, 1e9),
    schedule=st.sampled_from(SCHEDULES),
    decay_fraction=st.floats(1e-6, 1.0),
    warmup_steps=st.sampled_from([None, 0, 7]),
    clip_norm=st.sampled_from([None, 0.5]),
    gradient_accumulation_steps=st.sampled_from([1, 2]),
    ema_momentum=st.sampled_from([None, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)


@given(config=st.one_of(gpt_configs, lstm_configs, train_configs))
def test_configs_survive_json(config):
    content = json.loads(json.dumps(dataclasses.asdict(config)))
    assert type(config)(**content) == config


@given(config=train_configs, step=st.integers(0, 10**6))
@settings(max_examples=20)
def test_rates_lie_between_zero_and_the_peak(config, step):
    config = dataclasses.replace(config, gradient_accumulation_steps=1)
    rate = float(StepSchedule(config)(step))
    assert 0 <= rate <= config.learning_rate * (1 + 1e-5)


@given(config=st.one_of(gpt_configs, lstm_configs), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_bundles_of_any_shape_survive(config, seed):
    build = tg.build_gpt if isinstance(config, tg.GPTConfig) else tg.build_lstm
    model = build(config, seed=seed)
    assert config.least_weights() <= model.count_params()
    tokenizer = tg.CharTokenizer("abcdefg"[: config.vocab_size])
    with tempfile.TemporaryDirectory() as folder:
        lm = tg.load(tg.save(Path(folder) / "run", model, tokenizer, {"n": [1, 2.5]}))
    assert tg.fingerprint(lm.model) == tg.fingerprint(model)
    assert lm.model.config == config and lm.tokenizer == tokenizer
    assert lm.metrics == {"n": [1, 2.5]}


@given(
    counts=st.tuples(st.integers(9, 60), st.integers(9, 60)),
    length=st.integers(1, 7),
    seed=st.integers(0, 2**64),
)
def test_no_window_crosses_the_split_and_every_target_comes_once(counts, length, seed):
    ids = np.arange(sum(counts))
    parts = tg.split_ids(ids, counts=counts)
    for part in parts:
        starts = tg.window_schedule(len(part), length, 5, 3, seed=seed)
        for inputs, targets in tg.WindowDataset(part, starts, length):
            assert set(inputs.ravel()) | set(targets.ravel()) <= set(part.tolist())
            np.testing.assert_array_equal(inputs + 1, targets)
    starts = np.arange(0, len(parts[0]) - length, length)
    seen = np.concatenate(
        [y.ravel() for _, y in tg.WindowDataset(parts[0], starts[:, None], length)]
    )
    np.testing.assert_array_equal(seen, parts[0][1 : len(seen) + 1])
    assert len(parts[0]) - 1 - len(seen) < length


@given(
    queries=st.integers(1, 7),
    start=st.integers(0, 9),
    window=st.integers(1, 12) | st.none(),
)
def test_masks_follow_their_definition(queries, start, window):
    i, j = start + np.arange(queries)[:, None], np.arange(start + queries)[None]
    expected = (j <= i) & (j > i - (window or 99))
    mask = to_numpy(causal_mask(i[:, 0], j[0], window)).astype(bool)
    np.testing.assert_array_equal(mask, expected)
    assert mask.any(-1).all()


extreme = st.floats(width=32) | st.sampled_from([0.0, 3e38, -3e38, np.inf, -np.inf])


@pytest.mark.backend
@given(data=st.data())
@settings(max_examples=EXAMPLES)
def test_draws_are_allowed_whatever_the_logits(data):
    logits = np.array(data.draw(st.lists(extreme, min_size=5, max_size=5)), "float32")
    allowed = data.draw(st.lists(st.integers(0, 4), min_size=1))
    config = SamplingConfig(
        allowed_tokens=allowed,
        temperature=data.draw(st.sampled_from([0.0, 1e-30, 1.0, 1e30])),
        repetition_penalty=data.draw(st.sampled_from([None, 1.5, 1e30])),
        top_k=data.draw(st.sampled_from([None, 1, 3])),
        top_p=data.draw(st.sampled_from([None, 1e-6, 0.5])),
        min_p=data.draw(st.sampled_from([None, 0.3, 1.0])),
    )
    uniforms = np.array([0.0, 0.5, np.nextafter(np.float32(1), 0)], "float32")
    tokens = sample(
        ops.convert_to_tensor(np.stack([logits] * 3)),
        ops.convert_to_tensor(np.tile(np.arange(5) % 2 == 0, (3, 1))),
        ops.convert_to_tensor(uniforms),
        config.tensors(5),
    )
    assert set(ops.convert_to_numpy(tokens).tolist()) <= set(allowed)


@pytest.mark.backend
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32"])
def test_padded_rows_and_large_scores_stay_finite(policy):
    """One row has nothing to read; the scores of the other are in the thousands."""
    layer = CausalMultiHeadAttention(2, positions="alibi", dtype=policy)
    x = np.random.default_rng(0).normal(size=(2, 5, 8)) * 30
    padding = np.array([[False] * 5, [True] * 5])
    outputs, weights = layer(
        ops.convert_to_tensor(x.astype("float32")),
        mask=padding,
        return_attention_scores=True,
    )
    assert np.isfinite(to_numpy(outputs)).all()
    assert np.all(to_numpy(weights)[0] == 0)
    np.testing.assert_allclose(to_numpy(weights)[1].sum(-1), 1.0, atol=1e-3)


def test_the_smallest_sizes_train_and_generate():
    """A batch, a window, a head and a width of one; a vocabulary of one or two."""
    config = tg.TrainConfig(
        steps=2, batch_size=1, learning_rate=0.1, jit_compile=False, schedule="constant"
    )
    model = tg.build_gpt(tg.GPTConfig(2, 1, 1, 1, hidden_dim=1))
    result = tg.train(model, [0, 1, 1], [0, 1], config, verbose=False)
    assert np.isfinite(result.best_valid_loss)
    assert len(tg.generate(model, [0], 3, use_cache=False)) == 4
    alone = tg.build_gpt(tg.GPTConfig(1, 1, 1, 1, hidden_dim=1))
    assert tg.generate(alone, [0], 3, use_cache=False).tolist() == [0] * 4
    assert tg.evaluate(alone, [0] * 9).nats == 0.0


def test_a_spike_of_the_rate_or_of_the_gradient_is_survived():
    config = tg.TrainConfig(
        steps=8,
        batch_size=2,
        validate_every=4,
        learning_rate=100.0,
        schedule="constant",
        warmup_steps=0,
        jit_compile=False,
        restore_best=False,
    )
    model = tg.build_gpt(tg.GPTConfig(3, 5, 1, 1, hidden_dim=4))
    model.get_layer("head").kernel.assign(np.full((4, 3), 1e4, "float32"))
    ids = np.arange(60) % 3
    result = tg.train(model, ids, ids, config, verbose=False)
    assert all(np.isfinite(row["valid_loss"]) for row in result.history)
    for weight in model.weights:
        assert np.isfinite(keras.ops.convert_to_numpy(weight)).all()


def test_a_long_repeated_text():
    model = tg.build_gpt(tg.GPTConfig(3, 5, 1, 1, hidden_dim=4))
    ids = np.zeros(20_000, "uint8")
    assert np.isfinite(tg.evaluate(model, ids).nats)
    tokens = tg.generate(model, ids, 3, temperature=0.0, use_cache=False)
    assert len(tokens) == 20_003
