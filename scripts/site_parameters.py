"""For the site: functions with a table show FlashInfer's parameters, with the words of docs/flashinfer_arguments.md.

Nothing of Quire is imported.
"""

import ast
import re
from pathlib import Path
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parent.parent
SECTIONS = (ROOT / "docs/flashinfer_arguments.md").read_text(encoding="utf-8").split("\n## ")[1:]
ROWS = {name: rows for name, _, rows in (section.partition("\n") for section in SECTIONS)}
SIGNATURES = ast.parse((ROOT / "src/quire/integrations/flashinfer/signatures.py").read_text(encoding="utf-8"))
RAISES = next(
    ast.literal_eval(x.value)
    for x in SIGNATURES.body
    if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "RAISES"
)


class Parameters(griffe.Extension):
    """Do for griffe, which reads the source, what `Table.accepts` does when it runs."""

    def on_function_instance(self, *, node: Any, func: Any, **_: Any) -> None:
        """Replace the one parameter, and complete the docstring."""
        for decorator in getattr(node, "decorator_list", ()):
            if not ast.unparse(decorator).partition("(")[0].endswith(".accepts"):
                continue
            names = [x.id for x in ast.walk(decorator.args[0]) if isinstance(x, ast.Name)]
            strings = {name: ast.literal_eval(str(func.module.members[name].value)) for name in names}
            parameters = eval(ast.unparse(decorator.args[0]), strings)
            own = "self, " if func.parent.is_class else ""
            shown = griffe.visit(func.name, Path(), f"def {func.name}({own}{parameters}): ...")[func.name]
            func.parameters = shown.parameters
            owner = f"{func.parent.name}." if func.parent.is_class else ""
            name = f"{owner}{func.name}".removesuffix(".__init__").removesuffix("_return_lse")
            words = re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", ROWS[name], re.MULTILINE)
            lines = "".join(f"    {argument}: {text}.\n" for argument, text in words)
            before, returns, after = func.docstring.value.partition("\nReturns:\n")
            func.docstring.value = f"{before.rstrip()}\n\nArgs:\n{lines}{returns}{after.rstrip()}\n{RAISES}"
