#!/usr/bin/env python3
"""Check the built site: tools/site_links.py build/site

mkdocs checks the links that Markdown makes. This reads the HTML: every link, picture, script and style sheet of every page leads
to a file of the site, and every #place to an id there. A page loads nothing from another host. Each op has a page.
"""

from __future__ import annotations

import posixpath
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent


class Page(HTMLParser):
    """The links and the ids of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # the tag, and where it leads
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids.update(value for name in ("id", "name") if (value := named.get(name)))
        for name in ("href", "src"):
            if (target := named.get(name)) is not None and named.get("rel") not in ("canonical", "preconnect"):
                self.links.append((tag, target))


def problems(site: Path) -> list[str]:
    """Problems of a built site."""
    pages = {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}
    faults = []
    for name, page in pages.items():
        for tag, target in page.links:
            parts = urlsplit(target)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                if tag != "a":
                    faults.append(f"{name}: a <{tag}> is loaded from {target}")
                continue
            path = unquote(parts.path)
            # 404.html is served in the place of any page, so its links begin at the site's root.
            where = path.lstrip("/") if path.startswith("/") else posixpath.join(posixpath.dirname(name), path)
            where = posixpath.normpath(where) if path else name
            if where.startswith(".."):
                faults.append(f"{name}: {target} leads out of the site")
                continue
            file = site / where / "index.html" if (site / where).is_dir() else site / where
            if not file.is_file():
                faults.append(f"{name}: {target} leads nowhere")
                continue
            key = file.relative_to(site).as_posix()
            if parts.fragment and key in pages and unquote(parts.fragment) not in pages[key].ids:
                faults.append(f"{name}: {target}: there is no such place")
    for path in sorted((ROOT / "packages/liger-core/src/liger_core/ops").glob("[!_]*.py")):
        if f"ops/{path.stem}/index.html" not in pages:
            faults.append(f"ops/{path.stem}: it has no page")
    if not (site / "search/search_index.json").is_file():
        faults.append("there is no search index")
    return faults


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print(__doc__)
        return 2
    site = Path(sys.argv[1])
    faults = problems(site)
    print("\n".join(faults) or f"{len(list(site.rglob('*.html')))} pages, no broken link")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
