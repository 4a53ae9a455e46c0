"""Hooks of MkDocs: pages of the site that are not in docs/, and links that lead out of it."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import kvkeep

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
        files.append(File.generated(config, name, content=_moved(text, ROOT, config)))
    files.append(File.generated(config, "api.md", content=_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    source = page.file.abs_src_path
    return markdown if source is None else _moved(markdown, Path(source).parent, config)


def _reference() -> str:
    """All that `import kvkeep` gives, from the docstrings."""
    names = [name for name in kvkeep.__all__ if not name.startswith("_")]
    parts = [f"::: {_home(name)}\n" for name in sorted(names, key=str.lower)]
    errors = "## Errors\n\n::: kvkeep.errors\n"
    return "\n".join(["# Python\n", "`import kvkeep` gives:\n", *parts, errors])


def _home(name: str) -> str:
    found = getattr(kvkeep, name)
    return f"{found.__module__}.{found.__qualname__}"


def _moved(text: str, folder: Path, config: MkDocsConfig) -> str:
    """Links of a file in a folder of the repository, as they are on the site."""

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = (folder / target).resolve()
        if not path.exists():
            return found[0]  # which MkDocs complains of
        inside = path.relative_to(ROOT)
        docs = ROOT / "docs"
        if str(inside) in PAGES:
            return f"]({PAGES[str(inside)]}{anchor})"
        if path.is_relative_to(docs) and not path.is_relative_to(docs / "results"):
            return f"]({path.relative_to(docs)}{anchor})"
        return f"]({config.repo_url}/blob/main/{inside}{anchor})"

    return _LINK.sub(link, text)
