"""Tests of keras_tinygpt.checks."""

import math

import numpy as np
import pytest

from keras_tinygpt.checks import check_bool, check_choice, check_float, check_int


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
