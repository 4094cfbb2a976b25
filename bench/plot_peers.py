"""The result of cpu_peers.py as a picture: how many times faster than each peer, workload by workload.

    .venv/bin/python bench/plot_peers.py result.json docs/peers.svg            # its first table
    .venv/bin/python bench/plot_peers.py result.json docs/peers.svg --part float32

Plain SVG, written here: a bar chart needs no plotting library.
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

COLOURS = {
    "transformers": "#b8a07a",
    "vllm": "#4d7c5f",
    "llama.cpp": "#7a8fb8",
    "llama-server": "#a3b1cc",
    "ctranslate2": "#b87a7a",
}
NAMES = {
    "transformers": "transformers generate",
    "vllm": "vLLM, CPU build",
    "llama.cpp": "llama.cpp",
    "llama-server": "its server",
    "ctranslate2": "CTranslate2, int8",
}
LONGEST = 2.5  # a bar beyond this is cut and only its number tells
LEFT, WIDTH, BAR, GAP = 190, 420, 15, 14
INK = "#444"


def draw(result: dict[str, Any], run: dict[str, Any]) -> str:
    """One of the result's tables."""
    what = f"{result['model']}, {run['title']}, {run['threads']} threads"
    title = f"Ratoon's speed over each peer's: {what}, {result['machine']['cpu']}"
    parts = [_text(14, 24, title, size=14, weight="bold")]
    y = 58
    for figure, values in run["figures"].items():
        ratios = values["ratios"]
        parts.append(_text(LEFT - 10, y + BAR * len(ratios) / 2 + 4, figure.replace("-", " "), anchor="end"))
        for engine, ratio in ratios.items():
            parts += _bar(y, engine, ratio)
            y += BAR
        y += GAP
    one = LEFT + WIDTH / LONGEST
    parts.append(f'<line x1="{one}" y1="46" x2="{one}" y2="{y - GAP / 2}" stroke="{INK}" stroke-dasharray="3 3"/>')
    parts.append(_text(one, 42, "1×, equally fast", size=10, anchor="middle"))
    engines = dict.fromkeys(engine for values in run["figures"].values() for engine in values["ratios"])
    for index, engine in enumerate(engines):
        x = 14 + index * 170
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLOURS[engine]}"/>')
        parts.append(_text(x + 16, y + 10, f"against {NAMES[engine]}"))
    height = y + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 90}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _bar(y: float, engine: str, ratio: dict[str, float]) -> list[str]:
    length = min(ratio["median"], LONGEST) / LONGEST * WIDTH
    cut = " →" if ratio["median"] > LONGEST else ""
    number = f"{ratio['median']:.2f}×" if ratio["median"] < 10 else f"{ratio['median']:.0f}×"
    return [
        f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLOURS[engine]}"/>',
        _text(LEFT + length + 6, y + BAR - 4, number + cut, size=11),
    ]


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{INK}">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--part", help="the first table of this part")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    runs = [run for run in result["runs"] if args.part in (None, run["part"])]
    if not runs:
        parser.error(f"--part: {args.part}; expected one of {', '.join({run['part'] for run in result['runs']})}")
    args.picture.write_text(draw(result, runs[0]))


if __name__ == "__main__":
    main()
