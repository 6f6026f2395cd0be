"""One cached step of a model as a TensorFlow function with its weights inside.

The converters in `formats` start from these functions. Their inputs are those of the
steppers, as flat named tensors: tokens (B, C), index, last, row_offsets (B,) and the
state; the outputs are logits (B, V) and, with the prefix `new_`, the state.
"""

from typing import Any

import keras

from keras_tinygpt.export.source import float32_copy
from keras_tinygpt.generation.steppers import make_stepper


class StepGraphs:
    """TensorFlow functions of one cached step.

    Args:
        model: from `build_gpt` or `build_lstm`, under the TensorFlow backend.

    Attributes:
        stepper: the cached steps of a float32 copy of `model`.
        state_shapes: shape of each state tensor for one row, by name. More rows are
            more of the first axis.
    """

    def __init__(self, model: keras.Model):
        self.stepper = make_stepper(float32_copy(model))
        state = self.stepper.initial_state(1)
        self.state_shapes = {name: list(x.shape) for name, x in state.items()}
        variables = self.stepper.model.variables
        self._values = [(x, keras.ops.convert_to_numpy(x)) for x in variables]

    def signature(self, batch_size: int | None, length: int | None) -> list:
        """`tf.TensorSpec`s of the inputs; None stands for any size."""
        import tensorflow as tf

        specs = [
            tf.TensorSpec((batch_size, length), tf.int32, "tokens"),
            tf.TensorSpec((), tf.int32, "index"),
            tf.TensorSpec((), tf.int32, "last"),
            tf.TensorSpec((batch_size,), tf.int32, "row_offsets"),
        ]
        for name, (rows, *shape) in self.state_shapes.items():
            rows = None if batch_size is None else batch_size * rows
            specs.append(tf.TensorSpec((rows, *shape), tf.float32, name))
        return specs

    def function(self, batch_size: int | None, length: int | None) -> Any:
        """The step as a `tf.function` of those inputs."""
        import tensorflow as tf

        signature = self.signature(batch_size, length)

        @tf.function(input_signature=signature, autograph=False)
        def step(tokens, index, last, row_offsets, *state):
            state = dict(zip(self.state_shapes, state, strict=True))
            constants = [(x, tf.constant(value)) for x, value in self._values]
            with keras.StatelessScope(state_mapping=constants):
                logits, state = self.stepper(tokens, index, last, row_offsets, state)
            state = {f"new_{name}": value for name, value in state.items()}
            return {"logits": logits, **state}

        return step

    def describe(self, batch_size: int | None, length: int | None) -> dict:
        """Names, dtypes and shapes of inputs and outputs, as JSON can hold them."""
        inputs = {
            spec.name: {"dtype": spec.dtype.name, "shape": spec.shape.as_list()}
            for spec in self.signature(batch_size, length)
        }
        logits = [batch_size, self.stepper.config.vocab_size]
        outputs = {"logits": {"dtype": "float32", "shape": logits}}
        outputs |= {f"new_{name}": inputs[name] for name in self.state_shapes}
        return {"inputs": inputs, "outputs": outputs}
