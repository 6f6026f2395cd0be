"""The generation engine as one TensorFlow graph.

The package drives compiled loops from Python; here graph loops drive the same ones,
for any number of rows, prompt columns and new tokens. XLA compiles them once per number
of rows.
"""

import keras
import tensorflow as tf

from keras_tinygpt.generation.engine import LOOP, Engine

GROUPS, ROWS_PER_GROUP = 4, 4  # how many at once, and the fewest rows worth one


def check(condition, rule: str, *values):
    """An op that fails with `rule` and int32 or string `values` unless all is true."""
    return tf.debugging.Assert(tf.reduce_all(condition), [rule, *values])


class GraphEngine:
    """Reads prompts and continues them, inside a graph.

    Attributes:
        window: most tokens the model reads; None for an LSTM.
        vocab_size: V.
        stepper: the model that reads a few tokens at a time.
    """

    def __init__(self, model: keras.Model):
        self._engine = Engine(model, None)
        self.stepper = self._engine.stepper
        self.window, self.vocab_size = self.stepper.window, self._engine.vocab_size
        self._segment_size = self.stepper.segment
        self._feed = tf.function(self._engine.feed, jit_compile=True, autograph=False)

    def step(self, tokens, index, row_offsets, state):
        """Reads one token (B,) of each row; returns logits (B, V) and the state."""
        return self._engine.one_step(tokens, index, row_offsets, state)

    def read(self, tokens, row_offsets):
        """Reads rows of any length in segments; returns logits (B, V) and the state."""
        length, segments = tf.shape(tokens)[1], self._whole_segments(tokens)

        def read_segment(start, logits, state):
            size = tf.minimum(length - start, self._segment_size)
            columns = self._segment(segments, start)
            outputs = self._feed(columns, start, size, row_offsets, state)
            return start + self._segment_size, *outputs

        rows = tf.shape(tokens)[0]
        logits = tf.zeros([rows, self.vocab_size])
        _, logits, state = tf.while_loop(
            lambda start, *rest: start < length,
            read_segment,
            (0, logits, self.stepper.initial_state(rows)),
        )
        return logits, state

    def extend(self, tokens, row_offsets, uniforms, settings, stop):
        """Chooses the tokens that follow each row, with `context="crop"`.

        Rows are independent: many of them are cut into groups that run side by side.

        Args:
            tokens: int32 (B, T), padded on the left.
            row_offsets: int32 (B,), the padding of each row.
            uniforms: float32 (B, N), one for each new token.
            settings: what `sampling.sample` takes.
            stop: int32 (n,); may be empty.

        Returns:
            int32 (B, N); what comes after `stop` has no meaning.
        """
        rows, size = tf.shape(tokens)[0], -(-tf.shape(tokens)[0] // GROUPS)

        def extend_group(start):
            places = tf.minimum(tf.range(start, start + size), rows - 1)
            parts = (tf.gather(x, places) for x in (tokens, row_offsets, uniforms))
            return self._extend(*parts, settings, stop)

        def extend_groups():
            groups = [extend_group(index * size) for index in range(GROUPS)]
            return tf.concat(groups, axis=0)[:rows]  # the last one may be filled up

        return tf.cond(
            rows >= GROUPS * ROWS_PER_GROUP,
            extend_groups,
            lambda: self._extend(tokens, row_offsets, uniforms, settings, stop),
        )

    def _extend(self, tokens, row_offsets, uniforms, settings, stop):
        """`extend` for one group."""
        seen = self._seen(tokens, row_offsets)
        tokens, row_offsets = self._fit(tokens, row_offsets)
        count, length = tf.shape(uniforms)[1], tf.shape(tokens)[1]
        uniforms = tf.pad(uniforms, [[0, 0], [0, LOOP]])

        def open_loop(chosen, limit):
            """The next uniforms (B, LOOP) and how many of them to use."""
            done = tf.shape(chosen)[1]
            columns = tf.ensure_shape(uniforms[:, done : done + LOOP], (None, LOOP))
            return columns, tf.minimum(limit - done, LOOP)

        def unfinished(chosen, limit):
            done = tf.shape(chosen)[1]
            return (done < limit) & tf.reduce_any(before_stop(chosen, stop) >= done)

        chosen = tf.zeros_like(tokens[:, :0])
        cached = count  # how many tokens come before steps on the whole window
        if self.window is not None:
            cached = tf.minimum(count, self.window - length + 1)
        columns, size = open_loop(chosen, tf.maximum(cached, 1))
        chosen, seen, state = self._start(
            tokens, row_offsets, seen, columns, size, settings
        )

        def run(chosen, seen, state):
            columns, size = open_loop(chosen, cached)
            index = length + tf.shape(chosen)[1] - 1
            new, _, seen, state = self._engine.run_steps(
                chosen[:, -1], seen, index, row_offsets, state, columns, size, settings
            )
            return tf.concat([chosen, new[:, :size]], axis=1), seen, state

        chosen, seen, _ = _grow(
            lambda chosen, *rest: unfinished(chosen, cached), run, chosen, seen, state
        )
        if self.window is None:
            return _fill(chosen, count)

        def run_whole_windows(chosen, window, seen, row_offsets):
            columns, size = open_loop(chosen, count)
            start = self.stepper.initial_state(tf.shape(window)[0])
            new, _, *rest = self._engine.crop_steps(
                window, seen, row_offsets, start, columns, size, settings
            )
            return tf.concat([chosen, new[:, :size]], axis=1), *rest

        window = tf.pad(tf.concat([tokens, chosen], 1), [[0, 0], [self.window, 0]])
        window = tf.ensure_shape(window[:, -self.window :], (None, self.window))
        chosen, *_ = _grow(
            lambda chosen, *rest: unfinished(chosen, count),
            run_whole_windows,
            chosen,
            window,
            seen,
            tf.maximum(row_offsets - 1, 0),
        )
        return _fill(chosen, count)

    def _start(self, tokens, row_offsets, seen, uniforms, size, settings):
        """Reads the rows and chooses `size` tokens: (B, size), seen and state."""
        length = tf.shape(tokens)[1]
        last = tf.maximum(length - 1, 0) // self._segment_size * self._segment_size
        state = self.stepper.initial_state(tf.shape(tokens)[0])
        if self.window is None:  # otherwise one segment holds the window
            state = tf.cond(
                last > 0,
                lambda: self.read(tokens[:, :last], row_offsets)[1],
                lambda: state,
            )
        _, chosen, _, seen, state = self._engine.read_and_run(
            self._segment(self._whole_segments(tokens), last),
            last,
            length - last,
            row_offsets,
            state,
            seen,
            uniforms,
            size,
            settings,
        )
        return chosen[:, :size], seen, state

    def _fit(self, tokens, row_offsets):
        """Cuts padding that all rows share and what lies before the last window."""
        cut = tf.reduce_min(row_offsets)
        if self.window is not None:
            cut = tf.maximum(cut, tf.shape(tokens)[1] - self.window)
        return tokens[:, cut:], tf.maximum(row_offsets - cut, 0)

    def _seen(self, tokens, row_offsets):
        """Bool (B, V): the tokens that occur in each row."""
        columns = tf.range(tf.shape(tokens)[1])
        live = tf.where(columns >= row_offsets[:, None])  # (n, 2)
        rows, ids = tf.cast(live[:, :1], tf.int32), tf.gather_nd(tokens, live)
        places = tf.concat([rows, ids[:, None]], axis=1)
        shape = tf.stack([tf.shape(tokens)[0], self.vocab_size])
        return tf.scatter_nd(places, tf.ones_like(ids), shape) > 0

    def _whole_segments(self, tokens):
        """Padded on the right to a positive number of segments."""
        length = tf.shape(tokens)[1]
        whole = tf.maximum(-(-length // self._segment_size), 1) * self._segment_size
        return tf.pad(tokens, [[0, 0], [0, whole - length]])

    def _segment(self, segments, start):
        columns = segments[:, start : start + self._segment_size]
        return tf.ensure_shape(columns, (None, self._segment_size))


def before_stop(chosen, stop):
    """How many tokens of each row (B, n) come before the first `stop`; without it n."""
    count, size = tf.shape(chosen)[1], tf.size(stop)
    starts = tf.range(tf.maximum(count - size + 1, 0))
    pieces = tf.gather(chosen, starts[:, None] + tf.range(size), axis=1)
    found = tf.reduce_all(pieces == stop, axis=-1) & (size > 0)  # (B, starts)
    first = tf.reduce_min(tf.where(found, starts, count), axis=1)
    return tf.minimum(first, count)  # a minimum over no starts at all is a huge number


def _fill(chosen, count):
    """Columns cut or filled up to `count`."""
    missing = tf.maximum(count - tf.shape(chosen)[1], 0)
    return tf.pad(chosen, [[0, 0], [0, missing]])[:, :count]


def _grow(condition, body, chosen, *rest):
    """`tf.while_loop` over columns `chosen` that grow and values that do not."""
    shapes = tf.nest.map_structure(lambda value: value.shape, rest)
    shapes = (tf.TensorShape([None, None]), *shapes)
    return tf.while_loop(condition, body, (chosen, *rest), shape_invariants=shapes)
