"""Plays with other names: the same words, spoken by characters nobody knows.

A model of plays learns their characters by heart and expects them in a play it has
never read, where a letter of a name then costs it more than any letter by chance.
Trained on copies with invented names, it learns what a name looks like instead.
"""

import collections
import re
from collections.abc import Sequence

import numpy as np

from keras_tinygpt.checks import check_int

SPEAKER = re.compile(r"^([^\n:]+):$", re.MULTILINE)
WORD = re.compile(r"[^\W\d_]+")
SHORTEST = 4  # letters of a name; of fewer are numbers as in KING RICHARD III
LETTERS_SEEN = (2, 1, 0)  # by a draw of the next letter, ...
WEIGHTS = (0.3, 0.5, 0.1, 0.1)  # ... and of a draw among all letters


def speaker_names(text: str) -> list[str]:
    """Returns the names in the lines that say who speaks, such as "DUKE VINCENTIO:".

    A name is a word of such a line in capitals, of at least 4 letters, that the text
    never writes in lower case, as it does "duke".
    """
    words = set(WORD.findall(text))
    spoken = {word for line in SPEAKER.findall(text) for word in WORD.findall(line)}
    return sorted(
        word
        for word in spoken
        if word.isupper() and len(word) >= SHORTEST and word.lower() not in words
    )


def rename_speakers(text: str, seed: int = 0) -> str:
    r"""Returns the text with an invented name for each of its speakers.

    Each name is replaced by the same word wherever it stands, in capitals and as in
    "Vincentio". The words are drawn letter by letter as the names of the text go on
    after two letters, one or none, or among all their letters; of mixtures of these,
    the one taken reads names that it was not made from with the fewest nats (2.56 a
    letter, tiny Shakespeare).

    Args:
        text: any; one without speakers is returned unchanged.
        seed: of the invented names.

    Example:
        >>> from keras_tinygpt.text import rename_speakers
        >>> rename_speakers("JULIET:\nO Romeo!\n\nROMEO:\nJuliet?", seed=2)
        'ROET:\nO Romet!\n\nROMET:\nRoet?'
    """
    check_int("seed", seed, 0)
    names = speaker_names(text)
    random = np.random.Generator(np.random.Philox(seed))
    followers = _followers(names)
    new = {name: _invent(followers, max(map(len, names)), random) for name in names}
    new |= {name.title(): word.title() for name, word in new.items()}
    return WORD.sub(lambda match: new.get(match[0], match[0]), text)


def _followers(names: Sequence[str]) -> dict[str, list[str]]:
    """What comes after two letters, one and none; "^" begins a name and "$" ends it."""
    followers = collections.defaultdict(list)
    for name in names:
        padded = f"^^{name}$"
        for index in range(2, len(padded)):
            for seen in LETTERS_SEEN:
                followers[padded[index - seen : index]].append(padded[index])
    return dict(followers)


def _invent(
    followers: dict[str, list[str]], longest: int, random: np.random.Generator
) -> str:
    letters = sorted(set(followers[""]) - {"$"})
    while True:
        word = "^^"
        while not word.endswith("$"):
            seen = random.choice((*LETTERS_SEEN, None), p=WEIGHTS)
            among = letters
            if seen is not None:
                pasts = (word[len(word) - n :] for n in range(seen, -1, -1))
                among = next(followers[past] for past in pasts if past in followers)
            word += among[random.integers(len(among))]
        if SHORTEST <= len(word) - 3 <= longest:
            return word[2:-1]
