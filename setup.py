"""Make the long description of README.md. Everything else about the package is in pyproject.toml.

A package index shows the README outside of the repository, where its relative links lead nowhere. They lead to
`Repository` of [project.urls], and become plain text while there is none.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:)([^)]*)\)")
PICTURE = re.compile(r'(<img\b[^>]* src=")(?![a-z]+:)([^"]*)("[^>]*>)')


def long_description() -> str:
    """Return the README with links that can be followed from anywhere."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})

    def absolute(link: re.Match[str]) -> str:
        image, text, path = link.groups()
        if "Repository" in urls:
            return f"{image}[{text}]({urls['Repository']}/{'raw' if image else 'blob'}/HEAD/{path})"
        return "" if image else text

    raw = f"{urls['Repository']}/raw/HEAD/" if "Repository" in urls else ""
    text = PICTURE.sub(rf"\g<1>{raw}\2\3" if raw else "", (ROOT / "README.md").read_text("utf-8"))
    return RELATIVE.sub(absolute, text)


if __name__ == "__main__":
    setup(long_description=long_description(), long_description_content_type="text/markdown")
