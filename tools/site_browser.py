#!/usr/bin/env python3
"""Open the built site in headless Chromium, as a desktop and as a phone: tools/site_browser.py build/site

A reader types into the search. The page that has the words is among the first results, and a click opens the first one. No page
is wider than the screen, reports an error, or loads anything from another host. Without a Chromium on PATH the site is not
opened, and the command says so.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCREENS: dict[str, Any] = {
    "desktop": {"viewport": {"width": 1280, "height": 900}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True},
}

# Words that a reader types, and a page that has to be among the first results.
SEARCHES = {
    "rms_norm": "ops/rms_norm/",
    "cross entropy": "ops/cross_entropy/",
    "attention": "ops/fused_neighborhood_attention/",
    "LIGER_STRICT": "choice/",
    "LigerCallback": "packages/liger-transformers/",
    "Return code 5": "troubleshooting/",
    "no installed language serves cuda": "troubleshooting/",
    "both installed the package": "troubleshooting/",
    "memory_budget": "tutorials/",
    "torch.compile": "modes/",
    "spill": "glossary/",
    "FSDP": "faq/",
    "npu": "porting-to-npu/",
    "install": "installs/",
    "Llama": "models/",
    "save memory": "memory/",
    "license": "index.html",
    "LossHead": "api/liger_distributed/",
}
FIRST = 5


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    """The site's address, on a server of this process: a browser gives a page of a file no search."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


RESULT = ".md-search-result__item > .md-search-result__link"


def search(page: Page, home: str, screen: str, words: str, target: str) -> str | None:
    """Type into the search of the first page, and open the first result. Returns what is wrong."""
    page.goto(home)
    page.locator(".md-search-result__meta", has_text="Type").wait_for(state="attached")  # the index is read
    page.click("label.md-header__button[for=__search]" if screen == "phone" else ".md-search__input")
    page.locator(".md-search__input:focus").wait_for()
    page.keyboard.insert_text(words[:-1])
    page.keyboard.type(words[-1])  # the site looks the text up at a key: only the whole text
    page.locator(RESULT).first.wait_for()
    hrefs: list[str] = page.locator(RESULT).evaluate_all("links => links.map(link => link.href)")
    links = (link.removeprefix(home).partition("?")[0].partition("#")[0] for link in hrefs)
    first = list(dict.fromkeys(link or "index.html" for link in links))[:FIRST]
    if target not in first:
        return f"{screen}: {words!r} finds {', '.join(first)}, and not {target}"
    page.locator(RESULT).first.click()
    page.wait_for_url(hrefs[0].partition("?")[0].partition("#")[0] + "*")
    return None


def problems_on(screen: str, site: Path, home: str, program: str, searches: Mapping[str, str]) -> list[str]:
    """Problems that a reader with one of `SCREENS` would see."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        # Another host is not found, so that whatever a page loads from there is an error.
        arguments = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=program, args=arguments)
        page = browser.new_page(**SCREENS[screen])
        for words, target in searches.items():
            if problem := search(page, home, screen, words, target):
                faults.append(problem)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(f"Uncaught {error}"))
        page.on(
            "console",
            lambda told: errors.append(f"{told.text} {told.location['url']}") if told.type == "error" else None,
        )
        page.route("**/search_index.json", lambda route: None)  # read anew by each page, it takes half of the time
        for path in sorted(site.rglob("*.html")):
            name = path.relative_to(site).as_posix()
            page.goto(home + name)
            there, room = page.evaluate("(e => [e.scrollWidth, e.clientWidth])(document.documentElement)")
            if there > room:
                faults.append(f"{screen}: {name} is {there} pixels wide, and the screen {room}")
            faults += [f"{screen}: {name}: {error}" for error in errors]
            errors.clear()
        browser.close()
    return faults


def problems(site: Path, program: str, searches: Mapping[str, str] = SEARCHES) -> list[str]:
    """Problems that readers would see, on all screens at once."""
    with served(site) as home, ThreadPoolExecutor() as threads:
        faults = threads.map(lambda screen: problems_on(screen, site, home, program, searches), SCREENS)
        return [fault for of_screen in faults for fault in of_screen]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"not run: no Chromium on PATH (looked for {', '.join(NAMES)}); Debian has it as chromium")
        return 0
    faults = problems(site, program)
    print(*faults, sep="\n")
    print(f"{len(SEARCHES)} searches and every page, as a desktop and as a phone: {len(faults)} problems")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
