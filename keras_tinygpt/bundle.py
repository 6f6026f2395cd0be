"""A trained model as one folder: weights, tokenizer, scores.

A bundle holds `model.keras`, `tokenizer.json` and `metrics.json`, which knows the
sha256 of the other two; other files beside them (history, plots, checkpoints) are left
alone. Loading runs no code from the files and believes none of the sizes in them.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_tinygpt.archive import check_archive
from keras_tinygpt.export.reading import is_saved_model, read_saved_model
from keras_tinygpt.files import file_sha256, read_sealed, sealed, write_json
from keras_tinygpt.generation import generate, stream
from keras_tinygpt.models.configured import ConfiguredModel, count_tokens
from keras_tinygpt.pretrained.reading import is_pretrained, read_pretrained
from keras_tinygpt.text.tokenizers import load_tokenizer

FORMAT_VERSION = 1
PRETRAINED = "tiny-shakespeare"
_PACKAGE = Path(__file__).resolve().parent
MODEL, TOKENIZER, METRICS = "model.keras", "tokenizer.json", "metrics.json"


def save(
    path: str | os.PathLike,
    model: keras.Model,
    tokenizer: Any,
    metrics: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
) -> Path:
    """Writes a bundle folder, whole or not at all; the optimizer is left out.

    Low-rank adapters of Keras' `enable_lora` are added to their kernels.

    Args:
        path: the folder; its parents are made.
        model: from any `build_` function of this package.
        tokenizer: one of this package; its vocab_size is the model's.
        metrics: anything JSON can hold.
        overwrite: whether an existing bundle at `path` is replaced.

    Returns:
        The folder.

    Raises:
        ValueError: if tokenizer and model disagree, or the model is of another kind.
        FileExistsError: if `path` exists and `overwrite` is False.
    """
    path = Path(path)
    if not isinstance(model, ConfiguredModel):
        raise ValueError(
            "model must be one that a build_ function of this package made, to be "
            f"loaded again, got {type(model).__name__}; use model.save for others"
        )
    check_pair(model, tokenizer)
    check_free(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(path) as folder:
        plain_model(model).save(folder / MODEL)
        tokenizer.save(folder / TOKENIZER)
        content = {
            "format_version": FORMAT_VERSION,
            "metrics": metrics or {},
            "files": {name: file_sha256(folder / name) for name in (MODEL, TOKENIZER)},
        }
        write_json(folder / METRICS, sealed(content))
    return path


def plain_model(model: keras.Model) -> keras.Model:
    """The model itself, or a copy of one that carries more than its own weights.

    An optimizer, thrice the model's size, is left out; low-rank adapters are added to
    their kernels.
    """
    adapted = any("lora_" in weight.path for weight in model.weights)
    if getattr(model, "optimizer", None) is None and not adapted:
        return model
    copy = type(model).from_config(model.get_config())
    if not adapted:
        copy.set_weights(model.get_weights())
        return copy
    with tempfile.TemporaryDirectory(prefix="keras-tinygpt-") as temporary:
        path = Path(temporary, "merged.weights.h5")
        model.save_weights(path)  # Keras adds the adapters when it saves
        copy.load_weights(path)
    return copy


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` if all goes well.

    In a folder that exists, what the new one has is replaced and all else is kept; it
    may be a link, a mount point or the working directory. If anything fails, it is as
    before.
    """
    inside = path.is_dir()  # renames must not leave the file system
    parent = path if inside else path.parent
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{path.name}-", dir=parent))
    try:
        yield temporary
        if inside:
            _move_entries(temporary, path)
        else:
            temporary.chmod(0o755)
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move_entries(source: Path, path: Path) -> None:
    """Moves the entries of a folder in `path` to it; what was there stays in the old.

    If one cannot be moved, all are put back.
    """
    replaced = source / ".replaced"
    moved: list[tuple[Path, Path]] = []

    def move(old: Path, new: Path) -> None:
        moved.append((old, new))
        os.rename(old, new)

    entries = sorted(source.iterdir())
    replaced.mkdir()
    try:
        for entry in entries:
            target = path / entry.name
            if os.path.lexists(target):
                move(target, replaced / entry.name)
            move(entry, target)
    except BaseException:
        for old, new in reversed(moved):
            if os.path.lexists(new):  # else it was this one that failed
                os.rename(new, old)
        raise


def check_free(path: Path, overwrite: bool) -> None:
    """Raises FileExistsError unless `path` is free or may be written over."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} exists and is not a folder")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise FileExistsError(f"{path} exists already")


def check_pair(model: keras.Model, tokenizer: Any) -> None:
    """Raises ValueError unless the two have equally many tokens."""
    if tokenizer is None:
        raise ValueError("tokenizer must be one of this package, got None")
    vocab_size = count_tokens(model)
    if vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"tokenizer and model must agree: the tokenizer has {tokenizer.vocab_size} "
            f"tokens, the model vocab_size={vocab_size}"
        )


class LanguageModel:
    """A model with its tokenizer: text in, text out.

    Attributes:
        model: the Keras model.
        tokenizer: turns text into token ids and back; None for a pretrained folder
            without one.
        metrics: what was recorded when the bundle was saved.
    """

    def __init__(
        self, model: keras.Model, tokenizer: Any, metrics: dict[str, Any] | None = None
    ):
        if tokenizer is not None:
            check_pair(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.metrics = metrics or {}

    def generate(
        self,
        prompt: str | Sequence[str],
        max_new_tokens: int = 200,
        *,
        stop: str | Sequence[str] = (),
        unknown: str = "error",
        source: str | Sequence[str] | None = None,
        **settings: Any,
    ) -> str | list[str]:
        """Returns the prompt with its continuation; for a list of prompts a list.

        Args:
            prompt: at least one character, or a list of prompts.
            max_new_tokens: most tokens to add.
            stop: strings; the text ends before the first of them in the continuation.
            unknown: what to do with characters the tokenizer lacks: "error", "drop",
                or a character to put in their place.
            source: what an encoder-decoder reads, a text or one for each prompt; the
                prompt then begins the target. One prompt serves many sources.
            **settings: see `keras_tinygpt.generate` (temperature, top_k, top_p, min_p,
                repetition_penalty, seed, use_cache, context, allowed_tokens).
        """
        single = isinstance(prompt, str)
        prompts = [
            self._encode(text, unknown) for text in ([prompt] if single else prompt)
        ]
        if source is not None:
            settings["source_ids"] = self._encode_source(source, unknown)
            if single and not isinstance(source, str):
                prompts, single = prompts * len(source), False
        stops = self._stops(stop)
        in_text = bool(stops) and not self.tokenizer.concatenates
        outputs = generate(
            self.model,
            prompts,
            max_new_tokens,
            stop=() if in_text else [self.tokenizer.encode(text) for text in stops],
            **settings,
        )
        texts = [self.tokenizer.decode(tokens) for tokens in outputs]
        if in_text:
            lengths = [len(self.tokenizer.decode(tokens)) for tokens in prompts]
            pairs = zip(texts, lengths, strict=True)
            texts = [_cut(text, stops, length) for text, length in pairs]
        return texts[0] if single else texts

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 200,
        *,
        stop: str | Sequence[str] = (),
        unknown: str = "error",
        source: str | None = None,
        **settings: Any,
    ) -> Iterator[str]:
        """Yields the continuation piece by piece, never half a character.

        Takes the arguments of `generate`; the prompt is not repeated.
        """
        self.check_tokenizer()
        stops = self._stops(stop)
        in_text = bool(stops) and not self.tokenizer.concatenates
        if source is not None:
            settings["source_ids"] = self._encode_source(source, unknown)
        pieces = stream(
            self.model,
            self._encode(prompt, unknown),
            max_new_tokens,
            stop=() if in_text else [self.tokenizer.encode(text) for text in stops],
            **settings,
        )
        texts = self._decode(pieces)
        return _cut_stream(texts, stops) if in_text else texts

    def _decode(self, pieces: Iterator[np.ndarray]) -> Iterator[str]:
        decoder = self.tokenizer.stream_decoder()
        for tokens in pieces:
            text = "".join(decoder.push(token) for token in tokens.tolist())
            if text:
                yield text
        rest = decoder.finish()
        if rest:
            yield rest

    def check_tokenizer(self) -> None:
        """Raises ValueError, with the reason, if there is no tokenizer."""
        if self.tokenizer is None:
            reason = self.metrics.get("source", {}).get("tokenizer", "none")
            raise ValueError(f"text needs a tokenizer, the model has {reason}")

    def _encode_source(self, source: str | Sequence[str], unknown: str) -> Any:
        self.check_tokenizer()
        if isinstance(source, str):
            return self.tokenizer.encode(source, unknown=unknown)
        return [self.tokenizer.encode(text, unknown=unknown) for text in source]

    def _encode(self, text: str, unknown: str) -> np.ndarray:
        self.check_tokenizer()
        tokens = self.tokenizer.encode(text, unknown=unknown)
        if not len(tokens):
            raise ValueError(
                f"prompt must hold at least one character the model knows, got {text!r}"
            )
        return tokens

    @staticmethod
    def _stops(stop: str | Sequence[str]) -> list[str]:
        stops = [stop] if isinstance(stop, str) else list(stop)
        if "" in stops:
            raise ValueError("stop must not be an empty string")
        return stops


def _cut(text: str, stops: list[str], start: int) -> str:
    """The text as far as the stop that is complete first, looking from `start` on."""
    found = [(text.find(stop, start), stop) for stop in stops]
    ends = [(place + len(stop), place) for place, stop in found if place >= 0]
    return text[: min(ends)[1]] if ends else text


def _cut_stream(pieces: Iterator[str], stops: list[str]) -> Iterator[str]:
    """The pieces of a text as far as its first stop; what may begin one is held."""
    held = ""
    for piece in pieces:
        held += piece
        text = _cut(held, stops, 0)
        if len(text) < len(held):
            if text:
                yield text
            return
        beginnings = [stop[:size] for stop in stops for size in range(1, len(stop))]
        keep = max((len(b) for b in beginnings if held.endswith(b)), default=0)
        if len(held) > keep:
            yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    if held:
        yield held


def load(path: str | os.PathLike) -> LanguageModel:
    """Loads a bundle folder, a SavedModel, or "tiny-shakespeare", the packaged model.

    A folder that `export_saved_model` wrote gives a float32 model with the weights it
    holds, on any backend. A folder as transformers writes them is read as by
    `from_pretrained`.

    Raises:
        FileNotFoundError: if the folder or one of its files is missing.
        ValueError: if a file is damaged, was written by a newer version, or tokenizer
            and model disagree.
    """
    path = find_bundle(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"a bundle is a folder with {MODEL}; {path} {what}")
    if is_saved_model(path) and not (path / MODEL).exists():
        return LanguageModel(*read_saved_model(path))
    if is_pretrained(path) and not (path / MODEL).exists():
        return from_pretrained(path)
    for name in (MODEL, TOKENIZER):
        if not (path / name).is_file():
            raise FileNotFoundError(f"{path} is not a bundle: it has no {name}")
    metrics = {}
    if (path / METRICS).exists():
        metrics = _read_metrics(path)
    tokenizer = load_tokenizer(path / TOKENIZER)
    try:
        check_archive(path / MODEL)
        model = keras.saving.load_model(path / MODEL, compile=False, safe_mode=True)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{path / MODEL} cannot be read: {reason}") from error
    return LanguageModel(model, tokenizer, metrics)


def from_pretrained(
    path: str | os.PathLike,
    *,
    max_sequence_length: int | None = None,
    dtype: Any = None,
) -> LanguageModel:
    """Reads a GPT-2, Llama, Mistral or Qwen2 as transformers keeps it in a folder.

    The logits are those of transformers. A model whose output projection has biases
    where others have none gets zeros there.

    Args:
        path: a local folder with `config.json`, `model.safetensors` (or the index of
            several) and, for text, `tokenizer.json` or `vocab.json` and `merges.txt`.
            Without a tokenizer that this package reads, which `metrics` then says,
            `model` still works on token ids.
        max_sequence_length: a shorter window than the model's, whose caches take less
            memory; None means the model's.
        dtype: Keras dtype policy, such as "mixed_bfloat16"; None means the global one.

    Raises:
        FileNotFoundError: if the folder or one of its files is missing.
        ImportError: if safetensors or tokenizers is missing.
        ValueError: if a field of config.json has a value that no `GPTConfig` has, or a
            file is damaged.
    """
    return LanguageModel(*read_pretrained(Path(path), max_sequence_length, dtype))


def find_bundle(path: str | os.PathLike) -> Path:
    """The folder meant: a model at `path`, else the one in the package."""
    path = Path(path)
    is_model = (path / MODEL).exists() or is_saved_model(path) or is_pretrained(path)
    if str(path) != PRETRAINED or is_model:
        return path
    packaged = _PACKAGE / "_data" / PRETRAINED
    if packaged.exists():
        return packaged
    return _PACKAGE.parent / "saved_models" / PRETRAINED


def _read_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of a bundle whose other files are as they were saved."""
    path = folder / METRICS
    content = read_sealed(path, FORMAT_VERSION)
    metrics, files = content.get("metrics"), content.get("files", {})
    for name, value in (("metrics", metrics), ("files", files)):
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise ValueError(f"{path} is damaged: {name} must be an object, got {kind}")
    for name in (MODEL, TOKENIZER):
        if name in files and files[name] != file_sha256(folder / name):
            raise ValueError(
                f"{folder / name} is damaged or was replaced: its sha256 is not the "
                f"one in {METRICS} (keras_tinygpt.save writes both)"
            )
    return metrics
