#!/usr/bin/env python3
"""Open the built site in headless Chromium, as a desktop and as a phone: tools/site_browser.py build/site [--pictures FOLDER]

A reader types into the search. The page that has the words is among the first results, and a click opens the first one. No page
is wider than the screen, and none reports an error. `--pictures` keeps what was seen. Without a Chromium on PATH the site is not
opened, and the command says so.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SCREENS = {"desktop": (1280, 900), "phone": (390, 844)}

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


class Refused(RuntimeError):
    """A command that Chromium did not carry out, such as a script in a page that was just left."""


class Browser:
    """A page of a headless Chromium, spoken to over a pair of pipes."""

    def __init__(self, program: str, profile: str) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        options += ["--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"]

        def ends() -> None:  # Chromium reads commands from 3 and answers on 4
            at_3, at_4 = os.dup(read), os.dup(write)
            os.dup2(at_3, 3)
            os.dup2(at_4, 4)

        self._process = subprocess.Popen(
            [program, *options], close_fds=False, preexec_fn=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(read)
        os.close(write)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: object) -> dict[str, Any]:
        """Send a command and return its result; what happens meanwhile goes into `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise Refused(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not (more := os.read(self._read, 1 << 16)):
                raise RuntimeError("Chromium ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def screen(self, name: str) -> None:
        """Become a desktop or a phone."""
        width, height = SCREENS[name]
        phone = name == "phone"
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self.events.clear()
        for there in ("about:blank", url):  # from one page to itself, what is asked first may answer for the old one
            self.send("Page.navigate", url=there)
            self.wait(f"document.readyState == 'complete' && location.href == {there!r}", there)

    def run(self, script: str) -> Any:
        """The value of a script."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, script: str, what: str, seconds: float = 30) -> None:
        """Until a script is true, be it in the next page."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(Refused):
                if self.run(script):
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{what}: not after {seconds:g} s: {script}")

    def type(self, text: str) -> None:
        """Type into what has the focus. The last letter comes by its key, which is when the site looks the whole text up."""
        self.send("Input.insertText", text=text[:-1])
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, text=text[-1], key=text[-1])

    def click(self, selector: str) -> None:
        """Click the middle of an element, once it has stopped to move."""
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        script = f"(box => [box.x + box.width / 2, box.y + box.height / 2])({box})"
        before, there = None, self.run(script)
        while there != before:
            time.sleep(0.1)
            before, there = there, self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=there[0], y=there[1], button="left", clickCount=1)

    def picture(self, file: Path) -> None:
        """Write what is seen as a PNG."""
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def errors(self) -> list[str]:
        """Errors that the page reported since it was opened."""
        messages: list[str] = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                messages.append(event["params"]["exceptionDetails"]["text"])
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                messages.append(event["params"]["entry"]["text"])  # such as a script that is not there
        return messages

    def close(self) -> None:
        """End the browser."""
        self._session = ""
        self.send("Browser.close")
        self._process.wait(30)
        os.close(self._read)
        os.close(self._write)


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


RESULTS = "[...document.querySelectorAll('.md-search-result__item > .md-search-result__link')].map(link => link.href)"


def search(browser: Browser, home: str, screen: str, words: str, target: str) -> str | None:
    """Type into the search of the first page. Returns what is wrong."""
    browser.open(home)
    field = "label.md-header__button[for=__search]" if screen == "phone" else ".md-search__input"
    browser.wait(f"document.querySelector({field!r}).getBoundingClientRect().width > 0", "the search")
    browser.wait("document.querySelector('.md-search-result__meta').innerText.startsWith('Type')", "the search's index")
    browser.click(field)
    browser.wait("document.activeElement.matches('.md-search__input')", "the search's focus")
    browser.type(words)
    browser.wait(f"{RESULTS}.length > 0", f"a result for {words}")
    links = (link.removeprefix(home).partition("?")[0].partition("#")[0] for link in browser.run(RESULTS))
    first = list(dict.fromkeys(link or "index.html" for link in links))[:FIRST]
    if target not in first:
        return f"{screen}: {words!r} finds {', '.join(first)}, and not {target}"
    return None


def problems(
    site: Path, program: str, pictures: Path | None = None, searches: Mapping[str, str] = SEARCHES
) -> Iterator[str]:
    """Problems that a reader would see."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, served(site) as home:
        browser = Browser(program, profile)
        try:
            for screen in SCREENS:
                browser.screen(screen)
                for words, target in searches.items():
                    problem = search(browser, home, screen, words, target)
                    if pictures:
                        time.sleep(0.5)  # the sheet slides in
                        browser.picture(pictures / f"search-{words.replace(' ', '-')}-{screen}.png")
                    if problem:
                        yield problem
                        continue
                    first = browser.run(f"{RESULTS}[0]")
                    browser.click(".md-search-result__item > .md-search-result__link")
                    browser.wait(
                        f"location.pathname == new URL({first!r}).pathname", f"{screen}: the first result of {words!r}"
                    )
                for path in sorted(site.rglob("*.html")):
                    page = path.relative_to(site).as_posix()
                    browser.open(home + page)
                    there, room = browser.run("(e => [e.scrollWidth, e.clientWidth])(document.documentElement)")
                    if there > room:
                        yield f"{screen}: {page} is {there} pixels wide, and the screen {room}"
                    yield from (f"{screen}: {page}: {error}" for error in browser.errors())
                    if pictures:
                        name = page.removesuffix("/index.html").removesuffix(".html").replace("/", "-")
                        browser.picture(pictures / f"{name}-{screen}.png")
        finally:
            browser.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("--pictures", type=Path, help="a folder for screenshots of every page and search")
    options = parser.parse_args()
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        print(f"not run: no Chromium on PATH (looked for {', '.join(NAMES)}); Debian has it as chromium")
        return 0
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
    faults = list(problems(options.site, program, options.pictures))
    print(*faults, sep="\n")
    print(f"{len(SEARCHES)} searches and every page, as a desktop and as a phone: {len(faults)} problems")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
