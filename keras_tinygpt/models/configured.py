"""What the models share: a functional Keras model that is saved as its config."""

import dataclasses
from typing import Any, ClassVar

import keras


class ConfiguredModel(keras.Model):
    """A functional model rebuilt from a config dataclass, a seed and a dtype policy.

    Subclasses set `config_class` and build the graph in `__init__(config, seed, dtype,
    name)`, ending with `_set_up`.
    """

    config_class: ClassVar[type]

    def _set_up(self, config: Any, seed: int, policy: Any) -> None:
        self.config = config
        self.seed = seed
        self.dtype_policy = policy

    def get_config(self):
        """What a .keras file stores of the graph."""
        return {
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
        return cls(**config)


def resolve_policy(dtype: Any) -> Any:
    """The Keras dtype policy meant by `dtype`; None means the global one."""
    return keras.dtype_policies.get(dtype or keras.config.dtype_policy())
