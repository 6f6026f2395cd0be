"""An LSTM layer that is fast on PyTorch's CPU path too."""

import keras
from keras import ops


# The model has the same name; that of the class is part of the layout of saved weights.
@keras.saving.register_keras_serializable(package="keras_tinygpt", name="LSTMLayer")
class LSTM(keras.layers.LSTM):
    """`keras.layers.LSTM`, which on PyTorch runs the backend's own recurrence.

    Keras steps through the sequence in Python there. PyTorch orders the gates as Keras
    does, so the weights are used as they are. Masked sequences, and all other
    backends, take the usual path.

    Args and call arguments: as for `keras.layers.LSTM`, with the default activations
    and `return_sequences=True, return_state=True`.
    """

    def call(self, sequences, initial_state=None, mask=None, training=False):
        if keras.backend.backend() != "torch" or mask is not None:
            return super().call(
                sequences, initial_state=initial_state, mask=mask, training=training
            )
        import torch

        cell = self.cell
        if initial_state is None:
            initial_state = self.get_initial_state(ops.shape(sequences)[0])
        hidden, state = (
            ops.expand_dims(ops.cast(x, self.compute_dtype), 0) for x in initial_state
        )
        bias = ops.cast(cell.bias, self.compute_dtype)
        weights = [
            ops.cast(ops.transpose(cell.kernel), self.compute_dtype),
            ops.cast(ops.transpose(cell.recurrent_kernel), self.compute_dtype),
            bias,
            ops.zeros_like(bias),  # PyTorch has a second one
        ]
        outputs, hidden, state = torch.lstm(
            ops.cast(sequences, self.compute_dtype),
            (hidden, state),
            weights,
            has_biases=True,
            num_layers=1,
            dropout=0.0,
            train=training,
            bidirectional=False,
            batch_first=True,
        )
        return outputs, hidden[0], state[0]
