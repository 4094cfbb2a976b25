"""axe-core, which finds what WCAG forbids in a page. Only tests of the console use it; it is kept in .cache.

Where it can't be had, the tests that need it are skipped, and say so. Its licence is the MPL-2.0; it is no part of the
package.
"""

from __future__ import annotations

import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.packages import MissingPackageError, keep, member, npm_pack, verify

VERSION = "4.14.0"
SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
FILE = "axe.min.js"
FOLDER = Path(__file__).parents[1] / ".cache" / f"axe-core-{VERSION}"

# What WCAG 2.1 asks for at its levels A and AA, and what axe-core recommends beyond.
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
COLOUR_RULES = ["color-contrast", "link-in-text-block"]  # those of them that depend on colours


def _make(folder: Path, scratch: Path) -> None:
    package = f"axe-core@{VERSION}"
    with tarfile.open(npm_pack(package, scratch)) as archive:
        script = member(archive, f"package/{FILE}")
    verify(script, SHA256, package)
    (folder / FILE).write_bytes(script)


@cache
def _script() -> str | MissingPackageError:
    """The script is looked for once: where no registry answers, every further test would wait for it again."""
    try:
        return (keep(FOLDER, _make) / FILE).read_text(encoding="utf-8")
    except MissingPackageError as error:
        return error


def script_or_skip() -> str:
    script = _script()
    if isinstance(script, MissingPackageError):
        pytest.skip(str(script))
    return script


def violations(page: Any, colours_alone: bool = False) -> list[str]:
    """Returns what a page of Playwright violates as it stands: the rule, the element, and what is wrong with it.
    `colours_alone`: for a page that is checked again in other colours, whose elements and names are the same."""
    page.evaluate(f"if (!window.axe) {{ {script_or_skip()} }} null")
    rules = {"type": "rule", "values": COLOUR_RULES} if colours_alone else {"type": "tag", "values": RULES}
    options = {"runOnly": rules, "resultTypes": ["violations"]}
    found = page.evaluate("async (options) => (await axe.run(document, options)).violations", options)
    return [f"{one['id']}: {node['html']}: {node['failureSummary']}" for one in found for node in one["nodes"]]
