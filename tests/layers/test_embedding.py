"""Token tables: ids that come again count as one, on every backend."""

import keras
import numpy as np
import pytest
from helpers import JIT, to_numpy

import keras_tinygpt as tg
from keras_tinygpt.layers.embedding import Embedding, ReversibleEmbedding

pytestmark = pytest.mark.backend
RATE = 0.1


@pytest.mark.parametrize("clip_norm", [None, 1e-3])
@pytest.mark.parametrize("cls", [Embedding, ReversibleEmbedding])
def test_the_first_step_of_adam_is_the_rate_however_often_an_id_comes(cls, clip_norm):
    """Its moments are those of the sum: `g / sqrt(g**2)` is 1."""
    tokens = keras.Input((None,), dtype="int32")
    layer = cls(5, 3)
    mean = keras.layers.GlobalAveragePooling1D()(layer(tokens))
    model = keras.Model(tokens, mean)
    optimizer = keras.optimizers.Adam(RATE, epsilon=1e-9, global_clipnorm=clip_norm)
    model.compile(optimizer, "mse", jit_compile=JIT)
    before = to_numpy(layer.embeddings)
    model.train_on_batch(np.array([[1, 1, 1, 1, 2]]), np.full((1, 3), 9.0))
    moved = to_numpy(layer.embeddings) - before
    np.testing.assert_allclose(moved[1:3], RATE, rtol=1e-3)
    np.testing.assert_allclose(moved[[0, 3, 4]], 0.0, atol=1e-9)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="others know no sparse gradients"
)
@pytest.mark.parametrize(
    "model",
    [
        lambda: tg.build_gpt(tg.GPTConfig(7, 5, 1, 1, hidden_dim=4)),
        lambda: tg.build_gpt(tg.GPTConfig(7, 5, 1, 1, hidden_dim=4), dtype="bfloat16"),
        lambda: tg.build_gpt(
            tg.GPTConfig(7, 5, 1, 1, hidden_dim=4, tie_embeddings=True)
        ),
        lambda: tg.build_lstm(tg.LSTMConfig(7, hidden_dim=4, embedding_dim=3)),
    ],
)
def test_no_gradient_is_sparse(model):
    import tensorflow as tf

    model = model()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(np.ones((2, 5), "int32")) ** 2)
    for gradient in tape.gradient(loss, [v.value for v in model.trainable_variables]):
        assert isinstance(gradient, tf.Tensor)
