"""llama.cpp's own server: a slot for each of several requests, which arrive at once over HTTP.

The settings name the program (`server`) and how many slots it has (`slots`).
"""

from __future__ import annotations

import argparse
import atexit
import http.client
import json
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from peers.protocol import Calls, TokenIds, serve

SECONDS_TO_START = 120
SECONDS_TO_ANSWER = 600


def load(args: argparse.Namespace) -> Calls:
    slots = args.settings["slots"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [args.settings["server"], "-m", args.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["-np", str(slots), "-c", str(slots * args.max_model_len)]
    command += ["-t", str(args.threads), "-tb", str(args.threads)]
    process = subprocess.Popen(command)
    atexit.register(process.terminate)
    _wait(process, port)
    senders = ThreadPoolExecutor(slots)

    def generate(prompts: TokenIds, num_tokens: int) -> TokenIds:
        return list(senders.map(lambda prompt: _complete(port, prompt, num_tokens), prompts))

    return {"generate": generate}


def _wait(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise RuntimeError(f"llama-server is not ready after {SECONDS_TO_START} s")


def _complete(port: int, prompt: list[int], num_tokens: int) -> list[int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_TO_ANSWER)
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(f"llama-server: {response.status} {answer}")
    tokens: list[int] = answer["tokens"]
    return tokens


if __name__ == "__main__":
    serve(load, ("llama-cpp-python",))
