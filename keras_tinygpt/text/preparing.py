"""Texts of any size as token ids on disk, written once by several processes.

The text is cut into shards that end where a word does. Shards already there are kept,
so that a stopped preparation goes on; the folder gets its name when all of it is there.
Memory holds one shard a process, whatever the size of the text.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from keras_tinygpt.checks import check_choice, check_int
from keras_tinygpt.files import (
    file_sha256,
    read_sealed,
    replace_file,
    sealed,
    write_json,
)
from keras_tinygpt.text.bpe import BPETokenizer
from keras_tinygpt.text.corpus import clean_text, find_texts
from keras_tinygpt.text.prepared import (
    DESCRIPTION,
    FORMAT_VERSION,
    PART_FILES,
    TOKENIZER,
    Prepared,
    load_prepared,
)
from keras_tinygpt.text.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    load_tokenizer,
)
from keras_tinygpt.text.windows import split_parts

KINDS = ("char", "byte", "bpe")
BPE_VOCAB_SIZE = 2048
SHARD_BYTES = 1 << 24
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
_LEARNED_BYTES = 100 << 20  # of text that byte pairs are learned on, at most
_SEARCHED_BYTES = 1 << 16  # for the end of a word
# No token of the common splitting rules spans a blank that follows a visible character.
_WORD_END = re.compile(rb"[!-~](?= )")
_PLAN = "plan.json"


@dataclasses.dataclass(frozen=True)
class Shard:
    """A stretch of the text: pieces of one or more files.

    Args:
        index: place among the shards.
        pieces: (path, first byte, end, whether a line end is added if there is none).
        size: bytes.
    """

    index: int
    pieces: list[tuple[str, int, int, bool]]
    size: int

    def path(self, folder: Path) -> Path:
        """Where its ids wait for the others."""
        return folder / f"shard_{self.index:06d}.npz"

    def text(self) -> str:
        """Its text, read from the files; ValueError unless that is UTF-8."""
        texts = []
        for path, start, stop, closed in self.pieces:
            with open(path, "rb") as file:
                file.seek(start)
                data = clean_text(file.read(stop - start), repr(path), start)
            texts.append(data)
            if closed and not data.endswith(b"\n"):
                texts.append(b"\n")
        return b"".join(texts).decode("utf-8")


def prepare(
    source: str | os.PathLike,
    out: str | os.PathLike,
    tokenizer: str | Tokenizer = "char",
    vocab_size: int | None = None,
    *,
    split: Sequence[float] = (0.99, 0.01),
    processes: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], Any] | None = None,
) -> Prepared:
    """Writes the token ids of a text of any size to a folder that `train` reads.

    The ids are those of the whole text, except that a token never spans two shards
    (they end before a blank, if there is one). nanoGPT reads the .bin files too, where
    they are of two bytes an id. Called again after an interruption, it goes on.

    Args:
        source: files, as in `load_corpus`.
        out: the folder; its parents are made. Work goes on in a hidden one beside it.
        tokenizer: "char" (the characters of the text), "byte", "bpe" (learned on the
            first 100 MB of the training part, or all of it) or a tokenizer.
        vocab_size: most tokens of "bpe", at least 256; None means 2048.
        split: fractions or token counts of the training, validation and optional test
            part, in the order of the text.
        processes: how many; None means one a core.
        overwrite: whether a prepared folder at `out`, or unfinished work for it, is
            replaced.
        progress: called with the bytes done and the bytes in all.

    Returns:
        What `load_prepared` reads.

    Raises:
        FileExistsError: `out` exists and is not to be replaced.
        ValueError: a text or an argument is not as above, or there is unfinished work
            of another text or with other settings.
    """
    processes = CORES if processes is None else check_int("processes", processes)
    name, paths = find_texts(source)
    split_parts(np.broadcast_to(np.uint8(0), 1 << 62), split)  # its errors come first
    plan = _plan(name, paths, tokenizer, vocab_size, split)
    target = Path(out).resolve()  # through a link
    out, work = Path(out), target.with_name(f".{target.name}.unfinished")
    _claim(out, work, plan, overwrite)
    shards = list(cut_shards(paths))
    done, total = 0, sum(shard.size for shard in shards)
    try:
        tokenizer = _get_tokenizer(work, shards, tokenizer, vocab_size, split)
        for shard in _encode(shards, tokenizer, work, processes):
            done += shard.size
            if progress is not None:
                progress(done, total)
    except ValueError:  # of the text, with which nobody can go on
        shutil.rmtree(work)
        raise
    _finish(work, shards, tokenizer, split, plan)
    if target.exists():
        shutil.rmtree(target)
    os.replace(work, target)
    return load_prepared(out)


def _plan(
    name: str, paths: list[Path], tokenizer: Any, vocab_size: Any, split: Any
) -> dict[str, Any]:
    """What a preparation that goes on must agree with."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    if isinstance(tokenizer, str):
        check_choice("tokenizer", tokenizer, KINDS)
        if vocab_size is not None and tokenizer != "bpe":
            raise ValueError(f"vocab_size needs bpe, got {vocab_size} with {tokenizer}")
    elif vocab_size is not None:
        raise ValueError(f"vocab_size needs bpe, got {vocab_size} with {tokenizer!r}")
    else:
        tokenizer = tokenizer.get_config()
    return {
        "format_version": FORMAT_VERSION,
        "name": name,
        "text_sha256": digest.hexdigest(),
        "files": [[str(path), path.stat().st_size] for path in paths],
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "split": list(split) if tokenizer == "bpe" else None,
        "shard_bytes": SHARD_BYTES,
    }


def _claim(out: Path, work: Path, plan: dict[str, Any], overwrite: bool) -> None:
    """Makes the working folder, or finds the one this preparation had begun."""
    if out.is_mount():
        raise OSError(f"out: {out} is a mount point; name a folder in it")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if not overwrite:
            raise FileExistsError(f"out: {out} exists already; --force replaces it")
        if not (out / DESCRIPTION).exists():
            raise FileExistsError(
                f"out: {out} is not a prepared folder, so force leaves it alone"
            )
    if overwrite:
        shutil.rmtree(work, ignore_errors=True)
    if (work / _PLAN).exists():
        if read_sealed(work / _PLAN, FORMAT_VERSION) != plan:
            raise ValueError(
                f"out: {work} holds unfinished work of another text or with other "
                "settings; --force begins anew"
            )
        return
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"out: {work} cannot be made: {error.strerror}") from error
    write_json(work / _PLAN, sealed(plan))


def cut_shards(
    paths: Sequence[Path], shard_bytes: int | None = None
) -> Iterator[Shard]:
    """Cuts files into shards of about `shard_bytes`; only their ends are read."""
    shard_bytes = shard_bytes or SHARD_BYTES
    index, size, pieces = 0, 0, []
    for path in paths:
        start, length = 0, path.stat().st_size
        while True:
            stop = length
            if length - start > shard_bytes - size:
                stop = _word_end(path, start, start + shard_bytes - size)
            ends_file = stop == length
            pieces.append((str(path), start, stop, ends_file and path != paths[-1]))
            size += stop - start
            if size >= shard_bytes or not ends_file:
                yield Shard(index, pieces, size)
                index, size, pieces = index + 1, 0, []
            if ends_file:
                break
            start = stop
    if pieces:
        yield Shard(index, pieces, size)


def _word_end(path: Path, start: int, stop: int) -> int:
    """The last end of a word before `stop`, or else the last end of a character."""
    first = max(start + 1, stop - _SEARCHED_BYTES)
    with open(path, "rb") as file:
        file.seek(first)
        data = file.read(stop - first + 4)
    wanted = stop - first
    ends = [match.end() for match in _WORD_END.finditer(data, 0, wanted + 1)]
    if ends:
        return first + ends[-1]
    while wanted < len(data) and (data[wanted] & 0xC0 == 0x80 or data[wanted] == 0x0A):
        wanted += 1  # no character and no CRLF is cut
    return first + wanted


def _get_tokenizer(
    work: Path,
    shards: list[Shard],
    tokenizer: Any,
    vocab_size: int | None,
    split: Sequence[float],
) -> Tokenizer:
    """The tokenizer meant, learned now unless an interrupted preparation has."""
    path = work / TOKENIZER
    if path.exists():
        return load_tokenizer(path)
    if tokenizer == "byte":
        tokenizer = ByteTokenizer()
    elif tokenizer == "char":
        tokenizer = CharTokenizer.from_text(shard.text() for shard in shards)
    elif tokenizer == "bpe":
        # A token is a byte or more, so that as many bytes are in the training part.
        share = split[0] if split[0] >= 1 else split[0] * sum(s.size for s in shards)
        texts = _beginning(shards, min(_LEARNED_BYTES, int(share)))
        size = BPE_VOCAB_SIZE if vocab_size is None else vocab_size
        tokenizer = BPETokenizer.from_text(texts, size)
    replace_file(path, tokenizer.save)
    return tokenizer


def _beginning(shards: list[Shard], size: int) -> Iterator[str]:
    """The first `size` bytes of the text, to the end of a character."""
    for shard in shards:
        data = shard.text().encode()[:size]
        size -= len(data)
        yield data.decode("utf-8", "ignore")
        if size <= 0:
            return


def encode_shard(shard: Shard, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the ids of a shard, with the numbers of its tokens and characters."""
    text = shard.text()
    ids = tokenizer.encode(text, dtype=_ids_dtype(tokenizer))
    counts = np.array([len(ids), len(text)])
    replace_file(
        shard.path(folder), lambda path: np.savez(path, ids=ids, counts=counts)
    )


def _ids_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _encode(
    shards: list[Shard], tokenizer: Tokenizer, work: Path, processes: int
) -> Iterator[Shard]:
    """Yields each shard once its ids are on disk."""
    todo = []
    for shard in shards:
        if shard.path(work).exists():
            yield shard
        else:
            todo.append(shard)
    processes = min(processes, len(todo))
    if processes <= 1:
        for shard in todo:
            encode_shard(shard, tokenizer, work)
            yield shard
        return
    with contextlib.ExitStack() as stack:
        workers = queue.SimpleQueue()
        for _ in range(processes):
            workers.put(stack.enter_context(_worker(work)))
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        yield from pool.map(lambda shard: _hand_over(shard, workers), todo)


@contextlib.contextmanager
def _worker(work: Path) -> Iterator[subprocess.Popen]:
    """A process that encodes shards, see `keras_tinygpt.text.__main__`."""
    root = Path(__file__).resolve().parents[2]
    search = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "numpy",  # which starts at once; nothing is computed
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_tinygpt.text", str(work)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # Ctrl-C is for the process that started it
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _hand_over(shard: Shard, workers: queue.SimpleQueue) -> Shard:
    """Has the next free process encode a shard."""
    process = workers.get()
    try:
        process.stdin.write(json.dumps(dataclasses.asdict(shard)) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        answer = ""
    finally:
        workers.put(process)
    if not answer:
        raise OSError(f"a process that encodes ended with {process.wait()}")
    error = json.loads(answer)
    if error is not None:
        raise ValueError(error)
    return shard


def _finish(
    work: Path,
    shards: list[Shard],
    tokenizer: Tokenizer,
    split: Sequence[float],
    plan: dict[str, Any],
) -> None:
    """Joins the shards into parts, describes them and removes what was for the work."""
    counts = [_read(shard.path(work), "counts").tolist() for shard in shards]
    total = sum(tokens for tokens, _ in counts)
    parts = split_parts(np.broadcast_to(np.uint8(0), total), split)
    tokens = {name: len(part) for name, part in parts.items()}
    joiner = _Joiner(work, shards, counts, tokenizer)
    characters = {
        name: joiner.write(work / PART_FILES[name], length)
        for name, length in tokens.items()
    }
    names = [TOKENIZER, *(PART_FILES[name] for name in tokens)]
    content = {
        "format_version": FORMAT_VERSION,
        "name": plan["name"],
        "text_sha256": plan["text_sha256"],
        "dtype": _ids_dtype(tokenizer).name,
        "vocab_size": tokenizer.vocab_size,
        "tokens": tokens,
        "characters": characters,
        "files": {name: file_sha256(work / name) for name in names},
    }
    write_json(work / DESCRIPTION, sealed(content))
    for shard in shards:
        shard.path(work).unlink()
    (work / _PLAN).unlink()


def _read(path: Path, name: str) -> np.ndarray:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            return arrays[name]
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is damaged, delete it: {error}") from error


class _Joiner:
    """Reads the shards one after another, as many tokens at a time as are asked for."""

    def __init__(self, work: Path, shards: list[Shard], counts, tokenizer: Tokenizer):
        self.shards = iter(zip(shards, counts, strict=True))
        self.work, self.tokenizer = work, tokenizer
        self.ids, self.counts = np.empty(0, _ids_dtype(tokenizer)), (0, 0)

    def write(self, path: Path, length: int) -> int:
        """Writes the next `length` ids; returns how many characters they are."""
        characters = 0

        def write(temporary: Path) -> None:
            nonlocal characters
            left = length
            with open(temporary, "wb") as file:
                while left:
                    if not len(self.ids):
                        shard, self.counts = next(self.shards)
                        self.ids = _read(shard.path(self.work), "ids")
                    ids, self.ids = self.ids[:left], self.ids[left:]
                    left -= len(ids)
                    file.write(ids.tobytes())
                    whole = len(ids) == self.counts[0]
                    text = None if whole else self.tokenizer.decode(ids)
                    characters += self.counts[1] if whole else len(text)

        replace_file(path, write)
        return characters
