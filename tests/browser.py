"""Draw a page in real headless Chromium and read back what it holds; skip where none is installed.

The DevTools protocol would need a WebSocket client, so a probe script is put into a copy of the
page: it records errors, measures every plot, and leaves the result in the document that
`--dump-dom` prints. The page itself has no script.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
EARLY = """<script>
window.found = [];
addEventListener("error", e => found.push(String(e.message || e.target.outerHTML)), true);
for (const name of ["error", "warn"]) console[name] = (...x) => found.push(x.join(" "));
</script>"""
LATE = """<script>
addEventListener("load", () => {
  const plots = [...document.querySelectorAll("figure.plot")].map(figure => {
    const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
    const marks = svg.querySelectorAll("rect, circle, polyline, polygon, line");
    const drawn = [...marks].filter(m => { const b = m.getBoundingClientRect();
      return b.width + b.height > 0; }).length;
    const texts = [...svg.querySelectorAll("text")].map(t => t.getBoundingClientRect());
    const outside = texts.filter(t => t.left < box.left - 2 || t.right > box.right + 2).length;
    return {width: box.width, height: box.height, drawn, outside,
            caption: figure.querySelector("figcaption").textContent};
  });
  const result = {plots, errors: found, milliseconds: performance.now(),
    width: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(r => r.name)};
  const node = document.createElement("pre");
  node.id = "probe"; node.textContent = JSON.stringify(result);
  document.body.appendChild(node);
});
</script>"""


def chromium() -> str:
    """Path of a Chromium, or a skip with the reason."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed: apt-get install chromium")


def draw(page: Path, screenshot: Path, width: int = 1280, height: int = 3000) -> dict[str, Any]:
    """Draw `page`, keep a screenshot, and return the probe's findings.

    plots: width, height, marks drawn, texts outside; errors: console and loading; milliseconds
    from navigation until everything is laid out; requests: everything the page asked for.
    """
    browser = chromium()
    text = page.read_text(encoding="utf-8")
    probed = page.with_name(page.stem + "-probed.html")
    probed.write_text(text.replace("<head>", "<head>" + EARLY).replace("</body>", LATE + "</body>"))
    window = f"--window-size={width},{height}"
    dom = _run(browser, window, "--dump-dom", probed.as_uri())
    _run(browser, window, f"--screenshot={screenshot}", page.as_uri())
    match = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.S)
    assert match, "the page did not finish drawing"
    content = match[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    return json.loads(content)


def _run(browser: str, *arguments: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [browser, *FLAGS, f"--user-data-dir={profile}", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    console = [row for row in done.stderr.splitlines() if "CONSOLE" in row]
    assert not console, console
    return done.stdout
