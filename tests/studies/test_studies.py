"""Studies: runs that go on where they stopped, protocols, tables, figures."""

import dataclasses
import functools
import json
import shutil

import keras
import numpy as np
import pytest
from helpers import check_one_line_error as fails
from helpers import to_numpy

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.evaluation import Scores, losses_by_position, token_losses
from keras_tinygpt.studies import context, quality, reversal, study
from keras_tinygpt.studies.book import PROTOCOL, book_study
from keras_tinygpt.studies.command import draw_study
from keras_tinygpt.studies.mini import mini_study, nanogpt_study
from keras_tinygpt.studies.results import TABLES
from keras_tinygpt.studies.runs import Row
from keras_tinygpt.studies.study import Study, Variant, run_study, spread

TEXT = "the fox runs far and the fox rests; then the fox runs home again.\n" * 9
SHAPE = tg.GPTConfig(1, 8, 1, 2, hidden_dim=12)
BUDGET = tg.TrainConfig(steps=4, batch_size=3, validate_every=2, jit_compile=False)


@pytest.fixture
def small_study(tmp_path):
    (tmp_path / "fox.txt").write_text(TEXT)
    without = dataclasses.replace(SHAPE, positions="none")
    variants = (
        Variant("GPT, learned", SHAPE, BUDGET),
        Variant("GPT, no positions", without, BUDGET),
    )
    return Study(
        name="small",
        title="A small study",
        corpus=str(tmp_path / "fox.txt"),
        split=(0.8, 0.2),
        variants=variants,
        scored=("train", "valid"),
        method="windows",
        prompt="the ",
    )


@pytest.fixture
def untrained(monkeypatch):
    """Runs end at once, with the initial weights and made-up figures; their list."""
    runs = []

    def fit(run, parts, *, resume):
        assert resume
        runs.append((run.name, run.training.seed))
        build = tg.build_lstm if "LSTM" in run.name else tg.build_gpt
        model = build(run.config, seed=run.training.seed)
        row = {"step": 2, "loss": 2.0, "valid_loss": 2.5, "seconds": 1.0}
        return model, tg.TrainResult([row], 1.0, 9.0, 2, 2.5, "", tg.fingerprint(model))

    def score(run, model, result, parts, method):
        scores = {name: Scores.from_losses(2.0 * len(parts), 1) for name in parts}
        return Row(run.name, model.count_params(), 2, 1.0, scores)

    monkeypatch.setattr(study, "fit_run", fit)
    monkeypatch.setattr(study, "score_run", score)
    monkeypatch.setattr(study, "_sample", lambda model, tokenizer, prompt: prompt)
    return runs


def test_a_study_trains_scores_and_samples(small_study, tmp_path):
    results = run_study(small_study, tmp_path / "runs", only=["GPT, learned"])
    (row,) = results["rows"]
    assert set(row["scores"]) == {"train", "valid"}
    assert row["scores"]["valid"]["nats"] < np.log(30)
    assert [entry["step"] for entry in row["history"]] == [2, 4]
    assert row["sample"].startswith("the ") and len(row["sample"]) == 4 + 200
    saved = tg.load(tmp_path / "runs" / "gpt-learned-seed0")
    assert saved.metrics["scores"] == row["scores"]
    assert saved.metrics["fingerprints"] == row["fingerprints"]


def test_a_run_with_renamed_copies_is_scored_on_the_text_itself(
    small_study, tmp_path, monkeypatch
):
    play = "ROMEO:\nRomeo runs.\n\nJULIET:\nJuliet runs with Romeo.\n\n" * 12
    (tmp_path / "fox.txt").write_text(play)
    variant = dataclasses.replace(small_study.variants[0], renamed_copies=3)
    play_study = dataclasses.replace(small_study, variants=(variant,), prompt="Ro")
    trained, fit_run = [], study.fit_run

    def fit(run, parts, *, resume):
        trained.append(parts)
        return fit_run(run, parts, resume=resume)

    monkeypatch.setattr(study, "fit_run", fit)
    results = run_study(play_study, tmp_path / "runs", seeds=2)
    assert results["rows"][0]["renamed_copies"] == 3
    assert results["split"]["train"] == int(len(play) * 0.8)
    tokenizer = tg.CharTokenizer.from_text(play)
    first, second = (tokenizer.decode(parts["train"]) for parts in trained)
    assert 5.5 < len(first) / results["split"]["train"] < 6.5
    assert first.count(" runs.") == second.count(" runs.") == 6 * 10
    assert first.count("ROMEO:") == second.count("ROMEO:") == 3 * 10
    assert first != second
    saved = tg.load(tmp_path / "runs" / "gpt-learned-seed0")
    valid = tokenizer.encode(play)[results["split"]["train"] :]
    nats = tg.evaluate(saved.model, valid, "windows").nats
    np.testing.assert_allclose(results["rows"][0]["scores"]["valid"]["nats"], nats)
    run_study(play_study, tmp_path / "runs", seeds=2)
    assert len(trained) == 2
    plain = dataclasses.replace(play_study, variants=small_study.variants[:1])
    with pytest.raises(ValueError, match="a run with another renamed_copies; remove"):
        run_study(plain, tmp_path / "runs")


def test_complete_runs_are_read(small_study, tmp_path, untrained):
    first = run_study(small_study, tmp_path / "runs", seeds=2)
    expected = [(v.name, seed) for v in small_study.variants for seed in (0, 1)]
    assert untrained == expected
    assert [(row["name"], row["seed"]) for row in first["rows"]] == expected
    assert run_study(small_study, tmp_path / "runs", seeds=2) == first
    assert untrained == expected
    assert len(run_study(small_study, tmp_path / "runs", seeds=3)["rows"]) == 6
    assert untrained[4:] == [(v.name, 2) for v in small_study.variants]


def test_only_trains_what_it_names(small_study, tmp_path, untrained):
    results = run_study(
        small_study, tmp_path / "runs", only=["GPT, no positions"], steps=1
    )
    assert [row["name"] for row in results["rows"]] == ["GPT, no positions"]
    assert results["rows"][0]["training"]["steps"] == 1
    with pytest.raises(ValueError, match="only must be among GPT, learned; .*'LSTM'"):
        run_study(small_study, tmp_path / "runs", only=["LSTM"])


def test_a_folder_of_another_run_is_refused(small_study, tmp_path, untrained):
    run_study(small_study, tmp_path / "runs", steps=1)
    with pytest.raises(ValueError, match="holds a run with another training; remove"):
        run_study(small_study, tmp_path / "runs", steps=2)
    path = tmp_path / "runs" / "gpt-learned-seed0" / "metrics.json"
    content = json.loads(path.read_text())
    del content["metrics"]["config"]["attention_window"]  # a field that came later
    path.write_text(json.dumps(content))
    run_study(small_study, tmp_path / "runs", steps=1)
    del content["metrics"]["config"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="metrics.json is not of a study: 'config'"):
        run_study(small_study, tmp_path / "runs", steps=1)
    shutil.rmtree(path.parent)
    (tmp_path / "fox.txt").write_text(TEXT.replace("fox", "cat"))
    with pytest.raises(ValueError, match="holds a run on another text; remove"):
        run_study(small_study, tmp_path / "runs", steps=1)


def test_table_and_figure_of_a_study(small_study, tmp_path, capsys):
    def row(name, seed, nats):
        scores = {"nats": nats, "perplexity": np.exp(nats), "bits_per_token": 1.0}
        return {
            "name": name,
            "seed": seed,
            "parameters": 1234,
            "seconds": 5.0,
            "scores": {"valid": scores},
            "training": {"steps": 10, "batch_size": 3},
            "history": [{"step": 5, "valid_loss": nats}, {"step": 10, "valid_loss": 1}],
            "sample": "the end",
            "precision": "float32",
            "versions": {"keras": "3", "backend": name},
        }

    results = {
        "kind": "study",
        "study": "small",
        "title": "A small study",
        "command": "tinygpt study small",
        "ngrams": {"3-gram": {"valid": row("", 0, 2.5)["scores"]["valid"]}},
        "rows": [
            row("a", 0, 2.0),
            row("a", 1, 2.2),
            row("b", 0, 1.5),
            row("b", 1, 1.8),
        ],
    }
    table = TABLES["study"](results)
    assert "| a | 1,234 | 10 x 3 | 5 | 2.1000 ± 0.1414 |" in table
    assert "| -0.500; -0.400 |" in table
    assert "a: float32, keras 3, backend a; b: float32, keras 3, backend b." in table
    assert "| 3-gram | counts | | | 2.5000 |" in table
    assert "Seeds: 2 a row, mean ± standard deviation. " in table
    uneven = TABLES["study"]({**results, "rows": results["rows"][:3]})
    assert "Seeds: 1 or 2 a row, mean ± standard deviation. " in uneven
    (path,) = draw_study(results, tmp_path, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "--- b, temperature 0.8\nthe end" in capsys.readouterr().out


def test_spread():
    assert spread([1.0]) == "1.0000"
    assert spread([1.0, 3.0]) == "2.0000 ± 1.4142"


# The protocols.


def test_book_protocol():
    made = book_study()
    training = made.variants[0].training
    assert (training.steps, training.batch_size) == (2501, 64)
    assert (training.optimizer, training.learning_rate) == ("adam", 0.002)
    assert (training.schedule, training.clip_norm) == ("constant", 1.0)
    assert not training.restore_best
    assert made.method == "windows"
    sizes = {}
    for variant in made.variants[:6]:
        assert variant.training == PROTOCOL
        config = dataclasses.replace(variant.config, vocab_size=104)
        build = tg.build_lstm if "LSTM" in variant.name else tg.build_gpt
        sizes[variant.name] = build(config).count_params()
    assert sizes["GPT, sinusoidal positions"] == sizes["GPT, no positions"] == 132_488
    assert sizes["LSTM"] == 132_712
    for variant in made.variants[6:]:
        assert variant.training.steps == 2501 and variant.training.batch_size == 64
        assert not variant.training.restore_best
        config = dataclasses.replace(variant.config, vocab_size=104)
        build = tg.build_lstm if "LSTM" in variant.name else tg.build_gpt
        assert build(config).count_params() <= 133_224


def test_mini_protocol_states_the_published_budgets():
    budgets = {
        variant.name: (variant.training.steps, variant.training.batch_size)
        for variant in mini_study().variants
    }
    assert budgets["mini GPT"] == budgets["mini LSTM"] == (3000, 64)
    assert budgets["mini LSTM, constant rate"] == (2000, 64)
    assert budgets["mini GPT, quick"] == budgets["mini LSTM, quick"] == (1500, 16)
    assert mini_study().split == (1_000_000, 55_000, 60_394)


def test_nanogpt_split_and_last_weights():
    made = nanogpt_study()
    assert sum(made.split) == 1_115_394 and made.split[0] == 1_003_854
    names = ["mini GPT", "tiny GPT", "tiny GPT, invented names"]
    assert [variant.name for variant in made.variants] == names
    assert not any(variant.training.restore_best for variant in made.variants)
    assert made.scored == ("valid",)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("quality", ["--only", "mini GPT"], "only must be left out for the quality st"),
        ("context", ["--seeds", "2"], "seeds must be left out for the context study"),
        ("reversal", ["--corpus", "x"], "corpus must be left out for the reversal st"),
        ("filling", ["--only", "x"], "only must be left out for the filling study"),
    ],
)
def test_flags_a_study_does_not_read(name, flags, message, capsys):
    assert message in fails(capsys, "study", name, *flags)


def test_quality_stops_at_the_target_and_else_counts_the_best(
    small_study, tmp_path, monkeypatch, capsys
):
    text = dataclasses.replace(small_study, split=(0.6, 0.2, 0.2))
    variants = list(small_study.variants)
    monkeypatch.setattr(quality, "mini_study", lambda: text)
    monkeypatch.setattr(quality, "quality_variants", lambda: variants)
    monkeypatch.setattr(quality, "SCORED_EVERY", 2)
    given = iter([3.0, 1.4, 2.9, 2.8, 2.95])
    scores = lambda model, ids: Scores.from_losses(next(given), 1)  # noqa: E731
    monkeypatch.setattr(quality, "evaluate", scores)
    cli.COMMANDS["study"](["quality", "--steps", "6", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "quality.json").read_text())
    first, second = results["rows"]
    assert first[:1] + first[2:6] == [
        *("GPT, learned", "6 x 3", "float32", 4, "1.4000"),
    ]
    assert second[4:6] == [4, "2.8000"]
    assert first[-1] == "1.0"
    assert "test 2.8000 after" in capsys.readouterr().out


# Reversal.


def test_sequences_are_reversed_behind_the_separator():
    rows = reversal.sequences(7, seed=3)
    n = reversal.LENGTH
    assert rows.shape == (7, 2 * n + 1)
    assert np.all(rows[:, n] == len(reversal.SYMBOLS))
    assert np.array_equal(rows[:, :n], rows[:, :n:-1])
    assert not np.array_equal(rows, reversal.sequences(7, seed=4))


class _Copier(keras.layers.Layer):
    """Logits of the right answer, from the tokens alone."""

    def call(self, tokens):
        n = reversal.LENGTH
        places = keras.ops.arange(keras.ops.shape(tokens)[1])
        source = keras.ops.clip(2 * n - 1 - places, 0, n - 1)
        answer = keras.ops.take(tokens, source, axis=1)
        return 50.0 * keras.ops.one_hot(answer, len(reversal.SYMBOLS) + 1)


def test_exact_match_needs_every_symbol(monkeypatch):
    rows = reversal.sequences(5, seed=1)
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, _Copier()(tokens))
    plain = functools.partial(tg.generate, use_cache=False)  # takes any model
    monkeypatch.setattr(reversal, "generate", plain)
    assert reversal.exact_match(model, rows, 0.0) == 1.0
    wrong = rows.copy()
    wrong[:2, -1] = (wrong[:2, -1] + 1) % len(reversal.SYMBOLS)
    assert reversal.exact_match(model, wrong, 0.0) == 0.6


def test_heads_of_an_untrained_model_copy_little():
    model = tg.build_gpt(reversal.CONFIG, seed=0)
    heads = reversal.measure_heads(model, reversal.sequences(4, seed=0))
    assert len(heads) == 8
    assert not any(head["reversal"] for head in heads)
    for head in heads:  # near uniform over 13 to 24 keys
        assert 0.02 < head["copied"] < 0.12
        assert 2.0 < head["entropy"] < np.log(24)


def test_reversal_command(tmp_path, capsys, monkeypatch):
    small = dataclasses.replace(reversal.CONFIG, num_layers=1, hidden_dim=8)
    monkeypatch.setattr(reversal, "CONFIG", small)
    monkeypatch.setattr(reversal, "TESTED", 5)
    cli.COMMANDS["study"](
        ["reversal", "--seeds", "1", "--steps", "2", "--folder", str(tmp_path)]
    )
    results = json.loads((tmp_path / "reversal.json").read_text())
    assert results["rows"][0]["exact_match"]["0.0"] == 0.0
    assert (tmp_path / "reversal.png").read_bytes().startswith(b"\x89PNG")
    assert "temperature 2" in capsys.readouterr().out


@pytest.mark.slow
def test_reversal_is_learned():
    model = reversal.train_reversal(seed=0)
    rows = reversal.sequences(200, seed=0)
    assert reversal.exact_match(model, rows, 0.0) > 0.99
    assert any(head["reversal"] for head in reversal.measure_heads(model, rows[:50]))


# Context.


@pytest.mark.backend
def test_losses_by_position_are_means_over_separate_windows():
    model = tg.build_gpt(dataclasses.replace(SHAPE, vocab_size=11), seed=1)
    ids = np.random.default_rng(0).integers(0, 11, 8 * 5 + 4).astype("int32")
    windows = np.stack([ids[8 * i : 8 * i + 9] for i in range(5)])
    expected = token_losses(model).predict_on_batch([windows[:, :-1], windows[:, 1:]])
    np.testing.assert_allclose(
        losses_by_position(model, ids, batch_size=3), expected.mean(axis=0), rtol=1e-5
    )


def test_extended_tables():
    model = tg.build_gpt(dataclasses.replace(SHAPE, vocab_size=11), seed=1)
    table = to_numpy(model.get_layer("position_embedding").embeddings)
    repeated = context.extend_positions(model, 20, "repeated")
    longer = to_numpy(repeated.get_layer("position_embedding").embeddings)
    assert np.array_equal(longer[8:16], table) and np.array_equal(longer[:8], table)
    stretched = context.extend_positions(model, 15, "stretched")
    longer = to_numpy(stretched.get_layer("position_embedding").embeddings)
    np.testing.assert_allclose(longer[::2], table, atol=1e-7)
    np.testing.assert_allclose(longer[1], (table[0] + table[1]) / 2, atol=1e-6)
    ids = np.arange(8)[None] % 11
    np.testing.assert_array_equal(
        to_numpy(repeated(ids)),
        to_numpy(model(ids)),
    )


def test_bins_double():
    means = context.binned(np.arange(11.0))
    assert means == {"1": 0.0, "2": 1.0, "4": 2.5, "8": 5.5, "11": 9.0}


def test_context_study(small_study, tmp_path, untrained, monkeypatch):
    monkeypatch.setattr(context, "book_study", lambda own_recipes: small_study)
    monkeypatch.setattr(context, "LENGTHS", (8, 16))
    monkeypatch.setattr(context, "FACTORS", (1, 3))
    monkeypatch.setattr(context, "COST_GPT", tg.GPTConfig(65, 8, 1, 2, hidden_dim=12))
    monkeypatch.setattr(context, "COST_LSTM", tg.LSTMConfig(65, hidden_dim=7))
    monkeypatch.chdir(tmp_path)
    cli.COMMANDS["study"](["context"])
    studies = tmp_path / "saved_models" / "studies"
    results = json.loads((studies / "context" / "context.json").read_text())
    assert (studies / "book" / "gpt-learned-seed0").is_dir()
    names = [row["name"] for row in results["rows"]]
    assert names == [
        "GPT, learned, repeated",
        "GPT, learned, stretched",
        "GPT, no positions",
    ]
    plain = results["rows"][2]["nats"]
    assert list(plain) == ["8", "24"]
    assert [row["length"] for row in results["cost"]] == [8, 16]
    assert results["cost"][1]["products"] > 2 * results["cost"][0]["products"]


# Mistakes.


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["book", "--seeds", "0"], "seeds must be at least 1, got 0"),
        (["book", "--steps", "-3"], "steps must be at least 1, got -3"),
        (["book", "--only", "RNN"], "only must be among GPT, sinusoidal positions"),
        (["book", "--corpus", "absent.txt"], "absent.txt"),
    ],
)
def test_bad_flags_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["study", *arguments])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
