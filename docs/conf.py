"""The documentation site, by Sphinx: `make docs` writes it to build/site and fails on any link that leads nowhere.

The sources are the repository's Markdown files where they lie, so that a link that is right there is right in the site.
Nothing is fetched while it is built or read. The front page is README.md, with the navigation below.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# By task, as docs/README.md is.
NAVIGATION = {
    "Use it": {
        "What is where": "docs/README",
        "From Python": "docs/python",
        "On the command line": "docs/command-line",
        "Settings": "docs/settings",
        "Choose sampling and beams": "docs/sampling",
        "Call tools, and show reasoning": "docs/tools",
        "Make answers match a schema": "docs/structured-output",
        "Load a model": "docs/models",
        "Run mixtures of experts": "docs/experts",
        "Run models with states": "docs/states",
        "Use adapters": "docs/adapters",
    },
    "Serve it": {
        "Run a server": "docs/serving",
        "Open its page": "docs/console",
        "Ask a server": "docs/clients",
        "Serve several models": "docs/several-models",
        "Keep conversations": "docs/responses",
        "Speak Anthropic's protocol": "docs/messages",
        "Speak Ollama's protocol": "docs/ollama",
        "Keep answers over restarts": "docs/tiers",
        "Compute prompts apart from answers": "docs/prefill-decode",
        "Run it on a CPU": "docs/cpu",
        "Run it on a GPU": "docs/gpu",
        "Run it on several devices": "docs/parallel",
        "Run it on several machines": "docs/ray",
        "Scale it": "docs/scaling",
        "Deploy it": "docs/deployment",
        "Watch it": "docs/metrics",
        "Security": "SECURITY",
    },
    "More than text": {
        "Read hidden states": "docs/hidden-states",
        "Several tokens from one step": "docs/speculation",
        "Encoder-decoder models": "docs/encoder-decoder",
        "Read images and video": "docs/images",
        "Transcribe speech": "docs/speech",
        "Rerank, score and classify": "docs/rerank",
        "Examples that run": "examples/README",
    },
    "Measure it": {
        "Put load on a server": "docs/benchmarking",
        "Benchmark programs": "bench/README",
        "Measure on a GPU": "bench/gpu/README",
        "Notes of GPU measurements": "bench/gpu/NOTES",
    },
    "Change it": {
        "Architecture": "docs/architecture",
        "Add parts from other packages": "docs/plugins",
        "An example of such a package": "examples/plugin/README",
        "Contributing": "CONTRIBUTING",
        "Changelog": "CHANGELOG",
    },
}

project = "Ratoon"
root_doc = "README"
# A file in docs/ that the navigation lacks is a warning, and so an error.
include_patterns = [
    "README.md",
    "docs/*.md",
    *(f"{page}.md" for pages in NAVIGATION.values() for page in pages.values()),
]
exclude_patterns = [".*", "build", "dist", "ratoon", "tests"]  # not even looked into

extensions = ["myst_parser"]
myst_heading_anchors = 4  # the anchors that code hosts make
myst_links_external_new_tab = False
nitpicky = True
smartquotes = False  # "--option" keeps both of its hyphens
suppress_warnings = [
    "misc.highlighting_failure"
]  # commands over several lines, which the lexer of consoles takes for errors

html_theme = "furo"
html_title = "Ratoon"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
html_permalinks_icon = "#"

LOADED_FROM_ELSEWHERE = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*\s(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Adds the navigation to the text of the front page, whose file has none: code hosts would show it as text."""
    if page != root_doc:
        return
    for caption, pages in NAVIGATION.items():
        entries = "\n".join(f"{title} </{name}>" for title, name in pages.items())
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def finish(app: Sphinx, error: Exception | None) -> None:
    """Makes README.html the page that a web server shows first, and refuses pages that load anything from elsewhere."""
    if error is not None:
        return
    site = Path(app.outdir)
    shutil.copyfile(site / "README.html", site / "index.html")
    for path in site.rglob("*.html"):
        found = LOADED_FROM_ELSEWHERE.search(path.read_text(encoding="utf-8"))
        if found is not None:
            raise ExtensionError(f"{path.relative_to(site)} loads from elsewhere: {found[0]}")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", finish)
