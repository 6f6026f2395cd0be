"""The files of the page: as they are served, and as one file that needs no server."""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from keras_tinygpt.explorer.answers import Explorer

_FOLDER = Path(__file__).resolve().parent / "page"
INDEX, STYLE, MAIN = "index.html", "explorer.css", "explorer.js"
# Each needs only those before it.
MODULES = ("dom.js", "colors.js", "api.js", "text.js", "next.js", "path.js", "maps.js")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of every file, by its path on the server."""
    files = {}
    for name in (INDEX, STYLE, *MODULES, MAIN):
        kind = KINDS[Path(name).suffix]
        files["/" if name == INDEX else f"/{name}"] = (_bytes(name), kind)
    return files


def _bytes(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def record(explorer: Explorer) -> dict[str, Any]:
    """What a page without a server can show: the prompt and each head switched off.

    Returns:
        The answers to `describe`, to `read` for the prompt, to `position` at each of
        its tokens, and at the last of them with one head off, by "block.head".
    """
    model = explorer.describe()
    view = explorer.read(text=model["prompt"])
    settings = {name: model[name] for name in ("temperature", "top_k", "top_p")}
    count = len(view["tokens"])
    return {
        "model": model,
        "read": view,
        "positions": [
            explorer.position(view["ids"], position, **settings)
            for position in range(count)
        ],
        "heads": {
            f"{block}.{head}": explorer.position(
                view["ids"], count - 1, without=[[block, head]], **settings
            )
            for block in range(model["blocks"])
            for head in range(model["heads"])
        },
    }


def self_contained(recorded: dict[str, Any]) -> str:
    """The page, its style, its scripts and recorded answers as one HTML file."""
    style = _bytes(STYLE).decode()
    script = "\n".join(_plain_script(name) for name in (*MODULES, MAIN))
    data = json.dumps(recorded, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no text can end the element
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; img-src data:; base-uri 'none'"
    )
    page = _bytes(INDEX).decode()
    for old, new in (
        (
            '<link rel="stylesheet" href="explorer.css">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
            f"<style>{style}</style>",
        ),
        (
            '<script type="module" src="explorer.js"></script>',
            f'<script type="application/json" id="recorded">{data}</script>\n'
            f'<script type="module">{script}</script>',
        ),
    ):
        before, after = page.split(old)
        page = f"{before}{new}{after}"
    return page


def _plain_script(name: str) -> str:
    """A module without its imports and exports: all share one scope."""
    script = _bytes(name).decode()
    script = re.sub(r"^import [^;]*;\n", "", script, flags=re.MULTILINE)
    return re.sub(r"^export ", "", script, flags=re.MULTILINE)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
