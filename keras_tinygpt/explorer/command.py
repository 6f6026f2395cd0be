"""`tinygpt explore`."""

import contextlib
import threading
from pathlib import Path
from typing import Any

from keras_tinygpt.bundle import load
from keras_tinygpt.checks import check_int
from keras_tinygpt.explorer.answers import Explorer
from keras_tinygpt.explorer.pages import record, self_contained
from keras_tinygpt.explorer.server import ADDRESS, ExplorerServer
from keras_tinygpt.files import replace_file
from keras_tinygpt.generation import SamplingConfig


def explore_command(options: Any, sampling: SamplingConfig) -> None:
    """Serves the page of a model until Ctrl-C, or writes it to a file.

    Args:
        options: a `cli.ExploreOptions`.
        sampling: what the sliders of the page begin with.
    """
    check_int("port", options.port, 0, 65_535)
    if options.export is not None:
        _check_target(options.export, options.force)
    explorer = Explorer(
        load(options.bundle), options.bundle.resolve().name, options.prompt, sampling
    )
    if options.export is not None:
        text = self_contained(record(explorer))
        replace_file(options.export, lambda path: path.write_text(text, "utf-8"))
        print(f"saved {options.export}: {len(text) / 1e6:.1f} MB")
        return
    with _make_server(explorer, options.port) as server:
        print(f"{explorer.name}: {server.address} (Ctrl-C ends)", flush=True)
        warming = threading.Thread(target=warm_up, args=(explorer,))
        warming.start()
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        warming.join()
    print("\nstopped")


def _check_target(path: Path, force: bool) -> None:
    if path.suffix.lower() != ".html":
        raise ValueError(f"export must end in .html, got {str(path)!r}")
    if path.exists() and not force:
        raise FileExistsError(f"export: {path} exists already; --force replaces it")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"export: {path.parent} is not a folder")


def _make_server(explorer: Explorer, port: int) -> ExplorerServer:
    try:
        return ExplorerServer(explorer, port)
    except OSError as error:
        raise OSError(
            f"port {port} of {ADDRESS} cannot be used: {error.strerror}; "
            "--port 0 takes a free one"
        ) from error


def warm_up(explorer: Explorer) -> None:
    """Asks each question once, so that what compiles is compiled."""
    ids = explorer.read(text=explorer.prompt)["ids"]
    explorer.position(ids, 0)
    list(explorer.write(ids[-1:], 2))
