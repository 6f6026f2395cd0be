"""The command line: tinygpt train, prepare, evaluate, generate, explore and so on.

Flags come from the config dataclasses. Bad input ends with one line on standard error
and exit code 2, Ctrl-C with exit code 130 (0 where it is the way to end); in both cases
nothing is half-written.
"""

import contextlib
import dataclasses
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from keras_tinygpt import commands
from keras_tinygpt.bundle import PRETRAINED
from keras_tinygpt.explorer.command import explore_command
from keras_tinygpt.generation.sampling import SamplingConfig
from keras_tinygpt.studies.command import study_command
from keras_tinygpt.studies.recipes import recipe
from keras_tinygpt.training import TrainConfig, TrainingDiverged

Bundle = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="BUNDLE")]
USER_ERRORS = (ValueError, OSError, ImportError, TrainingDiverged, UnicodeError)


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a model on a text, score it, save it and print a sample.

    Args:
        corpus: a UTF-8 text file, a folder of .txt files, a quoted pattern such as
            "texts/**/*.txt", a folder made by tinygpt prepare or nanoGPT, "five-nights"
            (comes with the package) or "shakespeare" (downloaded once).
        architecture: gpt or lstm.
        preset: shape of the model and recipe of the training; other flags change
            single values of it. tiny is for the gpt only.
        with_lstm: whether an LSTM of the same preset is trained too, for comparison.
        tokenizer: char (one token a character), byte (UTF-8 bytes) or bpe (byte pairs
            learned on the training part; needs the tokenizers package).
        vocab_size: most tokens of the bpe tokenizer, at least 256; default is 2048.
        split: fractions (0.9 0.1) or token counts (1000000 55000 60394) of the
            training, validation and optional test part, in the order of the text; for
            bpe counts of characters.
        out: folder of the run; default saved_models/CORPUS-PRESET.
        force: whether an existing run in that folder is replaced; it waits under the
            name OUT.previous until the new one is complete.
        resume: whether the interrupted run in that folder is continued.
        precision: float32, mixed_bfloat16 or mixed_float16.
        rematerialize: whether blocks are computed again for the backward pass, which
            takes less memory and more time (gpt without dropout).
        prompt: start of the sample; default is the first line of the validation part.
        sample_tokens: length of the sample, in tokens.
        show_samples: whether a short sample is printed at every validation.
        tensorboard: whether TensorBoard logs are written (needs that package).
    """

    corpus: tyro.conf.Positional[str] = "five-nights"
    architecture: Literal["gpt", "lstm"] = "gpt"
    preset: Literal["book", "mini", "tiny"] = "book"
    with_lstm: bool = False
    tokenizer: Literal["char", "byte", "bpe"] = "char"
    vocab_size: int | None = None
    split: tuple[float, ...] = (0.9, 0.1)
    out: Path | None = None
    force: bool = False
    resume: bool = False
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    rematerialize: bool = False
    prompt: str | None = None
    sample_tokens: int = 300
    show_samples: bool = False
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Write the token ids of a text of any size to files that tinygpt train reads.

    The same command goes on where it was stopped.

    Args:
        corpus: text file, folder, quoted pattern or corpus name, as in tinygpt train.
        tokenizer: char, byte, bpe (learned on the training part, the first 100 MB of
            it at most), or path of a tokenizer.json or of a folder with one, or with
            GPT-2's vocab.json and merges.txt.
        vocab_size: most tokens of the bpe tokenizer, at least 256; default is 2048.
        split: fractions or token counts of the training, validation and optional test
            part, in the order of the text.
        out: folder to write; default saved_models/CORPUS-ids.
        processes: how many encode; default is one a core.
        force: whether what is there already, unfinished work too, is replaced.
    """

    corpus: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CORPUS")]
    tokenizer: str = "char"
    vocab_size: int | None = None
    split: tuple[float, ...] = (0.99, 0.01)
    out: Path | None = None
    processes: int | None = None
    force: bool = False


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Score a saved model on a text.

    Args:
        bundle: folder made by tinygpt train, or SavedModel made by tinygpt export.
        corpus: text file or corpus name; default is the held-out part of the corpus
            the model was trained on.
        method: windows, strided or stateful; default is the best the model can do.
        sequence_length: tokens per window; default is the model's window.
        unknown: what to do with characters the model does not know: error, drop, or a
            character to put in their place.
    """

    bundle: Bundle
    corpus: tyro.conf.Positional[str | None] = None
    method: Literal["windows", "strided", "stateful"] | None = None
    sequence_length: int | None = None
    unknown: str = "error"


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a saved model, printed as it is made.

    Args:
        bundle: folder made by tinygpt train, SavedModel made by tinygpt export, or
            GPT-2, Llama, Mistral or Qwen2 in a transformers folder; default is the
            model in the package.
        prompt: text to continue; read from standard input when empty or left out, or
            "ROMEO:" at a terminal with the model in the package.
        max_new_tokens: most tokens to add.
        num_samples: number of continuations; sample i uses seed + i.
        seed: of the draws.
        stop: text at which to end; may be given more than once.
        context: what happens when the window is full: crop (read the last window at
            every step), slide (drop to half a window, fast) or stop.
        use_cache: whether keys and values are kept: the same text, faster.
        unknown: what to do with characters the model does not know: error, drop, or a
            character to put in their place.
    """

    bundle: tyro.conf.Positional[Path] = Path(PRETRAINED)
    prompt: tyro.conf.Positional[str] = ""
    max_new_tokens: int = 300
    num_samples: int = 1
    seed: int = 0
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    context: Literal["crop", "slide", "stop"] = "crop"
    use_cache: bool = True
    unknown: str = "error"


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a saved model in a format that other programs read.

    Args:
        bundle: folder made by tinygpt train.
        format: saved_model (a TensorFlow folder: text in, text out); onnx, litert or
            openvino (a folder with the graphs of a cached step); safetensors (a GPT-2
            or Llama folder for transformers); int8 (a bundle with matrices of int8, a
            third of the size); or weights (a file for load_weights of the same Keras
            model).
        out: folder or file to write; default is in the bundle, named by the format.
        force: whether what is there already is replaced.
    """

    bundle: Bundle
    format: Literal[
        "saved_model", "onnx", "litert", "openvino", "safetensors", "int8", "weights"
    ] = "saved_model"
    out: Path | None = None
    force: bool = False


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """Look inside a saved model: attention, heads, leaks, surprise, as figures.

    Args:
        bundle: folder made by tinygpt train.
        text: the text that is shown, up to 1,024 tokens of it; default is the first
            window of the held-out text.
        corpus: held-out text, a file or a corpus name, that the heads are measured on;
            default is the held-out part of the corpus the model was trained on, or of
            five-nights where that one is not at hand.
        out: folder for the figures and inspection.json; default BUNDLE/inspection.
        unknown: what to do with characters the model does not know: error, drop, or a
            character to put in their place.
    """

    bundle: Bundle
    text: str | None = None
    corpus: str | None = None
    out: Path | None = None
    unknown: str = "error"


@dataclasses.dataclass(frozen=True)
class ExploreOptions:
    """Show a saved model at work on a page in the browser, served on this machine.

    Args:
        bundle: folder made by tinygpt train, SavedModel made by tinygpt export, or
            transformers folder; default is the model in the package.
        prompt: text the page begins with; default is a short one.
        port: where the page is served, on 127.0.0.1 alone; 0 takes a free port.
        export: an .html file to write instead, which shows the prompt without a server.
        force: whether that file may be replaced.
    """

    bundle: tyro.conf.Positional[Path] = Path(PRETRAINED)
    prompt: str | None = None
    port: int = 8321
    export: Path | None = None
    force: bool = False


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """Compare models under stated budgets: a table, a figure, the results as JSON.

    Runs that are complete are read, interrupted ones go on.

    Args:
        name: book (positions and recurrence), mini (tiny Shakespeare), nanogpt (the
            same with nanoGPT's split), quality (seconds until a given loss), context
            (loss by position and past the window; cost by length), reversal (what the
            heads learn on a task with a known algorithm), dates (an encoder-decoder
            and a GPT translate) or filling (an encoder and a GPT tell hidden
            characters).
        corpus: text instead of the study's own; reversal and dates have none.
        seeds: runs per model, with seeds 0, 1, and so on.
        only: name of a model to train now; may be given more than once.
        steps: updates of every run instead of the study's, for a quick trial.
        folder: where the runs go; default saved_models/studies/NAME, for context that
            of book, whose models it reads.
        out: where NAME.json and the figures go; default is the folder given, or else
            saved_models/studies/NAME.
    """

    name: tyro.conf.Positional[
        Literal[
            *("book", "mini", "nanogpt", "quality"),
            *("context", "reversal", "dates", "filling"),
        ]
    ]
    corpus: str | None = None
    seeds: int = 3
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    steps: int | None = None
    folder: Path | None = None
    out: Path | None = None


def flags_of(config: Any, *without: str) -> type:
    """A dataclass with the fields of `config` and its values as defaults."""
    fields = [
        (field.name, field.type, dataclasses.field(default=getattr(config, field.name)))
        for field in dataclasses.fields(config)
        if field.name not in without
    ]
    kind, *ancestors, _ = type(config).__mro__
    return dataclasses.make_dataclass(
        kind.__name__,
        fields,
        # Their docstrings explain the fields that are inherited.
        bases=tuple(type(x.__name__, (), {"__doc__": x.__doc__}) for x in ancestors),
        namespace={"__doc__": kind.__doc__},
        frozen=True,
    )


def _parse(command: str, parts: dict[str, type], argv: list[str]) -> dict[str, Any]:
    """Parses the flags of several dataclasses as one flat list."""
    first = next(iter(parts.values()))
    combined = dataclasses.make_dataclass(
        "Flags",
        [(name, tyro.conf.OmitArgPrefixes[part]) for name, part in parts.items()],
    )
    box = io.StringIO()
    wide = contextlib.nullcontext()
    if not {"-h", "--help"} & set(argv):
        wide = _columns(10_000)  # an error is not broken into lines
    try:
        with wide, contextlib.redirect_stderr(box):
            flags = tyro.cli(
                tyro.conf.OmitArgPrefixes[combined],
                prog=f"tinygpt {command}",
                description=first.__doc__.split("\n")[0],
                args=argv,
            )
    except SystemExit as stopped:
        if stopped.code:
            _fail(f"{_unboxed(box.getvalue())} (see tinygpt {command} --help)")
        raise
    return {name: getattr(flags, name) for name in parts}


@contextlib.contextmanager
def _columns(count: int) -> Iterator[None]:
    """Has the terminal so many columns, as far as Python can tell."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(count)
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _unboxed(text: str) -> str:
    """The line under the title of an error box, or two where the first introduces."""
    lines = [line.strip(" │╭╮╰╯─-") for line in text.splitlines()]
    title, *body = [line for line in lines if line] or ["bad flags"]
    body = body or [title]
    count = 2 if body[0].endswith(":") else 1
    return " ".join(body[:count]).replace("'options.", "'")


def _train(argv: list[str]) -> None:
    chosen = {
        field.name: _peek(argv, field.name, field.default)
        for field in dataclasses.fields(TrainOptions)
        if field.name in ("architecture", "preset")
    }
    preset = recipe(**chosen)
    parts = _parse(
        "train",
        {
            "options": TrainOptions,
            "model": flags_of(preset.model, "vocab_size"),
            "training": flags_of(preset.training),
        },
        argv,
    )
    commands.train_command(
        parts["options"],
        dataclasses.asdict(parts["model"]),
        TrainConfig(**dataclasses.asdict(parts["training"])),
        argv,
    )


def _prepare(argv: list[str]) -> None:
    commands.prepare_command(
        _parse("prepare", {"options": PrepareOptions}, argv)["options"]
    )


def _peek(argv: list[str], name: str, default: str) -> str:
    """The value of one flag, before the others are known."""
    flag, value = f"--{name}", default
    for index, argument in enumerate(argv):
        if argument == flag and index + 1 < len(argv):
            value = argv[index + 1]
        elif argument.startswith(flag + "="):
            value = argument.split("=", 1)[1]
    return value


def _evaluate(argv: list[str]) -> None:
    commands.evaluate_command(
        _parse("evaluate", {"options": EvaluateOptions}, argv)["options"]
    )


def _generate(argv: list[str]) -> None:
    sampling = flags_of(SamplingConfig(), "allowed_tokens")
    parts = _parse("generate", {"options": GenerateOptions, "sampling": sampling}, argv)
    commands.generate_command(parts["options"], dataclasses.asdict(parts["sampling"]))


def _export(argv: list[str]) -> None:
    commands.export_command(
        _parse("export", {"options": ExportOptions}, argv)["options"]
    )


def _inspect(argv: list[str]) -> None:
    sampling = flags_of(SamplingConfig(), "allowed_tokens")
    parts = _parse("inspect", {"options": InspectOptions, "sampling": sampling}, argv)
    commands.inspect_command(
        parts["options"], SamplingConfig(**dataclasses.asdict(parts["sampling"]))
    )


def _explore(argv: list[str]) -> None:
    without = ("allowed_tokens", "repetition_penalty", "min_p")  # not on the page
    sampling = flags_of(SamplingConfig(), *without)
    parts = _parse("explore", {"options": ExploreOptions, "sampling": sampling}, argv)
    explore_command(
        parts["options"], SamplingConfig(**dataclasses.asdict(parts["sampling"]))
    )


def _study(argv: list[str]) -> None:
    options = _parse("study", {"options": StudyOptions}, argv)["options"]
    study_command(options, argv)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "prepare": _prepare,
    "evaluate": _evaluate,
    "generate": _generate,
    "export": _export,
    "inspect": _inspect,
    "explore": _explore,
    "study": _study,
}


def main(argv: list[str] | None = None) -> None:
    """Runs one command and exits: 0, 2 on bad input, 130 on Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        sys.exit(0 if argv else 2)
    if argv[0] == "--version":
        from keras_tinygpt import __version__

        print(f"tinygpt {__version__}")
        sys.exit(0)
    if argv[0] not in COMMANDS:
        _fail(f"command must be one of {', '.join(COMMANDS)}, got {argv[0]!r}")
    try:
        COMMANDS[argv[0]](argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as error:
        print(
            f"\ntinygpt: stopped{': ' + str(error) if str(error) else ''}",
            file=sys.stderr,
        )
        sys.exit(128 + getattr(error, "signal", signal.SIGINT))
    except MemoryError as error:
        _fail(f"not enough memory: {_one_line(error)}")
    except USER_ERRORS as error:
        _fail(_one_line(error))


def _usage() -> str:
    lines = ["usage: tinygpt COMMAND [flags]", ""]
    for name, options in (
        ("train", TrainOptions),
        ("prepare", PrepareOptions),
        ("evaluate", EvaluateOptions),
        ("generate", GenerateOptions),
        ("export", ExportOptions),
        ("inspect", InspectOptions),
        ("explore", ExploreOptions),
        ("study", StudyOptions),
    ):
        lines.append(f"  {name:<10}{options.__doc__.splitlines()[0]}")
    return "\n".join([*lines, "", "tinygpt COMMAND --help lists the flags."])


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return " ".join(text.split()) or type(error).__name__


def _fail(message: str) -> None:
    print(f"tinygpt: error: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
