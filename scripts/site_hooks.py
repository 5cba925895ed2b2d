"""What `mkdocs` does with the repository's Markdown beyond its own: pages from outside of docs/, and source files.

The Markdown is written for GitHub, where a link may lead anywhere in the repository. In the site:

* DESIGN.md, CONTRIBUTING.md and CHANGELOG.md are pages.
* A link to the README leads to the first page.
* A link to another file or folder of the repository leads to a page that shows it.
* Entries of the navigation whose page does not exist are left out.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the tests of links run without mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")  # shown as pages
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".toml": "toml", ".md": "markdown"}
HOME = "README.md"


def on_config(config: "MkDocsConfig") -> "MkDocsConfig":
    """Leave out the entries of the navigation whose page does not exist."""
    config.nav = existing(config.nav, Path(config.docs_dir))
    return config


def existing(entries: Any, docs: Path) -> Any:
    """Return a part of the navigation without the pages that do not exist."""
    if isinstance(entries, str):
        return entries if (docs / entries).exists() or entries in OUTSIDE else None
    if isinstance(entries, dict):
        kept = {title: existing(entry, docs) for title, entry in entries.items()}
        return {title: entry for title, entry in kept.items() if entry} or None
    return [entry for entry in (existing(entry, docs) for entry in entries) if entry]


def on_files(files: "Files", *, config: "MkDocsConfig") -> "Files":
    """Add the pages from outside of docs/, and a page for every file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    shown = set()
    for file in list(files.documentation_pages()):
        for path in linked(file.content_string, file.src_uri):
            if path not in shown and page_of(path).startswith("source/"):
                shown.add(path)
                files.append(
                    File.generated(
                        config, page_of(path), content=source_page(path), inclusion=InclusionLevel.NOT_IN_NAV
                    )
                )
    return files


def on_page_markdown(markdown: str, *, page: "Page", **_: Any) -> str:
    """Return a page's Markdown with links into the repository as links within the site."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    if page.parent is None:  # a tab of one page needs no list of pages
        page.meta["hide"] = ["navigation", "toc"] if here == HOME else ["navigation"]

    def rewrite(match: re.Match[str]) -> str:
        path = in_repository(match[2], here)
        if path is None:
            return match[0]
        anchor = match[3] or ""
        if page_of(path) == HOME:
            anchor = ""
        return f"{match[1]}{posixpath.relpath(page_of(path), posixpath.dirname(here) or '.')}{anchor})"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


def linked(markdown: str, here: str) -> list[str]:
    """Return the paths in the repository, outside of docs/, that a page links to."""
    prose = "".join(FENCE.split(markdown)[::2])
    paths = (in_repository(match[2], here) for match in LINK.finditer(prose))
    return [path for path in paths if path is not None]


def in_repository(link: str, here: str) -> str | None:
    """Return the path in the repository that a page links to; None within docs/, and for other sites."""
    if re.match(r"[a-z]+:", link):
        return None
    folder = posixpath.dirname(here) if here in OUTSIDE else posixpath.join("docs", posixpath.dirname(here))
    path = posixpath.normpath(posixpath.join(folder, link))
    if path.startswith("docs/") and here not in OUTSIDE:
        return None
    return path


def page_of(path: str) -> str:
    """Return the page of the site that shows a path of the repository."""
    if path in ("README.md", "docs/README.md"):
        return HOME
    if path in OUTSIDE:
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md"


def source_page(path: str) -> str:
    """Return the page that shows a file or a folder of the repository. It cannot be found by the search."""
    file = ROOT / path
    head = f"---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---\n# {file.name}\n\n`{path}`\n\n"
    if file.is_dir():
        names = sorted(child.name for child in file.iterdir() if not child.name.startswith(("_", ".")))
        return head + "".join(f"* `{name}`\n" for name in names)
    text = file.read_text(encoding="utf-8")
    longest = max([2, *map(len, re.findall(r"`{3,}", text))])
    fence = "`" * (longest + 1)
    language = LANGUAGES.get(file.suffix, "text")
    return f'{head}{fence}{language} linenums="1"\n{text}\n{fence}\n'
