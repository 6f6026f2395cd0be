"""Speakers with other names: what is a name, where it changes, what does not."""

import re

import pytest
from helpers import tiny_shakespeare

from keras_tinygpt.text import rename_speakers
from keras_tinygpt.text.names import speaker_names

PLAY = """DUKE VINCENTIO:
Come, Isabella. A duke may err; so may Lucio's friend.

ISABELLA:
The first of men was ADAM: he was none. Vincentio!

First Lord:
Where: in Vienna, or in VINCENTIO?

LUCIO:
I

III:
Élan.

ÉLAN:
Isabellas are not ISABELLA.
"""


def test_names_are_words_of_speakers_that_are_never_lower_case():
    assert speaker_names(PLAY) == ["ISABELLA", "LUCIO", "VINCENTIO", "ÉLAN"]


def test_a_name_changes_wherever_it_stands_and_nothing_else_does():
    renamed = rename_speakers(PLAY, 3)
    words = renamed.split("\n")[0].split(" ")
    assert words[0] == "DUKE" and words[1].isupper() and words[1] != "VINCENTIO:"
    new = {
        "VINCENTIO": words[1][:-1],
        "ISABELLA": renamed.split("\n")[3][:-1],
        "LUCIO": renamed.split("\n")[9][:-1],
        "ÉLAN": renamed.split("\n")[15][:-1],
    }
    back = renamed
    for name, word in new.items():
        assert word.isupper() and 4 <= len(word) <= 9
        back = re.sub(rf"\b{word}\b", name, back)
        back = re.sub(rf"\b{word.title()}\b", name.title(), back)
    assert back == PLAY


def test_a_seed_gives_the_same_names_and_another_one_others():
    assert rename_speakers(PLAY, 1) == rename_speakers(PLAY, 1)
    assert rename_speakers(PLAY, 1) != rename_speakers(PLAY, 2)
    with pytest.raises(ValueError, match="seed must be .*, got -1"):
        rename_speakers(PLAY, -1)


@pytest.mark.parametrize("text", ["", "One line: two.\n", "First Lord:\nAll.", "\n:\n"])
def test_a_text_without_named_speakers_stays(text):
    assert rename_speakers(text) == text


def test_tiny_shakespeare_keeps_its_characters_and_loses_its_names():
    text = tiny_shakespeare().read_text("utf-8")[:1_000_000]
    names = speaker_names(text)
    assert len(names) > 100 and {"ROMEO", "VINCENTIO"} < set(names)
    assert not {"KING", "DUKE", "FRIAR"} & set(names)
    renamed = rename_speakers(text)
    assert set(renamed) <= set(text)
    assert len(renamed.split("\n")) == len(text.split("\n"))
    assert not {"ROMEO:", "Romeo"} & set(renamed.split())
