"""What the commands do, as functions of plain options.

`cli` turns flags into these options; everything here can be called from Python.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import rich.progress

from keras_tinygpt import bundle as bundles
from keras_tinygpt.callbacks import SampleText
from keras_tinygpt.checks import check_int
from keras_tinygpt.evaluation import Scores, evaluate
from keras_tinygpt.export import formats
from keras_tinygpt.export.saved_model import export_saved_model
from keras_tinygpt.files import replace_file
from keras_tinygpt.generation import SamplingConfig
from keras_tinygpt.generation.decoding import MAX_NEW_TOKENS
from keras_tinygpt.inspection.report import write_report
from keras_tinygpt.models import (
    GPTConfig,
    LSTMConfig,
)
from keras_tinygpt.models.gpt import remat_scope
from keras_tinygpt.plots import plot_history
from keras_tinygpt.pretrained.writing import export_safetensors
from keras_tinygpt.speed import speed_line
from keras_tinygpt.studies.recipes import recipe
from keras_tinygpt.studies.runs import (
    CHECKPOINT,
    Row,
    Run,
    count_ngrams,
    fit_run,
    print_table,
    run_metrics,
    score_run,
)
from keras_tinygpt.text import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Corpus,
    Prepared,
    encode_corpus,
    even_starts,
    load_corpus,
    load_prepared,
    prepare,
    split_ids,
    split_parts,
    window_schedule,
)
from keras_tinygpt.text.corpus import EMBEDDED_NAME, find_texts
from keras_tinygpt.text.prepared import find_tokenizer, is_prepared
from keras_tinygpt.text.preparing import BPE_VOCAB_SIZE, KINDS
from keras_tinygpt.training import (
    TrainConfig,
    TrainingStopped,
    TrainResult,
    model_window,
)

MARK = ".set-aside"  # in a run that waits until the one that replaces it is complete
COUNTED_TOKENS = 20_000_000  # training tokens that n-grams are counted on, at most


def train_command(
    options: Any, model_flags: dict[str, Any], training: TrainConfig, argv: list[str]
) -> Path:
    """Trains, scores, saves, plots and samples; returns the bundle folder.

    Args:
        options: a `cli.TrainOptions`.
        model_flags: fields of the model's config, vocab_size left out.
        training: how to train.
        argv: the flags as typed, for the line that says how to go on.
    """
    corpus, tokenizer, parts, characters = _read_parts(options)
    make = GPTConfig if options.architecture == "gpt" else LSTMConfig
    config = make(vocab_size=tokenizer.vocab_size, **model_flags)
    length = training.sequence_length or config.max_sequence_length
    window_schedule(len(parts["train"]), length, 1, 1, name="the training part")
    for name in list(parts)[1:]:
        even_starts(len(parts[name]), length, name=f"the {name} part")
    check_int("sample_tokens", options.sample_tokens, 0, MAX_NEW_TOKENS)
    _check_memory(config)
    if options.rematerialize:
        remat_scope(config)  # which a GPT alone has
    prompt = _first_line(tokenizer, parts) if options.prompt is None else options.prompt
    if len(tokenizer.encode(prompt)) == 0:  # this, and unknown characters, come first
        raise ValueError(f"prompt must hold at least one character, got {prompt!r}")

    kind = options.preset + ("-lstm" if options.architecture == "lstm" else "")
    out = options.out or Path("saved_models", f"{Path(corpus.name).stem}-{kind}")
    if out.is_symlink() or not out.name or ".." in out.parts:
        out = out.resolve()  # a folder that has a name and can be moved
    rematerialize = options.rematerialize
    jobs = [Run(kind, out, config, training, options.precision, rematerialize)]
    if options.with_lstm and options.architecture == "gpt":
        jobs.append(_lstm_beside(jobs[0], options.preset))
    _claim(out, options)
    sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items())
    print(f"{corpus.name}: vocabulary {tokenizer.vocab_size}; tokens: {sizes}")

    rates = {name: len(parts[name]) / count for name, count in characters.items()}
    counts = []
    if len(parts["train"]) <= COUNTED_TOKENS:
        counts = count_ngrams(parts, tokenizer.vocab_size)
    counts = [_with_rates(row, rates) for row in counts]
    rows, histories = [], {}
    for job in jobs:
        callbacks = [SampleText(tokenizer, prompt)] if options.show_samples else []
        model, result = _fit(job, out, parts, options, argv, callbacks)
        held_out = {name: ids for name, ids in parts.items() if name != "train"}
        row = _with_rates(score_run(job, model, result, held_out), rates)
        metrics = {
            "command": shlex.join(["tinygpt", "train", *argv]),
            **run_metrics(job, model, result, row, corpus, str(options.corpus), parts),
            "tokenizer": tokenizer.kind,
            "characters": characters,
            "ngrams": {count.name: count.part_scores() for count in counts},
        }
        bundles.save(job.folder, model, tokenizer, metrics, overwrite=True)
        rows.append(row)
        histories[job.name] = result.history
        speed = speed_line(model, result.tokens_per_second, training.sequence_length)
        print(f"{job.name}: {speed}", flush=True)
    print_table([*rows, *counts])
    plot_history(
        histories,
        out / "curve.png",
        baselines={row.name: row.scores["valid"].nats for row in counts},
        title=f"{corpus.name}: loss during training",
    )
    print(f"\nsample (temperature 0.8, seed {training.seed}):\n")
    _print_stream(bundles.load(out), prompt, options.sample_tokens, seed=training.seed)
    if _has_earlier_run(out):
        shutil.rmtree(_set_aside(out))
    print(f"\n\nsaved {out}: model.keras, tokenizer.json, metrics.json, curve.png")
    print(f"continue a text: tinygpt generate {shlex.quote(str(out))} 'your prompt'")
    return out


def _read_parts(
    options: Any,
) -> tuple[Corpus | Prepared, Any, dict[str, np.ndarray], dict[str, int]]:
    """The text, its tokenizer, the ids of each part, and how long the parts are."""
    if not is_prepared(options.corpus):
        corpus = load_corpus(options.corpus)
        return corpus, *_tokenize(corpus, options)
    for field in dataclasses.fields(options):
        if field.name in ("tokenizer", "vocab_size", "split"):
            value = getattr(options, field.name)
            if value != field.default:
                raise ValueError(
                    f"{field.name} must be left out for prepared ids, got {value!r}"
                )
    prepared = load_prepared(options.corpus)
    if prepared.tokenizer is None:
        raise ValueError(
            f"corpus must have a tokenizer: put the tokenizer.json, or vocab.json and "
            f"merges.txt, that made the ids of {options.corpus} beside them"
        )
    return prepared, prepared.tokenizer, prepared.parts, prepared.characters


def _tokenize(
    corpus: Corpus, options: Any
) -> tuple[Any, dict[str, np.ndarray], dict[str, int]]:
    """The tokenizer, the ids of each part, and how many characters each part has.

    Characters and bytes are cut into parts as tokens. For byte pairs the text is cut,
    so that they are learned on the training part alone.
    """
    if options.tokenizer == "bpe":
        codes = np.frombuffer(corpus.text.encode("utf-32-le"), "<u4")
        texts = {
            name: part.tobytes().decode("utf-32-le")
            for name, part in split_parts(codes, options.split).items()
        }
        size = BPE_VOCAB_SIZE if options.vocab_size is None else options.vocab_size
        tokenizer = BPETokenizer.from_text(texts["train"], size)
        parts = {
            name: tokenizer.encode(text, dtype=tokenizer.ids_dtype)
            for name, text in texts.items()
        }
        return tokenizer, parts, {name: len(text) for name, text in texts.items()}
    if options.vocab_size is not None:
        raise ValueError(
            f"vocab_size needs --tokenizer bpe, got {options.vocab_size} with "
            f"{options.tokenizer}"
        )
    tokenizer = ByteTokenizer()
    if options.tokenizer == "char":
        tokenizer = CharTokenizer.from_text(corpus)
    if tokenizer.vocab_size < 2:
        raise ValueError(
            f"corpus must have at least 2 distinct characters, got {corpus.name} with 1"
        )
    parts = split_parts(encode_corpus(corpus, tokenizer), options.split)
    characters = {name: len(tokenizer.decode(ids)) for name, ids in parts.items()}
    return tokenizer, parts, characters


def _with_rates(row: Row, rates: dict[str, float]) -> Row:
    """A row that knows how many tokens a character takes in each part."""
    return dataclasses.replace(row, tokens_per_character=rates)


def _check_memory(config: GPTConfig | LSTMConfig) -> None:
    """Raises ValueError for weights that this machine's memory cannot hold."""
    needed = 4 * config.least_weights()
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"the model must fit into memory: its weights take {needed / 1e9:,.1f} GB "
            f"or more, the machine has {there / 1e9:,.1f}"
        )


def _first_line(tokenizer: Any, parts: dict[str, np.ndarray]) -> str:
    """A short prompt: the first whole line of the held-out text."""
    text = tokenizer.decode(parts["valid"][:400])
    lines = [line for line in text.split("\n")[1:-1] if line.strip()]
    return f"{lines[0][:60]}\n" if lines else text[:60]


def _lstm_beside(job: Run, preset: str) -> Run:
    """The LSTM of the same preset under the same budget."""
    base = recipe("lstm", "mini" if preset == "tiny" else preset)
    config = dataclasses.replace(
        base.model,
        vocab_size=job.config.vocab_size,
        max_sequence_length=job.config.max_sequence_length,
    )
    shared = ("steps", "batch_size", "sequence_length", "seed", "validate_every")
    training = dataclasses.replace(
        base.training, **{name: getattr(job.training, name) for name in shared}
    )
    return Run(f"{preset}-lstm", job.folder / "lstm", config, training, job.precision)


def _claim(out: Path, options: Any) -> None:
    """Makes the folder of a new run; an earlier run there is moved aside."""
    if options.resume and options.force:
        raise ValueError("resume and force exclude each other, got both")
    if options.resume:
        if not (out / CHECKPOINT).exists():
            raise ValueError(f"resume needs an interrupted run, found none in {out}")
        return
    if out.is_dir() and any(out.iterdir()):
        if not options.force:
            raise FileExistsError(
                f"out: {out} exists already; --force replaces it, --resume continues it"
            )
        if not ((out / bundles.MODEL).exists() or (out / CHECKPOINT).exists()):
            raise FileExistsError(f"out: {out} is not a run, so force leaves it alone")
        _put_aside(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out: {out} cannot be made: {error.strerror}") from error


def _set_aside(out: Path) -> Path:
    """Where an earlier run waits until the one that replaces it is complete."""
    return out.with_name(f"{out.name}.previous")


def _has_earlier_run(out: Path) -> bool:
    """Whether a run waits there, not a folder of that name which is the user's."""
    return (_set_aside(out) / MARK).exists()


def _put_aside(out: Path) -> None:
    """Makes room for a new run; of two earlier ones the complete one is kept."""
    aside = _set_aside(out)
    if os.path.lexists(aside) and not _has_earlier_run(out):
        raise FileExistsError(
            f"out: {aside} is in the way, where --force would keep the run it replaces"
        )
    if out.is_mount():
        raise OSError(f"out: {out} is a mount point; --force needs a folder in it")
    if aside.exists() and not (out / bundles.MODEL).exists():
        shutil.rmtree(out)
        return
    shutil.rmtree(aside, ignore_errors=True)
    (out / MARK).touch()
    out.rename(aside)


def _fit(
    job: Run, out: Path, parts, options, argv, callbacks
) -> tuple[keras.Model, TrainResult]:
    """Trains; an interruption says what is kept and how to go on."""
    try:
        return fit_run(
            job,
            parts,
            resume=options.resume,
            callbacks=callbacks,
            tensorboard=options.tensorboard,
        )
    except KeyboardInterrupt as error:
        number = getattr(error, "signal", signal.SIGINT)
        message = _how_to_go_on(job.folder, out, argv)
        raise TrainingStopped(number, message) from None
    finally:
        for folder in (job.folder / "checkpoints", job.folder):
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if nothing was written


def _how_to_go_on(folder: Path, out: Path, argv: list[str]) -> str:
    """What an interrupted run leaves, and the command that continues it."""
    if not (out / CHECKPOINT).exists():
        message = "before the first checkpoint; nothing was saved"
        if _has_earlier_run(out):
            message += f"; the earlier run is in {_set_aside(out)}"
        return message
    kept = f"{out} is complete"
    if (folder / CHECKPOINT).exists():
        content = json.loads((folder / CHECKPOINT).read_text("utf-8"))
        step = content["checkpoints"][0]["step"]
        kept = f"the checkpoint of step {step} in {folder} is kept"
    arguments = [a for a in argv if a not in ("--force", "--resume")]
    command = shlex.join(["tinygpt", "train", *arguments, "--resume"])
    return f"{kept}; go on with: {command}"


def prepare_command(options: Any) -> Path:
    """Writes the token ids of a text to a folder; see `cli.PrepareOptions`."""
    tokenizer, started = options.tokenizer, time.perf_counter()
    if tokenizer not in KINDS:
        tokenizer = find_tokenizer(tokenizer)
    out = options.out
    if out is None:
        out = Path("saved_models", f"{Path(find_texts(options.corpus)[0]).stem}-ids")
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns()[:2],
        rich.progress.DownloadColumn(),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task(str(out), total=None)
        prepared = prepare(
            options.corpus,
            out,
            tokenizer,
            options.vocab_size,
            split=options.split,
            processes=options.processes,
            overwrite=options.force,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    sizes = ", ".join(f"{name} {len(ids):,}" for name, ids in prepared.parts.items())
    vocabulary = prepared.tokenizer.vocab_size
    print(
        f"{prepared.name}: vocabulary {vocabulary}; tokens: {sizes}; "
        f"{time.perf_counter() - started:.1f} s"
    )
    print(f"saved {out}: train with: tinygpt train {shlex.quote(str(out))}")
    return out


def _load(path: Path) -> bundles.LanguageModel:
    """A model that reads and writes text."""
    language_model = bundles.load(path)
    language_model.check_tokenizer()
    return language_model


def evaluate_command(options: Any) -> Scores:
    """Scores a bundle on a text and prints the figures; see `cli.EvaluateOptions`."""
    language_model = _load(options.bundle)
    tokenizer = language_model.tokenizer
    if options.corpus is None:
        ids, title = _held_out_part(language_model, options.bundle)
        text = tokenizer.decode(ids)
    else:
        corpus = load_corpus(options.corpus)
        ids = encode_corpus(corpus, tokenizer, unknown=options.unknown)
        text, title = corpus.text, corpus.name
        if options.unknown == "drop":
            text = tokenizer.decode(ids)
    scores = evaluate(
        language_model.model,
        ids,
        options.method,
        sequence_length=options.sequence_length,
    )
    print(
        f"{title}: {scores.nats:.4f} nats per token, perplexity "
        f"{scores.perplexity:.3f}, {scores.bits_per_token:.4f} bits per token, "
        f"{scores.bits_per_token * len(ids) / len(text):.4f} bits per character, "
        f"{scores.tokens:,} tokens scored"
    )
    return scores


def _held_out_part(
    language_model: bundles.LanguageModel, bundle: Path
) -> tuple[np.ndarray, str]:
    """Ids and title of the last part of the corpus a model was trained on."""
    metrics = language_model.metrics
    try:
        source, sha256 = (metrics["corpus"][name] for name in ("source", "sha256"))
        split = {str(name): int(count) for name, count in metrics["split"].items()}
        characters = metrics.get("characters", split)
        characters = {name: int(characters[name]) for name in split}
        source = str(source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"corpus must be given: {bundle} does not name one") from error
    prepared = is_prepared(source)
    corpus = load_prepared(source) if prepared else load_corpus(source)
    if corpus.sha256 != sha256:
        raise ValueError(
            f"corpus {source} is not the text the model was trained on (its sha256 "
            "differs); name the text to score"
        )
    tokenizer = language_model.tokenizer
    if prepared:
        if corpus.tokenizer != tokenizer:
            raise ValueError(f"corpus {source} holds the ids of another tokenizer")
        ids = corpus.parts[list(split)[-1]]
    elif tokenizer.concatenates:
        ids = encode_corpus(corpus, tokenizer)
        ids = split_ids(ids, counts=list(split.values()))[-1]
    else:  # the text was cut, not its tokens
        last = sum(characters.values()) - characters[list(split)[-1]]
        ids = tokenizer.encode(corpus.text[last : sum(characters.values())])
    return ids, f"{corpus.name}, {list(split)[-1]} part"


def inspect_command(options: Any, sampling: SamplingConfig) -> Path:
    """Writes figures and numbers of a bundle; returns the folder they are in.

    Args:
        options: a `cli.InspectOptions`.
        sampling: temperature and filters of the next-token view.
    """
    language_model = _load(options.bundle)
    model, tokenizer = language_model.model, language_model.tokenizer
    held_out, title = _inspected_text(language_model, options)
    length = model_window(model)
    if len(held_out) <= 2 * length:
        raise ValueError(
            f"corpus must hold more than two windows of {length} tokens, got "
            f"{len(held_out)} of {title} (name a longer text with --corpus)"
        )
    text = held_out[:length]
    if options.text is not None:
        text = tokenizer.encode(options.text, unknown=options.unknown)
    if len(text) < 3:
        raise ValueError(f"text must hold at least 3 tokens, got {len(text)}")
    out = options.out or options.bundle / "inspection"
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"out: {out} exists and is not a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out: {out} cannot be made: {error.strerror}") from error
    print(f"{options.bundle}: {model.count_params():,} parameters; held-out: {title}")
    with bundles.new_folder(out) as folder:
        write_report(model, tokenizer, text, held_out, folder, sampling)
        names = sorted(path.name for path in folder.iterdir())
    print(f"\nsaved {out}: {', '.join(names)}")
    return out


def _inspected_text(
    language_model: bundles.LanguageModel, options: Any
) -> tuple[np.ndarray, str]:
    """Ids and title of the text the heads are measured on."""
    if options.corpus is not None:
        corpus = load_corpus(options.corpus)
        ids = encode_corpus(corpus, language_model.tokenizer, unknown=options.unknown)
        return ids, corpus.name
    try:
        return _held_out_part(language_model, options.bundle)
    except (ValueError, OSError):  # it names none, or the file is not there any more
        corpus = load_corpus(EMBEDDED_NAME)
        ids = encode_corpus(corpus, language_model.tokenizer, unknown="drop")
        return split_ids(ids)[-1], f"{corpus.name}, known characters of the last tenth"


def generate_command(options: Any, sampling: dict[str, Any]) -> None:
    """Prints continuations of a prompt as they are made; see `cli.GenerateOptions`."""
    check_int("num_samples", options.num_samples)
    prompt = options.prompt
    at_terminal = sys.stdin is None or sys.stdin.isatty()
    if not prompt and at_terminal:
        if str(options.bundle) != bundles.PRETRAINED:
            raise ValueError("prompt must be given as an argument or on standard input")
        prompt = "ROMEO:"
    elif not prompt:
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                "prompt on standard input must be UTF-8, got byte "
                f"0x{error.object[error.start]:02x} at offset {error.start}"
            ) from error
    language_model = _load(options.bundle)
    for index in range(options.num_samples):
        if options.num_samples > 1:
            print(f"{'' if index == 0 else chr(10)}--- sample {index + 1} ---")
        _print_stream(
            language_model,
            prompt,
            options.max_new_tokens,
            stop=options.stop,
            seed=options.seed + index,
            context=options.context,
            use_cache=options.use_cache,
            unknown=options.unknown,
            **sampling,
        )
        print()


def _print_stream(
    language_model: bundles.LanguageModel, prompt: str, max_new_tokens: int, **settings
) -> None:
    """Prints the prompt and its continuation, each piece as soon as it is decided."""
    pieces = language_model.stream(prompt, max_new_tokens, **settings)
    print(prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)


def export_command(options: Any) -> Path:
    """Writes a bundle in another format; see `cli.ExportOptions`."""
    name, write = EXPORTS[options.format]
    out = options.out or options.bundle / name
    language_model = _load(options.bundle)
    if out.exists() and not options.force:
        raise FileExistsError(f"out: {out} exists already; --force replaces it")
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"writing {out} ...", flush=True)
    write(language_model, out, options.force)
    files = [path for path in (out, *out.rglob("*")) if path.is_file()]
    print(f"saved {out}: {sum(path.stat().st_size for path in files) / 1e6:.1f} MB")
    return out


def _write_saved_model(
    language_model: bundles.LanguageModel, out: Path, overwrite: bool
) -> None:
    export_saved_model(
        language_model.model,
        language_model.tokenizer,
        out,
        metrics=language_model.metrics,
        overwrite=overwrite,
    )


def _write_weights(
    language_model: bundles.LanguageModel, out: Path, overwrite: bool
) -> None:
    del overwrite  # the caller has asked
    if not out.name.endswith(".weights.h5"):
        raise ValueError(f"out must end in .weights.h5, got {str(out)!r}")
    replace_file(out, language_model.model.save_weights)


def _write_format(
    export: Callable, language_model: bundles.LanguageModel, out: Path, overwrite: bool
) -> None:
    export(language_model.model, language_model.tokenizer, out, overwrite=overwrite)


def _write_int8(
    language_model: bundles.LanguageModel, out: Path, overwrite: bool
) -> None:
    """A bundle whose matrices are int8."""
    model, tokenizer = language_model.model, language_model.tokenizer
    if model.quantization is not None:
        raise ValueError(f"bundle must not be quantized, got {model.quantization}")
    model.quantize("int8")
    bundles.save(out, model, tokenizer, language_model.metrics, overwrite=overwrite)


# By format: the name inside the bundle's folder unless told, and what writes it.
EXPORTS: dict[str, tuple[str, Callable[[bundles.LanguageModel, Path, bool], None]]] = {
    "saved_model": ("saved_model", _write_saved_model),
    "onnx": ("onnx", functools.partial(_write_format, formats.export_onnx)),
    "litert": ("litert", functools.partial(_write_format, formats.export_litert)),
    "openvino": ("openvino", functools.partial(_write_format, formats.export_openvino)),
    "safetensors": (
        "safetensors",
        functools.partial(_write_format, export_safetensors),
    ),
    "int8": ("int8", _write_int8),
    "weights": ("model.weights.h5", _write_weights),
}
