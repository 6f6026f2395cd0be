"""The mini study: tiny Shakespeare, counts against an LSTM against a GPT.

The first 1,000,000 characters train, the next 55,000 validate, the rest tests. Every
row states its budget: quick ones of 1,500 steps of 16 windows, an LSTM at a constant
rate for 2,000 steps of 64, and the shared loop of 3,000 steps of 64. The `tiny` GPT is
this package's own recipe under the budget of the last. It and the LSTM run again with
half of their windows from copies of the training part whose speakers have other names:
the test part holds a play whose names no model has seen.
"""

import dataclasses

from keras_tinygpt.studies.recipes import recipe
from keras_tinygpt.studies.study import Study, Variant
from keras_tinygpt.text.corpus import SHAKESPEARE_NAME

CONSTANT_RATE = 0.004  # of the LSTM without a decay; not searched
QUICK_GPT = {"learning_rate": 0.008, "beta_2": 0.99}  # the best of 600 updates
RENAMED = ", invented names"
RENAMED_COPIES = 12  # half as often as 3,000 steps read the training part
SPLIT = (1_000_000.0, 55_000.0, 60_394.0)
NANOGPT_SPLIT = (1_003_854.0, 111_540.0)


def mini_study() -> Study:
    """Returns the study on tiny Shakespeare; the split needs a text of its length."""
    gpt, lstm, tiny = (
        recipe("gpt", "mini"),
        recipe("lstm", "mini"),
        recipe("gpt", "tiny"),
    )
    constant = dataclasses.replace(
        lstm.training, steps=2000, schedule="constant", learning_rate=CONSTANT_RATE
    )
    rows = [
        ("mini GPT", gpt.model, gpt.training),
        ("mini LSTM", lstm.model, lstm.training),
        ("mini LSTM, constant rate", lstm.model, constant),
    ]
    for name, base, changes in (
        ("mini GPT, quick", gpt, QUICK_GPT),
        ("mini LSTM, quick", lstm, {}),
    ):
        quick = dataclasses.replace(base.training, steps=1500, batch_size=16, **changes)
        rows.append((name, base.model, quick))
    rows.append(("tiny GPT", tiny.model, tiny.training))
    variants = [Variant(*row, "mixed_bfloat16") for row in rows]
    variants += [
        dataclasses.replace(
            variant, name=variant.name + RENAMED, renamed_copies=RENAMED_COPIES
        )
        for variant in variants
        if variant.name in ("mini LSTM", "tiny GPT")
    ]
    return Study(
        name="mini",
        title="Tiny Shakespeare",
        corpus=SHAKESPEARE_NAME,
        split=SPLIT,
        variants=tuple(variants),
        scored=("valid", "test"),
        method=None,
        prompt="ROMEO:\n",
    )


def nanogpt_study() -> Study:
    """Returns the study on the split of nanoGPT's headline: 1.4697, 10.6 M weights.

    Its second part is what the result is scored on, so the last weights count, not
    those that read it best.
    """
    mini = mini_study()
    variants = [
        dataclasses.replace(
            variant,
            training=dataclasses.replace(variant.training, restore_best=False),
        )
        for variant in mini.variants
        if variant.name in ("mini GPT", "tiny GPT", "tiny GPT" + RENAMED)
    ]
    return dataclasses.replace(
        mini,
        name="nanogpt",
        title="Tiny Shakespeare, nanoGPT's split",
        split=NANOGPT_SPLIT,
        variants=tuple(variants),
        scored=("valid",),
    )
