"""Files that are written whole or not at all."""

import csv
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEAL = "sha256"


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Calls `write` on a temporary neighbour of `path`, syncs it and renames it.

    The temporary name keeps the suffixes of `path`, which Keras reads.
    """
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, as 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_format_version(path: Path, version: Any, readable: int) -> None:
    """Raises ValueError unless a file is of the one version that can be read."""
    if version != readable:
        raise ValueError(
            f"{path} has format_version {version!r}, this version of keras_tinygpt "
            f"reads {readable}"
        )


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` and the sha256 of itself, for a JSON file that notices changes."""
    text = json.dumps(content, allow_nan=False)
    return {**content, SEAL: hashlib.sha256(text.encode()).hexdigest()}


def read_sealed(path: Path, version: int | None = None) -> dict[str, Any]:
    """Reads the JSON object that `sealed` made, without its seal.

    Args:
        path: a file; one without a seal, as earlier versions wrote, is taken as it is.
        version: if given, the only format_version that can be read.

    Raises:
        ValueError: the file is damaged or of another version.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it must be an object, got {type(content).__name__}")
        if version is not None and "format_version" not in content:
            raise ValueError("it has no 'format_version'")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if version is not None:
        check_format_version(path, content["format_version"], version)
    seal = content.pop(SEAL, None)
    if seal is not None and sealed(content)[SEAL] != seal:
        raise ValueError(f"{path} is damaged: its content has another sha256")
    return content


def write_json(path: Path, content: Any) -> None:
    """Writes indented JSON, whole or not at all; NaN and infinity are refused."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda temporary: temporary.write_text(text, "utf-8"))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with the keys of the first as header, whole or not at all."""

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)

    replace_file(path, write)
