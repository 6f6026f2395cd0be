"""Tables of vectors whose gradient is summed before an optimizer sees it."""

import keras
from keras import ops

from keras_tinygpt.layers.dense import Quantizable


def take_rows(table, ids):
    """Rows of a float table (V, D) for int ids (...): (..., D).

    On TensorFlow the gradient of a lookup has one entry for every id, those that come
    again included, and Keras (3.15) squares the entries for Adam and for the norm that
    is clipped before it sums them. Behind a product they are summed first, as on the
    other backends.
    """
    if keras.backend.backend() == "tensorflow":
        table = table * 1.0
    return ops.take(table, ids, axis=0)


def _look_up(layer: keras.layers.Embedding, ids):
    rows = take_rows(layer.embeddings, ops.cast(ids, "int32"))
    return ops.cast(rows, layer.compute_dtype)


# Files of weights name layers after their class, so these are called as in Keras.


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class Embedding(Quantizable, keras.layers.Embedding):
    """`keras.layers.Embedding` that trains alike on every backend.

    Args and call arguments: as for `keras.layers.Embedding`.
    """

    def call(self, inputs):
        return _look_up(self, inputs)


@keras.saving.register_keras_serializable(package="keras_tinygpt")
class ReversibleEmbedding(Quantizable, keras.layers.ReversibleEmbedding):
    """`keras.layers.ReversibleEmbedding` that trains alike on every backend.

    Args and call arguments: as for `keras.layers.ReversibleEmbedding`.
    """

    def call(self, inputs, reverse=False):
        if reverse:
            return super().call(inputs, reverse=True)
        return _look_up(self, inputs)
