"""NumPy's Philox numbers as a TensorFlow graph.

The same numbers as `keras_tinygpt.generation.draw_uniforms`, bit for bit, so that an
exported model gives the text the package gives for a seed.

Reference: Salmon et al., 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
"""

import tensorflow as tf

ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
LOW = 0xFFFFFFFF
PER_BLOCK = 8  # 32-bit numbers in a block of four 64-bit words


def draw_uniforms(seed, rows, count):
    """Returns float32 (rows, count) numbers in [0, 1); row r has the key seed + r.

    Args:
        seed: int64 scalar; a negative one stands for seed + 2**64.
        rows: int32 scalar.
        count: int32 scalar.
    """
    blocks = (count + PER_BLOCK - 1) // PER_BLOCK
    keys = tf.bitcast(seed, tf.uint64) + tf.cast(tf.range(rows), tf.uint64)
    counters = tf.cast(tf.range(blocks), tf.uint64) + _word(1)  # NumPy starts at 1
    zeros = tf.zeros(tf.stack([rows, blocks]), tf.uint64)
    words = _philox(
        [zeros + counters, zeros, zeros, zeros], [tf.expand_dims(keys, 1), _word(0)]
    )
    halves = []
    for word in words:  # the lower half comes first; the upper 24 bits are used
        halves.append(_and(_right(word, 8), 0xFFFFFF))
        halves.append(_right(word, 40))
    bits = tf.reshape(tf.stack(halves, axis=-1), tf.stack([rows, -1]))
    return tf.cast(bits[:, :count], tf.float32) * 2.0**-24


def _philox(words, keys):
    """Philox 4x64: four uint64 tensors from four counters and two keys."""
    for _ in range(ROUNDS):
        high_0, low_0 = _multiply(MULTIPLIERS[0], words[0])
        high_2, low_2 = _multiply(MULTIPLIERS[1], words[2])
        words = [
            _xor(_xor(high_2, words[1]), keys[0]),
            low_2,
            _xor(_xor(high_0, words[3]), keys[1]),
            low_0,
        ]
        keys = [key + _word(step) for key, step in zip(keys, KEY_STEPS, strict=True)]
    return words


def _multiply(constant: int, word):
    """The upper and the lower 64 bits of a product of 64-bit numbers."""
    constant_high, constant_low = _word(constant >> 32), _word(constant & LOW)
    word_high, word_low = _right(word, 32), _and(word, LOW)
    middle = constant_high * word_low + _right(constant_low * word_low, 32)
    cross = constant_low * word_high + _and(middle, LOW)
    high = constant_high * word_high + _right(middle, 32) + _right(cross, 32)
    return high, _word(constant) * word


def _word(value: int):
    return tf.constant(value, tf.uint64)


def _and(word, mask: int):
    return tf.bitwise.bitwise_and(word, _word(mask))


def _xor(first, second):
    return tf.bitwise.bitwise_xor(first, second)


def _right(word, bits: int):
    return tf.bitwise.right_shift(word, _word(bits))
