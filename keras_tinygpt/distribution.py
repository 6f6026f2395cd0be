"""More devices: which matrices go where on JAX, and what a batch must divide into.

On JAX, `keras.distribution` spreads batches over devices, and matrices too where a
layout says so. The layout here is that of Megatron: the projections into heads and into
the feed-forward layer are cut by columns, those out of them by rows, so that a block
needs two sums over the devices. On TensorFlow, `train` follows the tf.distribute
strategy that the model was built in. `examples/DISTRIBUTED.md` shows both.

Reference: Shoeybi et al., 2019, section 3.
"""

import contextlib
from collections.abc import Sequence

import keras

from keras_tinygpt.checks import check_int
from keras_tinygpt.models import GPTConfig, LSTMConfig

BATCH, MODEL = "batch", "model"
# By the end of a variable's path; what is not here is copied to every device. Each
# cuts a dimension of the model: a vocabulary seldom divides.
LAYOUT: dict[str, tuple[str | None, ...]] = {
    r"(token|position)_embedding/embeddings": (None, MODEL),
    r".*attention/(query_key_value|query|key|value)/kernel": (None, MODEL),
    r".*attention/(query_key_value|query|key|value)/bias": (MODEL,),
    r".*attention/output/kernel": (MODEL, None),
    r".*feed_forward/(intermediate|gate)/kernel": (None, MODEL),
    r".*feed_forward/(intermediate|gate)/bias": (MODEL,),
    r".*feed_forward/output/kernel": (MODEL, None),
    r"lstm_\d+/.*kernel": (None, MODEL),
    r"lstm_\d+/.*bias": (MODEL,),
    r"head/kernel": (MODEL, None),
}


def make_distribution(
    config: GPTConfig | LSTMConfig,
    model_shards: int = 1,
    devices: Sequence[str] | None = None,
) -> keras.distribution.DataParallel | keras.distribution.ModelParallel:
    """A distribution for `keras.distribution.set_distribution`, on the JAX backend.

    Set it before the model is built. Batches are cut into one part for every
    `model_shards` devices; each group of that many devices holds one copy of the model.

    Args:
        config: of the model that will be built.
        model_shards: devices that share each matrix; 1 copies the model to all.
        devices: names as from `keras.distribution.list_devices()`; None means all.

    Raises:
        ValueError: the devices or the model's widths do not divide by `model_shards`.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"keras.distribution needs the jax backend, got {keras.backend.backend()}"
        )
    devices = list(devices or keras.distribution.list_devices())
    check_int("model_shards", model_shards)
    for name, size in {"number of devices": len(devices), **_widths(config)}.items():
        if size % model_shards:
            raise ValueError(
                f"model_shards must divide the {name} {size}, got {model_shards}"
            )
    if model_shards == 1:
        return keras.distribution.DataParallel(devices=devices)
    shape = (len(devices) // model_shards, model_shards)
    mesh = keras.distribution.DeviceMesh(shape, (BATCH, MODEL), devices)
    layout = keras.distribution.LayoutMap(mesh)
    for path, axes in LAYOUT.items():
        layout[path] = axes
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name=BATCH)


def _widths(config: GPTConfig | LSTMConfig) -> dict[str, int]:
    """The dimensions that a layout cuts."""
    widths = {"hidden_dim": config.hidden_dim}
    if isinstance(config, LSTMConfig):
        return widths | {"embedding_dim": config.embedding_dim or config.hidden_dim}
    kv_heads = config.num_kv_heads or config.num_heads
    heads = config.num_heads + 2 * kv_heads
    wide = config.intermediate_dim or 4 * config.hidden_dim
    return widths | {
        "intermediate_dim": wide,
        "width of queries, keys and values": heads * config.head_dim,
    }


def check_strategy(model: keras.Model) -> None:
    """Raises ValueError for a strategy that Keras' own fit does not run under."""
    if keras.backend.backend() != "tensorflow":
        return
    import tensorflow as tf

    if isinstance(model.distribute_strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            "train needs a strategy that Keras' fit runs under, got "
            "MultiWorkerMirroredStrategy (examples/train_cluster.py trains with it)"
        )


def strategy_scope(model: keras.Model) -> contextlib.AbstractContextManager:
    """The scope of the tf.distribute strategy that the model was built in."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def summing_optimizer(cls: type[keras.optimizers.Optimizer]) -> type:
    """The optimizer class, with gradients averaged over the replicas of TensorFlow.

    Keras clips the gradients of each replica and sums them afterwards. Averaged before,
    and clipped at the norm's share, their sum is the clipped gradient of the batch.
    """
    import tensorflow as tf

    class SummingOptimizer(cls):
        def apply(self, grads, trainable_variables=None):
            replica = tf.distribute.get_replica_context()
            grads = replica.all_reduce(tf.distribute.ReduceOp.MEAN, grads)
            return super().apply(grads, trainable_variables)

    return SummingOptimizer


def count_replicas(model: keras.Model) -> int:
    """Parts that each batch of `fit` is cut into; 1 without a distribution."""
    if keras.backend.backend() == "tensorflow":
        return model.distribute_strategy.num_replicas_in_sync
    distribution = keras.distribution.distribution()
    return 1 if distribution is None else distribution.num_model_replicas
