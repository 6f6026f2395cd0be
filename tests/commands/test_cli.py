"""The command line: the whole job on a small text, and one line for every mistake."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import check_one_line_error as fails

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.studies.recipes import TRAININGS, recipe

SMALL = [
    *("--hidden-dim", "12", "--num-heads", "2", "--num-layers", "1"),
    *("--max-sequence-length", "16", "--batch-size", "4", "--jit-compile", "False"),
]
# The launcher as it is installed: a module of its own, outside the package.
LAUNCH = [
    sys.executable,
    "-c",
    "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')",
    str(Path(tg.__file__).with_name("launcher.py")),
]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
    "PYTHONPATH": str(Path(tg.__file__).parents[1]),
}
TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun\n" * 30


@pytest.fixture
def text_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my text — é.txt"
    path.write_text(TEXT, "utf-8")
    return path


def run(*argv):
    cli.main([str(argument) for argument in argv])


def test_train_evaluate_generate(text_file, tmp_path, capsys):
    run("train", text_file, *SMALL, "--steps", 6, "--validate-every", 3,
        "--with-lstm", "--show-samples", "--sample-tokens", 20)  # fmt: skip
    out = capsys.readouterr().out
    assert re.search(r"step 6/6  loss \d\.\d{4}  valid \d\.\d{4}  [\d,]+ tokens/s", out)
    assert re.search(r"^book +[\d,]+ +6 +\d+ +\d\.\d{4}", out, re.M)
    assert re.search(r"^book-lstm +[\d,]+ +6 ", out, re.M)
    assert "3-gram, add 0.1" in out and "sample (temperature 0.8, seed 0)" in out
    assert out.count("--- sample") == 4
    folder = next((tmp_path / "saved_models").iterdir())
    assert folder.name == "my text — é-book"
    names = {path.name for path in folder.iterdir()}
    assert names >= {"model.keras", "tokenizer.json", "metrics.json", "history.csv"}
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    metrics = tg.load(folder).metrics
    assert metrics["split"] == {"train": 1863, "valid": 207}
    assert metrics["command"].startswith("tinygpt train")
    nats = metrics["scores"]["valid"]["nats"]

    run("evaluate", folder)
    assert f"{nats:.4f} nats per token" in capsys.readouterr().out
    run("evaluate", folder, text_file, "--method", "windows")
    assert "2,069 tokens scored" in capsys.readouterr().out

    run("generate", folder, "Now", "--max-new-tokens", 12)
    text = capsys.readouterr().out
    assert text.startswith("Now") and len(text) == len("Now") + 12 + 1
    run("generate", folder, "Now", "--max-new-tokens", 12, "--num-samples", 2)
    both = capsys.readouterr().out
    assert both.startswith(f"--- sample 1 ---\n{text}")
    assert "\n--- sample 2 ---\nNow" in both
    assert tg.load(folder).generate("Now", 12, seed=1) in both

    # An existing run is refused, replaced with --force, and used by --resume.
    command = ("train", text_file, *SMALL, "--steps", 6, "--validate-every", 3)
    assert "exists already; --force replaces it" in fails(capsys, *command)
    run(*command, "--force")


def test_prepare_train_evaluate(text_file, tmp_path, capsys):
    split = ("--split", 0.9, 0.1)
    run("prepare", text_file, *split, "--processes", 1)
    out = capsys.readouterr().out
    made = "saved_models/my text — é-ids"
    assert "tokens: train 1,863, valid 207" in out
    assert f"train with: tinygpt train '{made}'" in out
    run("train", made, *SMALL, "--steps", 1, "--sample-tokens", 0, "--out", "run")
    capsys.readouterr()
    metrics = json.loads(Path("run", "metrics.json").read_text())["metrics"]
    assert metrics["split"] == metrics["characters"] == {"train": 1863, "valid": 207}
    corpus = tg.load_corpus(text_file)
    assert metrics["corpus"] == {
        "name": text_file.name,
        "source": made,
        "sha256": corpus.sha256,
    }
    assert set(metrics["ngrams"]) == {"3-gram, add 0.1", "5-gram, add 0.01"}
    run("evaluate", "run")
    nats = metrics["scores"]["valid"]["nats"]
    assert f"{nats:.4f} nats per token" in capsys.readouterr().out

    run("prepare", text_file, "--out", made, "--tokenizer", "byte", "--force")
    run("prepare", text_file, *split, "--out", "again", "--tokenizer", "run")
    tokenizer = tg.load_prepared("again").tokenizer
    assert tokenizer == tg.CharTokenizer.from_text(corpus)
    assert "the ids of another tokenizer" in fails(capsys, "evaluate", "run")
    for arguments, message in (
        (("prepare", text_file, "--out", made), "exists already; --force replaces it"),
        (("prepare", "nowhere.txt"), "nowhere.txt"),
        (("prepare", text_file, "--tokenizer", "word"), "word"),
        (("prepare", text_file, "--out", "x", "--split", 5, 90_000), "must add up to"),
        (("train", made, *split, "--vocab-size", 9), "vocab_size must be left out for"),
        (("train", made, "--tokenizer", "bpe"), "tokenizer must be left out for"),
        (("train", made, "--split", 0.5, 0.5), "split must be left out for prepared"),
    ):
        assert message in fails(capsys, *arguments)
    Path("again", "tokenizer.json").unlink()
    Path("again", "prepared.json").unlink()
    assert "corpus must have a tokenizer" in fails(capsys, "train", "again")


def test_force_loses_nothing(text_file, tmp_path, capsys):
    quick = ("--steps", 2, "--jit-compile", False)
    command = ["train", text_file, *SMALL, *quick, "--out", "run"]
    run(*command)
    first = (tmp_path / "run" / "model.keras").read_bytes()
    # A run that fails leaves the earlier one aside; one that succeeds replaces it.
    poison = ("--learning-rate", "1e30", "--schedule", "constant")
    poison += ("--clip-norm", "None", "--warmup-steps", 0, "--steps", 60)
    assert "loss became" in fails(capsys, *command, *poison, "--force")
    aside = tmp_path / "run.previous"
    assert (aside / "model.keras").read_bytes() == first
    assert not (tmp_path / "run").exists()
    # The one that waits is complete, so it outlives a run in its place that is not.
    stopped = Path("run", "checkpoints", "state.json")
    stopped.parent.mkdir(parents=True)
    stopped.write_text("{}")
    assert "loss became" in fails(capsys, *command, *poison, "--force")
    assert (aside / "model.keras").read_bytes() == first
    run(*command, "--force")
    assert not aside.exists()
    # A folder that only has such a name is the user's.
    aside.mkdir()
    (aside / "notes.txt").write_text("mine")
    assert "run.previous is in the way" in fails(capsys, *command, "--force")
    shutil.rmtree("run")
    run(*command)
    assert (aside / "notes.txt").read_text() == "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    command[-1] = "mine"
    assert "is not a run" in fails(capsys, *command, "--force")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_the_target_may_be_a_link_or_the_working_directory(text_file, tmp_path):
    quick = ("--steps", 2, "--validate-every", 1)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    run("train", text_file, *SMALL, *quick, "--out", "link")
    names = {path.name for path in (tmp_path / "real").iterdir()}
    assert {"model.keras", "checkpoints", "history.csv", "curve.png"} <= names
    run("train", text_file, *SMALL, *quick, "--out", "link", "--force")
    assert {path.name for path in (tmp_path / "real").iterdir()} == names
    assert not (tmp_path / "real.previous").exists()
    run("inspect", "link", "--text", "Now is the", "--out", ".")
    assert text_file.exists() and Path("inspection.json").exists()
    run("prepare", text_file, "--out", "ids")
    Path("ids").rename("elsewhere")
    Path("ids").symlink_to("elsewhere")
    run("prepare", text_file, "--out", "ids", "--force")
    assert Path("ids").is_symlink() and tg.load_prepared("ids").parts


def test_an_unusable_backend(tmp_path):
    result = subprocess.run(
        [*LAUNCH, "--version"],
        capture_output=True,
        env={**ENVIRONMENT, "KERAS_BACKEND": "nonesuch"},
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(b"tinygpt: error: KERAS_BACKEND=nonesuch cannot")
    assert len(result.stderr.splitlines()) == 1


def test_line_ends_that_are_not_in_the_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("A$_$B.txt").write_bytes("\r".join(TEXT.splitlines()).encode())
    run(
        "train", "A$_$B.txt", *SMALL, "--steps", 2, "--out", "run", "--sample-tokens", 3
    )
    assert "saved run: " in capsys.readouterr().out
    assert "got ''" in fails(capsys, "train", "A$_$B.txt", "--prompt", "", "--out", "b")
    assert not Path("b").exists()
    text, scores = TEXT[:400].replace("\n", " "), []
    accented = "".join(character + "é" for character in text)
    for content, flags in ((text, ()), (accented, ("--unknown", "drop"))):
        Path("scored.txt").write_text(content, "utf-8")
        run("evaluate", "run", "scored.txt", *flags)
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1]


def test_the_lstm_as_main_model(text_file, capsys):
    run("train", text_file, "--architecture", "lstm", "--hidden-dim", 13, "--steps", 2,
        "--batch-size", 4, "--jit-compile", "False", "--out", "run", "--tokenizer",
        "byte", "--split", 0.8, 0.1, 0.1)  # fmt: skip
    assert "test nats" in capsys.readouterr().out
    assert isinstance(tg.load("run").tokenizer, tg.ByteTokenizer)


def test_the_same_command_gives_the_same_model(text_file):
    for out in ("a", "b"):
        run("train", text_file, *SMALL, "--steps", 3, "--out", out)
    first, second = (tg.load(out).metrics["fingerprints"] for out in ("a", "b"))
    assert first == second


def test_a_loss_that_turns_nan(text_file, tmp_path, capsys):
    error = fails(capsys, "train", text_file, *SMALL, "--steps", 60, "--out", "run",
                  "--learning-rate", "1e30", "--schedule", "constant",
                  "--clip-norm", "None", "--warmup-steps", 0,
                  "--validate-every", 1)  # fmt: skip
    assert re.search(r"loss became (nan|inf) at step \d+", error)
    assert not (tmp_path / "run" / "model.keras").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file"),
        (b"\x89PNG\r\n\x1a\n\x00\x00", "UTF-8"),
        (b"abc\x00def", "NUL"),
        (b"short text", "the training part has 9 tokens, at least 17 are needed"),
        (b"a" * 900, "corpus must have at least 2 distinct characters"),
        (b"ab" * 40, "the valid part has 8 tokens, at least 17 are needed"),
    ],
)
def test_bad_texts(text_file, tmp_path, capsys, content, message):
    text_file.write_bytes(content)
    error = fails(capsys, "train", text_file, *SMALL, "--out", "run")
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == [text_file.name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.txt"], "nowhere.txt"),
        (["no*.txt"], "source must match text files"),
        (["TEXT", "--hidden-dim", "13"], "divisible by num_heads=4, got 13"),
        (["TEXT", "--positions", "rotary", "--hidden-dim", "12"], "rotary positions"),
        (["TEXT", "--hidden-dim", "15", "--num-heads", "3"], "even hidden_dim, got 15"),
        (["TEXT", "--dropout", "1.0"], "dropout must be"),
        (["TEXT", "--num-layers", "-1"], "num_layers must be at least 1, got -1"),
        (["TEXT", "--learning-rate", "0"], "learning_rate must be"),
        (["TEXT", "--learning-rate", "nan"], "learning_rate must be"),
        (["TEXT", "--steps", "-5"], "steps must be at least 1, got -5"),
        (["TEXT", "--preset", "huge"], "preset"),
        (["TEXT", "--steps", "9" * 14], "at most 1,000,000,000 windows"),
        (["TEXT", "--architecture", "lstm", "--preset", "tiny"], "book, mini, got"),
        (["TEXT", "--prompt", "@"], "U+0040"),
        (
            ["TEXT", "--architecture", "lstm", "--rematerialize"],
            "must be a GPTConfig to",
        ),
        (["TEXT", "--split", "0.9"], "split must be 2 or 3 numbers, got 1"),
        (["TEXT", "--split", "0.9", "0.5"], "fractions"),
        (["TEXT", "--split", "inf", "3"], "split must be a finite number"),
        (["TEXT", "--split", "nan", "0.1"], "split must be a finite number"),
        (["TEXT", "--out", "TEXT/sub"], "out: "),
        (["TEXT", "--resume", "--force"], "exclude each other"),
        (["TEXT", "--resume"], "resume needs an interrupted run"),
        (["TEXT", "--steps", "many"], "--steps"),
        (["TEXT", "--no-such-flag"], "--no-such-flag"),
        (["TEXT", "--max-sequence-length", "99999999"], "the training part has"),
    ],
)
def test_bad_training_flags(text_file, tmp_path, capsys, arguments, message):
    arguments = [a.replace("TEXT", str(text_file)) for a in arguments]
    assert message in fails(capsys, "train", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == [text_file.name]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    tokenizer = tg.CharTokenizer.from_text(TEXT)
    config = tg.GPTConfig(tokenizer.vocab_size, 16, 1, 2, hidden_dim=12)
    path = tmp_path_factory.mktemp("runs") / "run"
    return tg.save(path, tg.build_gpt(config), tokenizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "nowhere", "x"], "nowhere does not exist"),
        (["generate", ".", "x"], "not a bundle"),
        (["generate"], "at least one character"),
        (["evaluate"], "Missing"),
        (["generate", "RUN", "Now", "--max-new-tokens", "9" * 20], "max_new_tokens"),
        (["generate", "RUN", "@"], "U+0040"),
        (["generate", "RUN", ""], "at least one character"),
        (["generate", "RUN", "Now", "--top-k", "0"], "top_k must be at least 1, got 0"),
        (["generate", "RUN", "Now", "--temperature", "-1"], "temperature must be"),
        (["generate", "RUN", "Now", "--num-samples", "0"], "num_samples must be"),
        (["generate", "RUN", "Now", "--max-new-tokens", "-1"], "max_new_tokens"),
        (["generate", "RUN", "Now", "--stop", ""], "stop must not be an empty string"),
        (["evaluate", "RUN"], "corpus must be given"),
        (["evaluate", "RUN", "nowhere.txt"], "nowhere.txt"),
        (["evaluate", "RUN", "five-nights"], "U+"),
        (["frobnicate"], "command must be one of train, prepare, evaluate"),
    ],
)
def test_bad_uses_of_a_bundle(
    run_folder, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    arguments = [str(run_folder) if a == "RUN" else a for a in arguments]
    assert message in fails(capsys, *arguments)


def test_a_prompt_from_standard_input(run_folder):
    result = subprocess.run(
        [*LAUNCH, "generate", str(run_folder)],
        input=b"Now is",
        capture_output=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(b"Now is")
    assert result.stderr == b""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--precision", "float13"], "'float32', 'mixed_bfloat16', 'mixed_fl"),
        (["study", "foo"], "'name'. Expected one of ('book', 'mini', 'nanogpt',"),
        (["prepare"], "Missing from tinygpt prepare: CORPUS (see"),
        (["generate", "x", "y", "--temperature", "a" * 150], "a" * 150),
        (["train", "--architecture", "rnn"], "must be one of 'gpt', 'lstm', got 'rnn'"),
    ],
)
def test_bad_flags_are_told_whole(argv, message, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert message in fails(capsys, *argv)
    assert os.environ["COLUMNS"] == "40"


def test_help_and_version(capsys):
    for argv in (["--help"], ["--version"], ["train", "--help"], ["generate", "-h"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert tg.__version__ in out
    assert "--learning-rate" in out and "--num-kv-heads" in out and "--top-p" in out
    assert "key and value heads per block" in " ".join(out.replace("│", "").split())
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2


def test_ctrl_c_keeps_the_checkpoint_and_says_how_to_go_on(text_file, tmp_path):
    arguments = [str(text_file), *SMALL, "--steps", "400", "--validate-every", "20"]
    process = subprocess.Popen(
        [*LAUNCH, "train", *arguments, "--out", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=ENVIRONMENT,
        # A suite started in the background passes on that SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    state = tmp_path / "run" / "checkpoints" / "state.json"
    deadline = time.monotonic() + 120
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    error = error.decode()
    assert process.returncode == 130, error
    assert "Traceback" not in error
    assert re.search(r"the checkpoint of step \d+ in run is kept; go on with: ", error)
    assert error.strip().endswith("--out run --resume")
    assert not (tmp_path / "run" / "model.keras").exists()
    step = json.loads(state.read_text())["checkpoints"][0]["step"]
    assert f"checkpoint of step {step} in run" in error
    run("train", *arguments, "--out", "run", "--resume")
    assert tg.load(tmp_path / "run").metrics["training"]["steps"] == 400


def test_recipes_exist_for_every_preset():
    for architecture, preset in TRAININGS:
        made = recipe(architecture, preset, vocab_size=65)
        assert made.model.vocab_size == 65
