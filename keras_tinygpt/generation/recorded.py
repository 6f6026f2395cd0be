"""On PyTorch: the operations of a function, recorded once and run without Python.

A step of a small GPT is some five hundred operations that take microseconds each, and
more than ten times that in the checks of every Keras layer and in Python itself.
"""

import warnings
from collections.abc import Callable, Iterator

import keras


def record_operations(function: Callable, overwrite: bool = False) -> Callable:
    """Returns `function`, on PyTorch recorded once per set of shapes.

    The other backends compile anyway.

    Args:
        function: takes and returns tensors in tuples and dicts; no Python branch may
            depend on their values. The weights it reads are seen as they are when it
            runs.
        overwrite: whether caches may be written where they lie, in the arguments.
    """
    if keras.backend.backend() != "torch":
        return function
    recorded: dict[tuple, tuple[Callable, object]] = {}

    def run(*arguments):
        leaves = list(_leaves(arguments))
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in recorded:
            recorded[shapes] = _record(function, arguments, leaves, overwrite)
        program, outputs = recorded[shapes]
        return _pack(outputs, iter(program(*leaves)))

    return run


def _leaves(nested) -> Iterator:
    """What tuples and dicts hold; `keras.tree` takes as long as the program."""
    if isinstance(nested, dict):
        nested = [nested[key] for key in sorted(nested)]
    elif not isinstance(nested, tuple):
        yield nested
        return
    for part in nested:
        yield from _leaves(part)


def _pack(structure, leaves: Iterator):
    """The leaves in tuples and dicts as those of `structure`."""
    if isinstance(structure, dict):
        return {key: _pack(structure[key], leaves) for key in sorted(structure)}
    if isinstance(structure, tuple):
        return tuple(_pack(part, leaves) for part in structure)
    return next(leaves)


def _record(
    function: Callable, arguments, leaves: list, overwrite: bool
) -> tuple[Callable, object]:
    """The program from leaves to leaves, and a structure to pack the latter as."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    outputs = None

    def flat(*values):
        nonlocal outputs
        outputs = function(*_pack(arguments, iter(values)))
        return tuple(_leaves(outputs))

    graph = make_fx(flat)(*leaves)
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":  # a weight: the program shares its memory
            value = getattr(graph, node.target).detach()
            delattr(graph, node.target)
            graph.register_buffer(node.target, value)
        elif node.target is torch.ops.aten.lift_fresh_copy.default:  # of a constant
            node.replace_all_uses_with(node.args[0])
        elif node.target is torch.ops.aten.index_copy.default and overwrite:
            node.target = torch.ops.aten.index_copy_.default
    graph.recompile()
    with warnings.catch_warnings():
        # torch.compile, named instead, needs a C++ compiler where the program runs.
        warnings.simplefilter("ignore", DeprecationWarning)
        program = torch.jit.trace(graph, tuple(leaves), check_trace=False)
    return program, keras.tree.map_structure(lambda _: None, outputs)
