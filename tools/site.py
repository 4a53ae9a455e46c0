"""MkDocs hooks: generated pages, pages from outside docs/, and links to files outside of it."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import kvkeep
from tools.reference import api_page, commands_page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, name, content=_rewrite_links(text, ROOT, config)))
    references = {"api.md": _reference, "commands.md": commands_page, "http-api.md": api_page}
    for name, make_page in references.items():
        if short_page := files.get_file_from_path(name):  # which is read where there is no site
            files.remove(short_page)
        files.append(File.generated(config, name, content=make_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    source = page.file.abs_src_path
    return markdown if source is None else _rewrite_links(markdown, Path(source).parent, config)


def _reference() -> str:
    """Return the page with the public API, generated from docstrings."""
    names = [name for name in kvkeep.__all__ if not name.startswith("_")]
    parts = [f"::: {_qualified_name(name)}\n" for name in sorted(names, key=str.lower)]
    errors = "## Errors\n\n::: kvkeep.errors\n"
    return "\n".join(["# Python\n", "`import kvkeep` gives:\n", *parts, errors])


def _qualified_name(name: str) -> str:
    value = getattr(kvkeep, name)
    return f"{value.__module__}.{value.__qualname__}"


def _rewrite_links(text: str, folder: Path, config: MkDocsConfig) -> str:
    """Rewrite the links of a file in `folder` to those of the site."""

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = (folder / target).resolve()
        if not path.exists():
            return match[0]  # MkDocs reports it
        relative = path.relative_to(ROOT)
        docs = ROOT / "docs"
        if str(relative) in PAGES:
            return f"]({PAGES[str(relative)]}{anchor})"
        if path.is_relative_to(docs) and not path.is_relative_to(docs / "results"):
            return f"]({path.relative_to(docs)}{anchor})"
        return f"]({config.repo_url}/blob/main/{relative}{anchor})"

    return _LINK.sub(link, text)
