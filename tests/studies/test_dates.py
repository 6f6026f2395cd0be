"""Tests of keras_tinygpt.studies.dates and keras_tinygpt.studies.translation."""

import datetime
import types

import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt.studies import translation
from keras_tinygpt.studies.dates import (
    FORMS,
    HELD_OUT,
    PAD,
    SOURCE_LENGTH,
    START,
    TARGET_LENGTH,
    DateDataset,
    allowed_tokens,
    is_date,
    make_tokenizer,
    next_characters,
    problems,
    write_date,
)
from keras_tinygpt.studies.translation import make_model, translate


def test_dates_by_hand():
    written = [write_date(datetime.date(2021, 3, 7), form) for form in FORMS]
    assert written == [
        "March 7, 2021",
        "7 March 2021",
        "Mar 7, 2021",
        "Sunday, March 7, 2021",
        "the 7th of March, 2021",
        "7.3.2021",
        "3/7/2021",
    ]


def test_ordinals():
    endings = {
        day: write_date(datetime.date(2021, 1, day), FORMS[4]).split()[1][-2:]
        for day in range(1, 32)
    }
    special = {1: "st", 21: "st", 31: "st", 2: "nd", 22: "nd", 3: "rd", 23: "rd"}
    assert endings == {day: special.get(day, "th") for day in range(1, 32)}


@pytest.mark.parametrize("held_out", [False, True])
def test_problems_keep_to_their_days(held_out):
    sources, targets = problems(400, seed=3, held_out=held_out)
    assert (sources, targets) == problems(400, seed=3, held_out=held_out)
    assert sources != problems(400, seed=4, held_out=held_out)[0]
    for source, target in zip(sources, targets, strict=True):
        date = datetime.date.fromisoformat(target)
        assert source in [write_date(date, form) for form in FORMS]
        assert (date.toordinal() % HELD_OUT == 0) == held_out
        assert len(source) <= SOURCE_LENGTH and 1600 <= date.year <= 2399
    make_tokenizer().encode("".join(sources + targets))  # knows every character


def test_next_characters_lead_to_every_date_and_to_nothing_else():
    """A date is allowed character by character if and only if it is one."""

    def is_allowed(text):
        return all(text[i] in next_characters(text[:i]) for i in range(len(text)))

    for year in ("1900", "2000", "2021", "2024", "0001", "0000", "9999"):
        for month in range(14):
            for day in range(33):
                text = f"{year}-{month:02}-{day:02}"
                assert is_allowed(text) == is_date(text), text
    assert next_characters("2023-02-") == "012"
    assert next_characters("2023-02-2") == "012345678"
    assert next_characters("2024-02-2") == "0123456789"
    assert next_characters("2024-1") == "012"


@pytest.mark.parametrize("text", ["2021-3-07", "20210307", "2021-W09-7", "", "x"])
def test_what_is_no_date(text):
    assert not is_date(text)


def test_batches_by_hand():
    tokenizer = make_tokenizer()
    assert tokenizer.encode(PAD + START).tolist() == [0, 1]
    sources, targets = problems(3, seed=5 * 10**6 + 2)
    (source, inputs), outputs = DateDataset(4, 3, seed=5)[2]
    assert [tokenizer.decode(row).rstrip(PAD) for row in source] == sources
    assert source.shape == (3, SOURCE_LENGTH)
    assert [tokenizer.decode(row) for row in outputs] == targets
    assert [tokenizer.decode(row) for row in inputs] == [
        START + target[:-1] for target in targets
    ]
    texts, following, weights = DateDataset(4, 3, seed=5, as_prefix=True)[2]
    assert texts.shape == (3, SOURCE_LENGTH + TARGET_LENGTH)
    for row in range(3):
        counted = following[row][weights[row] == 1.0]
        assert tokenizer.decode(counted) == targets[row]
        whole = tokenizer.decode(texts[row]) + tokenizer.decode(following[row][-1:])
        assert whole.rstrip(PAD) == sources[row] + START + targets[row]


def test_the_models_are_of_one_size():
    sizes = [make_model(kind).count_params() for kind in ("encoder-decoder", "GPT")]
    assert abs(sizes[0] - sizes[1]) < 0.01 * sizes[0]


@pytest.mark.parametrize(
    "kind", ["encoder-decoder", pytest.param("GPT", marks=pytest.mark.slow)]
)
def test_an_untrained_model_held_to_dates_writes_nothing_else(kind):
    """Whatever is drawn; freely it writes none."""
    untrained, (sources, _) = make_model(kind, seed=1), problems(13, seed=1)
    for settings in ({}, {"temperature": 2.0, "seed": 3}):
        written = translate(untrained, sources, only_dates=True, **settings)
        assert all(map(is_date, written)), written
    assert len(set(written)) > 10
    assert not any(map(is_date, translate(untrained, sources)))


def test_beams_held_to_dates():
    tokenizer, model = make_tokenizer(), make_model("encoder-decoder", seed=1)
    best, nats = tg.beam_search(
        model,
        tokenizer.encode(START),
        TARGET_LENGTH,
        num_beams=3,
        allowed_tokens=allowed_tokens(tokenizer),
        source_ids=tokenizer.encode("7.3.2021"),
    )
    assert is_date(tokenizer.decode(best[1:])) and nats < 0


@pytest.mark.slow
def test_the_study_ends_with_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "TESTED", 5)
    options = types.SimpleNamespace(seeds=1, steps=2)
    results = translation.dates_results(options, tmp_path)
    assert [row[0] for row in results["rows"]] == [
        "encoder-decoder, untrained",
        "encoder-decoder",
        "GPT",
    ]
    assert all(len(row) == len(results["columns"]) for row in results["rows"])
    assert all(row[-1] == "100.0%" for row in results["rows"])  # held to dates
    (path,) = translation.draw_dates(results, tmp_path, tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_dates_are_learned_and_the_reading_moves_with_the_writing():
    """99 of 100 dates never trained on; years are read where years stand."""
    model = translation.train_on_dates(make_model("encoder-decoder"))
    shares = translation.measure(model)
    assert shares["exact, free"] >= 0.99
    tokenizer, source = make_tokenizer(), "Thursday, March 11, 2021"
    maps = tg.inspection.attention_maps(
        model, tokenizer.encode(START + "2021-03-1"), tokenizer.encode(source)
    )
    mean = maps.cross_weights.mean(axis=(0, 1))  # (10, 24)
    parts = {"year": slice(0, 4), "month": slice(5, 7), "day": slice(8, 10)}
    places = {"year": slice(20, 24), "month": slice(10, 15), "day": slice(16, 18)}
    for part, rows in parts.items():
        read = {
            name: mean[rows, columns].sum(-1).mean() for name, columns in places.items()
        }
        assert max(read, key=read.get) == part, (part, read)
    assert np.isfinite(mean).all()
