"""Dates as people write them, to be put as ISO 8601: a translation that can be checked.

"Sunday, March 7, 2021" becomes "2021-03-07": the parts change places, a name becomes a
number, and some of the text does not matter. What is written is one date or none, so
decoding can be held to characters that may still lead to one.
"""

import calendar
import datetime
import functools
from collections.abc import Callable

import keras
import numpy as np

from keras_tinygpt.checks import check_int
from keras_tinygpt.text import CharTokenizer

MONTHS = (
    "January February March April May June July August September October November "
    "December"
).split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
FORMS = (
    "{month} {day}, {year}",
    "{day} {month} {year}",
    "{short} {day}, {year}",
    "{weekday}, {month} {day}, {year}",
    "the {day}{ending} of {month}, {year}",
    "{day}.{number}.{year}",
    "{number}/{day}/{year}",
)
FIRST, LAST = datetime.date(1600, 1, 1), datetime.date(2399, 12, 31)
HELD_OUT = 10  # every tenth day is never trained on
PAD, START = "_", ">"
SOURCE_LENGTH = len("Wednesday, September 30, 2021")  # the longest
TARGET_LENGTH = len("2021-09-30")


def make_tokenizer() -> CharTokenizer:
    """Returns the tokenizer of sources and targets; id 0 is padding, 1 the start."""
    letters = "".join([*MONTHS, *WEEKDAYS, *FORMS, "stndrdth"])
    used = sorted(set(letters) - set("{}") | set("0123456789-"))
    return CharTokenizer(PAD + START + "".join(used))


def write_date(date: datetime.date, form: str) -> str:
    """Returns `date` in one of `FORMS`, in English whatever the locale."""
    tens, ones = divmod(date.day, 10)
    ending = {1: "st", 2: "nd", 3: "rd"}.get(ones if tens != 1 else 0, "th")
    month = MONTHS[date.month - 1]
    return form.format(
        day=date.day,
        ending=ending,
        month=month,
        short=month[:3],
        number=date.month,
        year=date.year,
        weekday=WEEKDAYS[date.weekday()],
    )


def problems(
    count: int, seed: int, held_out: bool = False
) -> tuple[list[str], list[str]]:
    """Returns random sources and their translations.

    Args:
        count: how many.
        seed: of the Philox stream.
        held_out: whether the days are those never trained on, or all others.
    """
    check_int("count", count)
    random = np.random.Generator(np.random.Philox(seed))
    first, last = FIRST.toordinal(), LAST.toordinal()
    days = random.integers(first // HELD_OUT + 1, last // HELD_OUT, count) * HELD_OUT
    if not held_out:
        days += random.integers(1, HELD_OUT, count)
    dates = [datetime.date.fromordinal(int(day)) for day in days]
    forms = random.integers(0, len(FORMS), count)
    pairs = zip(dates, forms, strict=True)
    sources = [write_date(date, FORMS[form]) for date, form in pairs]
    return sources, [date.isoformat() for date in dates]


def is_date(text: str) -> bool:
    """Whether a text is a date as `TARGET_LENGTH` characters of ISO 8601."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@functools.cache
def _days(leap: bool) -> tuple[str, ...]:
    """Every day of a year, as "-MM-DD"."""
    year = 2000 if leap else 2001
    return tuple(
        f"-{month:02}-{day:02}"
        for month in range(1, 13)
        for day in range(1, calendar.monthrange(year, month)[1] + 1)
    )


def next_characters(written: str) -> str:
    """Returns the characters after which `written` may still become a date.

    Args:
        written: what a date may begin with, shorter than a date.
    """
    if len(written) < 4:
        return "123456789" if written == "000" else "0123456789"
    rest = written[4:]
    days = _days(calendar.isleap(int(written[:4])))
    following = {day[len(rest)] for day in days if day.startswith(rest)}
    return "".join(sorted(following))


def allowed_tokens(tokenizer: CharTokenizer) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the `allowed_tokens` for `generate` that leaves nothing but dates."""

    def allowed(tokens: np.ndarray) -> np.ndarray:
        written = tokenizer.decode(tokens).rpartition(START)[2]
        return tokenizer.encode(next_characters(written))

    return allowed


class DateDataset(keras.utils.PyDataset):
    """Fresh problems for every step.

    An item is `((source, inputs), targets)` for an encoder-decoder; with `as_prefix`
    `(inputs, targets, weights)` for a GPT that reads the source first: "March 7,
    2021>2021-03-07", of which the part after ">" is counted.

    Args:
        steps: number of items.
        batch_size: problems in each.
        seed: of the draws.
        as_prefix: whether source and target are one text.
    """

    def __init__(self, steps: int, batch_size: int, seed: int, as_prefix: bool = False):
        super().__init__()
        self.steps = check_int("steps", steps)
        self.batch_size = check_int("batch_size", batch_size)
        self.seed = check_int("seed", seed, 0)
        self.as_prefix = as_prefix
        self.tokenizer = make_tokenizer()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int):
        pairs = problems(self.batch_size, self.seed * 10**6 + index)
        if self.as_prefix:
            return self._texts(*pairs)
        sources = self._rows(pairs[0], SOURCE_LENGTH)
        targets = self._rows([START + text for text in pairs[1]], TARGET_LENGTH + 1)
        return (sources, targets[:, :-1]), targets[:, 1:]

    def _texts(self, sources: list[str], targets: list[str]):
        length = SOURCE_LENGTH + 1 + TARGET_LENGTH
        texts = [START.join(pair) for pair in zip(sources, targets, strict=True)]
        rows = self._rows(texts, length)
        starts = np.array([len(source) for source in sources])[:, None]
        places = np.arange(length - 1)
        counted = (places >= starts) & (places < starts + TARGET_LENGTH)
        return rows[:, :-1], rows[:, 1:], counted.astype("float32")

    def _rows(self, texts: list[str], length: int) -> np.ndarray:
        """Ids int32 (B, length), filled up with padding."""
        joined = "".join(text.ljust(length, PAD) for text in texts)
        return self.tokenizer.encode(joined).reshape(len(texts), length)
