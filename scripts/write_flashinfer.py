"""Write docs/flashinfer_arguments.md: what is done with each argument of FlashInfer's functions, from their tables.

python scripts/write_flashinfer.py
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quire.integrations import flashinfer

PAGE = Path(__file__).parent.parent / "docs/flashinfer_arguments.md"
HEAD = """<!-- Written by scripts/write_flashinfer.py. -->
# FlashInfer's arguments

[In place of FlashInfer](flashinfer.md) says how to use these names.
Names, order and defaults are those of FlashInfer 0.7.4.
An argument that is refused raises an error, unless it has its default.
"""


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each public function and method that has a table, by its name."""
    for name in flashinfer.__all__:
        found = getattr(flashinfer, name)
        if not inspect.isclass(found):
            yield name, found
            continue
        for method, function in vars(found).items():
            if method == "__init__":
                yield name, function
            elif method in ("plan", "run", "forward"):
                yield f"{name}.{method}", function


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for name, function in functions():
        table = getattr(function, "table", None)
        if table is None:
            continue
        parts.append(f"\n## {name}\n\n| argument | default | |\n| --- | --- | --- |\n")
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in table:
                continue
            argument = table[parameter.name]
            default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
            words = f"refused: {argument.words}" if argument.kind == "refused" else argument.words.rstrip(".")
            parts.append(f"| `{parameter.name}` | {default} | {words} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
