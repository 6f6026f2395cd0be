"""The README: its commands run, its tables are current, its lists complete."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

import keras_tinygpt as tg
from keras_tinygpt import cli
from keras_tinygpt.studies.results import render_readme

README = (ROOT / "README.md").read_text("utf-8")


slow = pytest.mark.slow


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_set_up_commands_are_as_promised():
    first, second = (block.strip() for block in blocks("bash")[:2])
    start = "python3 -m venv .venv && .venv/bin/pip install -q "
    assert first == f"{start}. && .venv/bin/tinygpt train"
    assert second == f"{start}'.[test]' && .venv/bin/python -m pytest"


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=slow)])
def test_commands_run(tmp_path, monkeypatch, all_of_them):
    """The shell commands after set-up, in order, with fewer steps."""
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "data" / "five-nights.txt").read_text("utf-8")
    (tmp_path / "my_text.txt").write_text(text[:20_000], "utf-8")
    short = ["--steps", "2", "--batch-size", "4", "--jit-compile", "False"]
    cli.main(["train", *short])
    lines = [line for block in blocks("bash")[2:6] for line in block.splitlines()]
    assert len(lines) == 13
    for line in lines:
        program, *argv = shlex.split(line)
        assert program == ".venv/bin/tinygpt"
        if argv[0] in ("inspect", "export") and not all_of_them:
            continue
        if argv[0] == "study":  # the mini study would need its corpus
            quick = all_of_them and argv[1] != "mini"
            argv += ["--steps", "2"] if quick else ["--help"]
        if "--help" in argv:
            with pytest.raises(SystemExit) as stopped:
                cli.main(argv)
            assert stopped.value.code == 0
        else:
            cli.main([*argv, *(short if argv[0] == "train" else [])])
    saved = tmp_path / "saved_models"
    assert (saved / "mine" / "model.keras").exists()
    made = saved / "five-nights-book" / "inspection" / "inspection.json"
    assert made.exists() == all_of_them


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_python_blocks_run(tmp_path, monkeypatch, index):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[index], f"README block {index}", "exec"), {})


def test_tables_are_current():
    assert render_readme(README, ROOT / "examples" / "results") == README


def test_all_results_are_in_the_readme():
    for path in (ROOT / "examples" / "results").iterdir():
        if path.suffix == ".json":
            assert f"<!-- results: {path.stem} -->" in README
        else:
            assert f"examples/results/{path.name}" in README


def test_commands_behind_the_tables_parse():
    """Each recorded command is one this version accepts."""
    for path in (ROOT / "examples" / "results").glob("*.json"):
        results = json.loads(path.read_text("utf-8"))
        program, first, *argv = shlex.split(results["command"])
        if program == "python":
            assert (ROOT / first).is_file()
            continue
        assert (program, first) == ("tinygpt", "study")
        with pytest.raises(SystemExit) as stopped:
            cli.main([first, *argv, "--help"])
        assert stopped.value.code == 0


def test_the_table_of_names_is_complete():
    section = README.split("## What is in it")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    listed = set(re.findall(r"`(\w+)`", "".join(rows)))
    assert listed == set(tg.__all__)


def test_all_names_exist():
    assert sorted(tg.__all__) == sorted(set(tg.__all__))
    assert all(hasattr(tg, name) for name in tg.__all__)
    layers = README.split("| `layers` |")[1].split("\n")[0]
    for name in re.findall(r"`(\w+)`", layers):
        assert name in tg.layers.__all__


def test_the_file_map_is_complete():
    section = README.split("## Files")[1]
    package = ROOT / "keras_tinygpt"
    for path in package.rglob("*.py"):
        if path.name != "__init__.py":
            assert path.name in section, path
    for named in re.findall(r"`(keras_tinygpt/[\w/]+\.py)`", section):
        assert (ROOT / named).exists(), named


def test_importing_prints_nothing():
    code = "import keras_tinygpt"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=120
    )
    assert result.returncode == 0
    assert result.stdout == b""


@slow
@pytest.mark.parametrize("script", ["translate_dates.py", "translate_by_prefix.py"])
def test_the_translating_examples(tmp_path, script):
    path = ROOT / "examples" / script
    assert len(path.read_text("utf-8").splitlines()) < 40
    picture = [str(tmp_path / "map.png")] * (script == "translate_dates.py")
    result = subprocess.run(
        [sys.executable, str(path), "2", *picture],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "dates, held to dates: 100.0%" in result.stdout
    assert all(Path(file).is_file() for file in picture)


TRAINERS = ["train_gpt.py", "train_lstm.py", "train_bpe.py"]
SLOW_TRAINERS = ["fill_characters.py", "train_prepared.py", "finetune_adapters.py"]
TRAINERS += [pytest.param(name, marks=slow) for name in SLOW_TRAINERS]


@pytest.mark.parametrize("script", TRAINERS)
def test_example_scripts(tmp_path, script):
    if script == "train_bpe.py":
        pytest.importorskip("tokenizers", reason="needs the extra [bpe]")
    path = ROOT / "examples" / script
    assert len(path.read_text("utf-8").splitlines()) < 40
    text = (ROOT / "data" / "five-nights.txt").read_text("utf-8")
    (tmp_path / "text.txt").write_text(text[:9_000], "utf-8")
    result = subprocess.run(
        [sys.executable, str(path), "text.txt", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    ending = "are told" if script == "fill_characters.py" else "Scores(nats="
    assert ending in result.stdout


def test_the_pretrained_example(tmp_path):
    for package in ("safetensors", "tokenizers"):
        pytest.importorskip(package, reason="needs the extra [gpt2]")
    path = ROOT / "examples" / "use_pretrained.py"
    assert len(path.read_text("utf-8").splitlines()) < 40
    folder = str(ROOT / "tests" / "pretrained" / "folders" / "gpt2")
    result = subprocess.run(
        [sys.executable, str(path), folder, "the bell", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.startswith("gpt2, ")
    written = tg.load(tmp_path / "out")
    assert tg.fingerprint(written.model) == tg.fingerprint(tg.load(folder).model)


def test_the_generation_benchmark_runs_ours():
    script = str(ROOT / "examples" / "benchmark_generation.py")
    result = subprocess.run(
        [sys.executable, script, "--worker", "ours"],
        input="1\n1\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len([float(line) for line in result.stdout.split()]) == 2


def test_runs_are_recorded_and_rendered(tmp_path):
    speed = {
        "kind": "generation_speed",
        "command": "python x.py",
        "setting": "tokens per second, medians of 5",
        "rows": [{"name": "ours", "tokens_per_second": {"1": 12000, "64": 40000}}],
        "versions": {"keras": "3.15.1"},
    }
    (tmp_path / "speed.json").write_text(json.dumps(speed))
    text = "<!-- results: speed -->\n<!-- end of results -->\n"
    rendered = render_readme(text, tmp_path)
    assert "| | batch 1 | batch 64 |\n|---|---|---|\n| ours | 12,000 | 40,0" in rendered
    assert "`python x.py`\n\nTokens per second, medians of 5. Two CPU" in rendered
    text = f"a\n{text.replace('-->', '-->' + chr(10) + 'old', 1)}b\n"
    again = render_readme(text, tmp_path)
    assert "old" not in again and rendered in again
    assert render_readme(again, tmp_path) == again


def test_every_promise_has_its_test():
    named = re.findall(r"`(test_\w+)::(test_\w+)`", README)
    assert len(named) > 15
    for file, name in named:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        source = path.read_text("utf-8")
        assert f"\ndef {name}(" in source, name
