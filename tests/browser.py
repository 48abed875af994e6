"""Pages in a real browser, where Chromium is installed: `apt-get install chromium`."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; apt-get install chromium")


def dom(page: Path, folder: Path) -> str:
    """Return the elements of a page as they are after its scripts have run; the browser keeps its files in `folder`."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options = [f"--user-data-dir={folder / 'chromium'}", "--virtual-time-budget=20000000", "--window-size=1400,900"]
    printed = subprocess.run(
        [*command, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return printed.stdout


def found_by(script: str, page: str, folder: Path) -> Any:
    """Return what a function body of JavaScript returns after the script of a page has run.

    The page's Content-Security-Policy allows that script too, and nothing more.
    """
    # decoding a picture takes no virtual time, which ends at once where nothing else is due: the interval is
    driver = (
        "(async () => { const due = setInterval(() => {}, 4); let found; "
        "try { found = await (async () => {" + script + "})(); } "
        "catch (error) { found = `${error.stack}`; } "
        'const told = document.createElement("pre"); told.id = "found"; told.textContent = JSON.stringify(found); '
        "document.body.append(told); clearInterval(due); })();"
    )
    digest = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
    assert page.count("; script-src 'sha256-") == 1
    page = page.replace("; script-src ", f"; script-src 'sha256-{digest}' ").replace(
        "</body>", f"<script>{driver}</script></body>"
    )
    path = folder / "driven.html"
    path.write_text(page, encoding="utf-8")
    _, ended, rest = dom(path, folder).partition('<pre id="found">')
    assert ended, "the script did not come to its end"
    return json.loads(unescape(rest.partition("</pre>")[0]))
