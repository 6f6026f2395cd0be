"""Runs the examples in the docstrings of every module."""

import doctest
import importlib
import pkgutil

import pytest

import keras_tinygpt

pytestmark = pytest.mark.backend

MODULES = [
    module.name
    for module in pkgutil.walk_packages(keras_tinygpt.__path__, "keras_tinygpt.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["keras_tinygpt", *MODULES])
def test_examples_give_what_they_show(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    assert doctest.testmod(module, optionflags=flags).failed == 0


def test_there_are_examples():
    from keras_tinygpt import layers

    finder = doctest.DocTestFinder()
    for name in ("CausalMultiHeadAttention", "TransformerBlock", "LearnedPositions"):
        tests = finder.find(getattr(layers, name), name)
        assert sum(len(test.examples) for test in tests) > 0
