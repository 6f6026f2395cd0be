"""Record finished runs as JSON and render the README's tables from it.

Usage: python examples/record_runs.py NAME RUN_FOLDER [RUN_FOLDER ...]
       python examples/record_runs.py            (renders the README only)
"""

import sys
from pathlib import Path

from keras_tinygpt.studies.results import record_runs, render_readme

root = Path(__file__).resolve().parent.parent
if len(sys.argv) > 2:
    folders = [Path(argument) for argument in sys.argv[2:]]
    record_runs(folders, root / "examples" / "results" / f"{sys.argv[1]}.json")
readme = root / "README.md"
text = render_readme(readme.read_text("utf-8"), root / "examples" / "results")
readme.write_text(text, "utf-8")
