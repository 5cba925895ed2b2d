"""Write docs/tour.ipynb, the tour as a notebook: its blocks of Python are cells of code, and all else is text.

    python scripts/write_tour.py

docs/tour.md is the source. A test runs the cells, in the folder of the notebook, as Jupyter does.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCE, NOTEBOOK = ROOT / "docs/tour.md", ROOT / "docs/tour.ipynb"
CODE = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def cells(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page in Markdown: kind ("markdown" or "code") and text."""
    parts = CODE.split(page)  # text and code take turns
    kinds = ("markdown", "code") * len(parts)
    return [(kind, part.strip()) for kind, part in zip(kinds, parts, strict=False) if part.strip()]


def notebook(page: str) -> str:
    """Return a page in Markdown as a notebook of format 4.5, without outputs."""
    found: list[dict[str, Any]] = []
    for i, (kind, text) in enumerate(cells(page)):
        cell = {"id": f"cell-{i}", "cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        found.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=NOTEBOOK, metavar="FILE", help="the notebook to write")
    parser.parse_args().output.write_text(notebook(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
