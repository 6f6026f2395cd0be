"""Render the README's tables anew from the results beside this script.

Usage: python examples/render_readme.py
"""

from pathlib import Path

from keras_tinygpt.studies.results import render_readme

root = Path(__file__).resolve().parent.parent
readme = root / "README.md"
text = render_readme(readme.read_text("utf-8"), root / "examples" / "results")
readme.write_text(text, "utf-8")
