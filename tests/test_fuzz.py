"""Hostile files and arguments: one clear error or the unchanged model, never worse."""

import io
import json
import random
import resource
import shutil
import sys
import warnings
import zipfile

import numpy as np
import pytest

import keras_tinygpt as tg
from keras_tinygpt import bundle, cli
from keras_tinygpt.files import sealed, write_json

TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun\n"
many = pytest.mark.slow
HOSTILE_JSON = [
    None,
    -1,
    0,
    10**12,
    10**400,
    1.5,
    "",
    "x",
    [],
    {},
    [[]],
    True,
    "é" * 99,
]
HOSTILE_FLAGS = [
    *("", "-1", "0", "-0.0", "nan", "inf", "-inf", "1e400", "9" * 30, "None", "True"),
    *("x", "@", "é", "[1]", "{}", "../..", "/", "/dev/null", "/proc/self", "\0", "--"),
    *("--help", "a" * 300, "$(id)", "; id", "%s%n", "\x1b[31m", "1_0", "0x10", "٣"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A bundle and the text it was made of."""
    root = tmp_path_factory.mktemp("fuzz")
    tokenizer = tg.CharTokenizer.from_text(TEXT)
    config = tg.GPTConfig(tokenizer.vocab_size, 5, 1, 1, hidden_dim=4)
    metrics = {
        "corpus": {"name": "a", "source": str(root / "a.txt"), "sha256": "0" * 64},
        "split": {"train": 100, "valid": 100},
    }
    (root / "a.txt").write_text(TEXT * 9)
    path = tg.save(root / "run", tg.build_gpt(config), tokenizer, metrics)
    # What Keras and NumPy import at the first use is not part of any case.
    tg.load(path).generate("Now", 2, use_cache=False)
    return path


def damaged(content: bytes, draw: random.Random) -> bytes:
    """A few flipped bits, a cut, an insertion or noise."""
    data = bytearray(content)
    kind = draw.randrange(5)
    if kind == 0:
        return bytes(data[: draw.randrange(len(data))])
    if kind == 1:
        place = draw.randrange(len(data))
        return bytes(
            data[:place] + draw.randbytes(draw.randrange(1, 40)) + data[place:]
        )
    if kind == 2:
        return draw.randbytes(draw.randrange(200))
    for _ in range(draw.choice([1, 1, 2, 30])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def with_hostile_value(content, draw: random.Random):
    """JSON content with one value, key or entry replaced."""
    places = []

    def walk(node):
        keys = node if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(content)
    node, key = draw.choice(places)
    if isinstance(node, dict) and draw.random() < 0.2:
        node[draw.choice(["x", "module", "__class__"])] = node.pop(key)
    else:
        node[key] = draw.choice(HOSTILE_JSON)
    return content


def rezip(path, change):
    """Writes the archive anew with the members `change` makes of its own."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")  # names that occur twice
        for name, data, *options in change(members):
            archive.writestr(name, data, *options)


def hostile_config(path, draw):
    def change(members):
        config = with_hostile_value(json.loads(members["config.json"]), draw)
        members["config.json"] = json.dumps(config).encode()
        return members.items()

    rezip(path / "model.keras", change)


def hostile_archive(path, draw):
    extra = draw.choice(
        [
            ("../outside.txt", b"x"),
            ("/tmp/outside.txt", b"x"),
            ("assets/../../x", b"x"),
            ("config.json", b"{}"),
            ("model.weights.h5", bytes(10**7), zipfile.ZIP_DEFLATED),
            ("C:\\x", b"x"),
        ]
    )
    rezip(path / "model.keras", lambda members: [*members.items(), extra])


def check_loading(path, expected):
    """Loads in one way or the other; returns whether it loaded."""
    before = {p: p.read_bytes() for p in path.iterdir()}
    try:
        lm = tg.load(path)
    except (ValueError, OSError) as error:
        assert str(error) and not isinstance(error, UnicodeError)
        loaded = False
    else:
        loaded = True
        if expected is not None:
            assert tg.fingerprint(lm.model) == expected[0]
            assert lm.tokenizer == expected[1] and lm.metrics == expected[2]
    assert {p: p.read_bytes() for p in path.iterdir()} == before
    return loaded


@pytest.mark.parametrize("cases", [30, pytest.param(900, marks=many)])
def test_damaged_bytes_give_an_error_or_the_same_model(saved, tmp_path, cases):
    lm = tg.load(saved)
    expected = tg.fingerprint(lm.model), lm.tokenizer, lm.metrics
    draw, peak = random.Random(cases), resource.getrusage(resource.RUSAGE_SELF)
    loaded = 0
    for case in range(cases):
        path = tmp_path / str(case)
        shutil.copytree(saved, path)
        name = draw.choice([bundle.MODEL, bundle.TOKENIZER, bundle.METRICS])
        content = damaged((path / name).read_bytes(), draw)
        (path / name).write_bytes(content)
        loaded += check_loading(path, expected)
        shutil.rmtree(path)
    now = resource.getrusage(resource.RUSAGE_SELF)
    assert now.ru_maxrss - peak.ru_maxrss < 300_000  # kilobytes
    assert loaded <= cases / 10  # a changed seal or a bit of its name


@pytest.mark.parametrize("cases", [4, pytest.param(300, marks=many)])
def test_damaged_exports_give_an_error_or_the_same_model(saved, tmp_path, cases):
    lm = tg.load(saved)
    export = tg.export_saved_model(lm.model, lm.tokenizer, tmp_path / "export")
    read = tg.load(export)
    names = [
        path.relative_to(export)
        for path in [*export.glob("assets/*"), *export.glob("variables/*")]
    ]
    draw, loaded = random.Random(cases), 0
    for _ in range(cases):
        path = export / draw.choice(names)
        intact = path.read_bytes()
        path.write_bytes(damaged(intact, draw))
        try:
            again = tg.load(export)
        except (ValueError, OSError) as error:
            assert str(error) and not isinstance(error, UnicodeError)
        else:
            loaded += 1
            assert tg.fingerprint(again.model) == tg.fingerprint(read.model)
            assert again.tokenizer == read.tokenizer and again.metrics == read.metrics
        path.write_bytes(intact)
    assert loaded <= cases / 2  # bytes between the entries of the index are not read


@pytest.mark.parametrize("cases", [3, pytest.param(200, marks=many)])
def test_damaged_checkpoints_give_an_error_or_the_same_end(tmp_path, cases):
    """Of a run that stopped: it goes on from what is intact, or says what is not."""
    ids = np.random.default_rng(0).integers(0, 5, 300, "int32")
    settings = tg.TrainConfig(
        steps=6, batch_size=2, validate_every=2, ema_momentum=0.9, jit_compile=False
    )

    def train(folder, resume):
        model = tg.build_gpt(tg.GPTConfig(5, 4, 1, 1, hidden_dim=4))
        tg.train(
            *(model, ids, ids[:50], settings),
            directory=folder,
            resume=resume,
            verbose=False,
        )
        return tg.fingerprint(model)

    expected = train(tmp_path / "run", False)
    draw, ended = random.Random(cases), 0
    for case in range(cases):
        folder = shutil.copytree(tmp_path / "run", tmp_path / str(case))
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        path = draw.choice(files)
        path.write_bytes(damaged(path.read_bytes(), draw))
        try:
            assert train(folder, True) == expected
            ended += 1
        except (ValueError, OSError) as error:
            assert str(error) and not isinstance(error, UnicodeError)
        shutil.rmtree(folder)
    assert ended < cases


@pytest.mark.parametrize("cases", [24, pytest.param(500, marks=many)])
def test_hostile_archives_are_refused_before_they_are_built(saved, tmp_path, cases):
    """Without checksums: values, members and sizes that a stranger has chosen."""
    draw, peak = random.Random(cases), resource.getrusage(resource.RUSAGE_SELF)
    for case in range(cases):
        path = tmp_path / "folder" / str(case)
        shutil.copytree(saved, path)
        (path / bundle.METRICS).unlink()
        kind = draw.randrange(4)
        if kind == 0:
            hostile_archive(path, draw)
            assert not check_loading(path, None)
        elif kind == 1:
            hostile_config(path, draw)
            check_loading(path, None)
        elif kind == 2:
            content = json.loads((path / bundle.TOKENIZER).read_text())
            write_json(path / bundle.TOKENIZER, with_hostile_value(content, draw))
            check_loading(path, None)
        else:
            content = json.loads((saved / bundle.METRICS).read_text())
            del content["sha256"]
            content = sealed(with_hostile_value(content, draw))
            write_json(path / bundle.METRICS, content)
            if check_loading(path, None):
                assert isinstance(tg.load(path).metrics, dict)
        shutil.rmtree(path)
    now = resource.getrusage(resource.RUSAGE_SELF)
    assert now.ru_maxrss - peak.ru_maxrss < 300_000
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (("../outside.txt", b"x"), "it must hold .* got"),
        (("config.json", b"{}"), "it must hold .* got"),
    ],
)
def test_members_of_an_archive_are_not_trusted(saved, tmp_path, member, message):
    path = shutil.copytree(saved, tmp_path / "a" / "run")
    rezip(path / bundle.MODEL, lambda members: [*members.items(), member])
    with pytest.raises(ValueError, match="was replaced: its sha256 is not"):
        tg.load(path)
    (path / bundle.METRICS).unlink()
    with pytest.raises(ValueError, match=message):
        tg.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_declared_sizes_are_checked_before_they_are_believed(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "run")
    (path / bundle.METRICS).unlink()

    def wider(members):
        config = json.loads(members["config.json"])
        config["config"]["config"]["hidden_dim"] = 10**6
        return [*(members | {"config.json": json.dumps(config)}).items()]

    rezip(path / bundle.MODEL, wider)
    with pytest.raises(ValueError, match="declares .* weights or more"):
        tg.load(path)
    bomb = ("model.weights.h5", bytes(10**7), zipfile.ZIP_DEFLATED)
    rezip(
        path / bundle.MODEL,
        lambda members: [*((k, v) for k, v in members.items() if k != bomb[0]), bomb],
    )
    with pytest.raises(ValueError, match="declares 10,000,000 bytes"):
        tg.load(path)


def test_no_other_class_is_looked_up(saved, tmp_path):
    path = shutil.copytree(saved, tmp_path / "run")
    (path / bundle.METRICS).unlink()

    def other(members):
        config = json.loads(members["config.json"])
        config |= {"module": "os", "class_name": "system", "registered_name": "os"}
        return [*(members | {"config.json": json.dumps(config)}).items()]

    rezip(path / bundle.MODEL, other)
    with pytest.raises(ValueError, match="its class must be one of"):
        tg.load(path)


def hostile_command(draw: random.Random, bundle_path, text_path) -> list[str]:
    """A command of which at least one argument is hostile; what is left is small."""
    command = draw.choice(
        ["train", "prepare", "evaluate", "generate", "export", "inspect", "x"]
    )
    small = {
        "train": [str(text_path), "--steps", "1", "--batch-size", "2", "--out", "run",
                  "--hidden-dim", "4", "--num-heads", "1", "--num-layers", "1",
                  "--max-sequence-length", "5", "--jit-compile", "False"],
        "prepare": [str(text_path), "--out", "ids"],
        "generate": [str(bundle_path), "Now", "--max-new-tokens", "2",
                     "--use-cache", "False"],
        "evaluate": [str(bundle_path), str(text_path)],
    }.get(command, [str(bundle_path)])  # fmt: skip
    flags = {
        "train": ["architecture", "preset", "split", "tokenizer", "prompt", "out",
                  "sample-tokens", "steps", "batch-size", "sequence-length",
                  "optimizer", "learning-rate", "schedule", "warmup-steps",
                  "weight-decay", "beta-2", "clip-norm", "ema-momentum", "seed",
                  "gradient-accumulation-steps",
                  "validate-every", "validation-windows", "restore-best", "hidden-dim",
                  "num-heads", "num-kv-heads", "num-layers", "max-sequence-length",
                  "dropout", "attention-window", "positions", "precision"],
        "prepare": ["tokenizer", "vocab-size", "split", "out", "processes"],
        "generate": ["seed", "stop", "context", "unknown", "temperature", "top-k",
                     "top-p", "min-p", "repetition-penalty", "max-new-tokens"],
        "evaluate": ["method", "sequence-length", "unknown"],
        "export": ["format", "out"],
        "inspect": ["text", "corpus", "out", "unknown", "temperature"],
    }.get(command, ["x"])  # fmt: skip
    argv = [command, *small]
    if command in ("export", "inspect") or draw.random() < 0.2:
        argv[1] = draw.choice(HOSTILE_FLAGS)  # the slow commands fail at once
    for _ in range(draw.choice([1, 1, 2])):
        flag, value = draw.choice(flags), draw.choice(HOSTILE_FLAGS)
        argv += [f"--{flag}", value] if draw.random() < 0.8 else [f"--{flag}={value}"]
    return argv


@pytest.mark.parametrize("cases", [20, pytest.param(600, marks=many)])
def test_hostile_arguments_end_with_one_line(
    saved, tmp_path, monkeypatch, capsys, cases
):
    draw = random.Random(cases)
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 9)
    ran, wrong = 0, []
    for case in range(cases):
        folder = tmp_path / "cases" / str(case)
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        argv = hostile_command(draw, saved, text)
        code = 0
        try:
            cli.main(argv)
        except SystemExit as stopped:
            code = stopped.code
        except BaseException as error:
            wrong.append((argv, repr(error)[:200]))
        lines = capsys.readouterr().err.splitlines()
        made = any(path.name == "model.keras" for path in folder.rglob("*"))
        if code == 0:
            ran += 1
        elif code != 2 or len(lines) != 1 or made:
            wrong.append((argv, code, lines, made))
        elif not lines[0].startswith("tinygpt: error: "):
            wrong.append((argv, lines))
        shutil.rmtree(folder)
    assert not wrong
    assert ran < cases / 2
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "cases"}
