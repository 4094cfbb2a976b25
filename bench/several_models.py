"""A server with three models: how long the list of models takes, the first token of a model that is not loaded, and of
one that sleeps. Prints the medians beside the aims.

    python bench/several_models.py smollm2-135m --rounds 3

Each model is the same one under another name, with an engine process of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

AIMS = {"list of models": 0.005, "cold first token": 3.0, "first token of a sleeping model": 0.5}
NAMES = ("a", "b", "c")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; 100 times as many of the list")
    parser.add_argument("--option", action="append", default=[], metavar="WORD", help="a word for `ratoon serve`")
    parser.add_argument("--json", metavar="FILE", help="write the figures to this file")
    args = parser.parse_args()
    words = ["--keep-alive", "1s", "--kv-memory", "512MiB", "--port", "0", *args.option]
    command = [sys.executable, "-m", "ratoon", "serve", *(f"{name}={args.model}" for name in NAMES), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            figures = measure(server.stdout.readline().split()[0], args.rounds)
        finally:
            server.terminate()
    for name, seconds in figures.items():
        print(f"{name:32} {seconds * 1000:9.1f} ms   {seconds / AIMS[name]:5.2f} of the aim ({AIMS[name] * 1000:g} ms)")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file)
    return 0


def measure(url: str, rounds: int) -> dict[str, float]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    lists = [timed(lambda: states(url, connection)) for _ in range(100 * rounds)]
    connection.close()
    cold, asleep = [], []
    for number in range(rounds):
        name = NAMES[number % len(NAMES)]
        post(url, "/api/generate", {"model": name, "keep_alive": 0})  # unloaded
        cold.append(first_token(url, name))
        while states(url)[name] != "asleep":
            time.sleep(0.05)
        asleep.append(first_token(url, name))
    return dict(zip(AIMS, map(statistics.median, (lists, cold, asleep))))


def first_token(url: str, name: str) -> float:
    return timed(lambda: post(url, "/v1/completions", {"model": name, "prompt": "The sky is", "max_tokens": 1}))


def timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def states(url: str, connection: http.client.HTTPConnection | None = None) -> dict[str, str]:
    connection = connection or http.client.HTTPConnection(url.removeprefix("http://"))
    connection.request("GET", "/v1/models")
    return {model["id"]: model["state"] for model in json.load(connection.getresponse())["data"]}


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
