"""Tests of keras_tinygpt.checks."""

import math
from pathlib import Path

import numpy as np
import pytest

from keras_tinygpt import checks
from keras_tinygpt.checks import (
    check_bool,
    check_choice,
    check_float,
    check_ids,
    check_int,
    release_pages,
)
from keras_tinygpt.text import WindowDataset


@pytest.mark.parametrize(
    ("check", "args", "expected"),
    [
        (check_int, (1,), 1),
        (check_int, (np.int64(7),), 7),
        (check_int, (0, 0), 0),
        (check_int, (5, 2, 5), 5),
        (check_float, (3,), 3.0),
        (check_float, (np.float32(0.5),), 0.5),
        (check_float, (1.0, 0.0, 1.0), 1.0),
        (check_bool, (False,), False),
        (check_choice, ("b", ("a", "b")), "b"),
        (check_choice, (None, ("a", None)), None),
    ],
)
def test_a_good_value_is_returned(check, args, expected):
    value = check("units", *args)
    assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    ("check", "args", "options", "message"),
    [
        (check_int, (0,), {}, "units must be at least 1, got 0"),
        (check_int, (-1, 0), {}, "units must be at least 0, got -1"),
        (check_int, (6, 2, 5), {}, "units must be between 2 and 5, got 6"),
        (check_int, (1, 2, 5), {}, "units must be between 2 and 5, got 1"),
        (check_int, (2.0,), {}, "units must be an integer, got 2.0"),
        (check_int, (True,), {}, "units must be an integer, got True"),
        (check_int, ("3",), {}, "units must be an integer, got '3'"),
        (check_int, (None,), {}, "units must be an integer, got None"),
        (check_float, ("1",), {}, "units must be a number, got '1'"),
        (check_float, (True,), {}, "units must be a number, got True"),
        (check_float, (1j,), {}, "units must be a number, got 1j"),
        (check_float, (-0.5,), {}, "a finite number in [0, inf), got -0.5"),
        (check_float, (math.inf,), {}, "a finite number in [0, inf), got inf"),
        (check_float, (math.nan,), {}, "a finite number in [0, inf), got nan"),
        (check_float, (0.0,), {"low_open": True}, "number in (0, inf), got 0.0"),
        (check_float, (1.5, 0.5, 1.0), {}, "a finite number in [0.5, 1], got 1.5"),
        (
            check_float,
            (1.0, 0.0, 1.0),
            {"high_open": True},
            "units must be a finite number in [0, 1), got 1.0",
        ),
        (check_bool, (1,), {}, "units must be True or False, got 1"),
        (check_bool, ("no",), {}, "units must be True or False, got 'no'"),
        (check_choice, ("c", ("a", "b")), {}, "units must be one of 'a', 'b', got 'c'"),
    ],
)
def test_a_bad_value_is_named_with_its_rule(check, args, options, message):
    with pytest.raises(ValueError) as caught:
        check("units", *args, **options)
    assert message in str(caught.value) and str(caught.value).startswith("units must")


def resident_files() -> int:
    """Bytes of files that are mapped into this process and in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssFile:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_memory_map_is_read_a_piece_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "_CHUNK_IDS", 1 << 20)
    path, size = tmp_path / "ids.bin", 60_000_000
    np.resize(np.arange(61, dtype="uint8"), size).tofile(path)
    ids = np.memmap(path, "uint8", "r")
    before = resident_files()
    int(ids[:-1].max())  # takes as much memory as the file
    assert resident_files() - before > size * 0.9
    release_pages(ids[5:])
    assert resident_files() - before < size * 0.1
    assert check_ids(ids[1:], 61) is not None
    assert resident_files() - before < size * 0.1
    starts = np.arange(0, size - 9000, 4096)[:, None]
    for _ in WindowDataset(ids, starts, 3):  # a window from each page
        pass
    assert resident_files() - before < size * 0.1
    with pytest.raises(ValueError, match="between 0 and 59 .* got 60 at index 59"):
        check_ids(ids[1:], 60)


def test_changes_to_a_memory_map_are_kept(tmp_path):
    path = tmp_path / "ids.bin"
    np.zeros(9000, "uint8").tofile(path)
    for mode in ("c", "r+"):
        ids = np.memmap(path, "uint8", mode)
        ids[7] = 3
        release_pages(ids)
        assert ids[7] == 3
    release_pages(np.zeros(3))
