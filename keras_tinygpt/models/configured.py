"""What the models share: a functional Keras model that is saved as its config."""

import dataclasses
import warnings
from typing import Any, ClassVar

import keras


class ConfiguredModel(keras.Model):
    """A functional model rebuilt from a config dataclass, a seed and a dtype policy.

    Subclasses set `config_class` and build the graph in `__init__(config, seed, dtype,
    name)`, ending with `_set_up`.

    Attributes:
        predicts_next_tokens: whether logits are those of the next token and depend on
            earlier ones alone, as training, scoring and continuing texts need it.
    """

    config_class: ClassVar[type]
    predicts_next_tokens: ClassVar[bool] = True
    _partly_quantized: bool = False

    def _set_up(self, config: Any, seed: int, policy: Any) -> None:
        self.config = config
        self.seed = seed
        self.dtype_policy = policy

    @property
    def quantization(self) -> str | None:
        """The mode of an earlier `quantize(mode)`, such as "int8"."""
        layers = self._flatten_layers(include_self=False)
        modes = (getattr(layer, "quantization_mode", None) for layer in layers)
        return next(filter(None, modes), None)

    def quantize(self, mode, **options):
        """Quantizes the matrices, see `keras.Model.quantize`; norms stay.

        A model quantized with `filters` cannot be saved.
        """
        self._partly_quantized = options.get("filters") is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*does not have a `quantize` method")
            super().quantize(mode, **options)

    def get_config(self):
        """What a .keras file stores of the graph."""
        if self._partly_quantized:
            raise ValueError(
                "a model quantized with filters cannot be saved or copied: its config "
                "holds the mode alone"
            )
        return {
            "quantization": self.quantization,
            "config": dataclasses.asdict(self.config),
            "seed": self.seed,
            "dtype": keras.saving.serialize_keras_object(self.dtype_policy),
            "name": self.name,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Builds the graph again; ValueError for fields this version does not know."""
        config = dict(config)
        config["config"] = cls.config_class(**config["config"])
        config["dtype"] = keras.saving.deserialize_keras_object(config["dtype"])
        quantization = config.pop("quantization", None)
        model = cls(**config)
        if quantization is not None:
            model.quantize(quantization)
        return model


def check_predicts_next_tokens(model: keras.Model) -> None:
    """Raises ValueError for a model of this package that does something else."""
    if not getattr(model, "predicts_next_tokens", True):
        raise ValueError(
            "model must predict the next token of a text (build_gpt, build_lstm), "
            f"got {type(model).__name__}"
        )


def count_tokens(model: keras.Model) -> int:
    """The number of token ids a model reads: its config's, else its logits'."""
    config = getattr(model, "config", None)
    return getattr(config, "vocab_size", None) or model.output_shape[-1]


def resolve_policy(dtype: Any) -> Any:
    """The Keras dtype policy meant by `dtype`; None means the global one."""
    return keras.dtype_policies.get(dtype or keras.config.dtype_policy())
