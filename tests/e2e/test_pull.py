"""`ratoon pull` and `ratoon models`, against a hub that is a small HTTP server here: HF_ENDPOINT leads to it."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from tests.forked_engines import ForkedCommand, run_forked
from tests.waiting import PATIENCE, wait_until

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
GOOD = {
    "config.json": json.dumps(CONFIG).encode(), "model.safetensors": b"w" * 300_000, "tokenizer.json": b"{}",
    "pytorch_model.bin": b"never fetched",
}  # fmt: skip
REPOS = {
    "org/good": GOOD,
    "org/other-family": {**GOOD, "config.json": b'{"architectures": ["OtherForCausalLM"]}'},
    "org/gguf-only": {"model.gguf": b"GGUF", "damaged.gguf": b"GGUF of a broken disk"},
}
# More than the hub's library reads at a time, which is 10 MB
LARGE = bytes(range(256)) * (24 * 2**12)
SENT_AT_FIRST = 16 * 2**20
REPOS["org/large"] = {"large.gguf": LARGE}
HUGE = "org/huge"  # its listing says that it is larger than any disk


class FakeHub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        path = unquote(urlparse(self.path).path)
        if "org/gated" in path:
            return self.reply(403, b"", {"X-Error-Code": "GatedRepo"})
        name = next((name for name in (*REPOS, HUGE) if name in path), None)
        if name is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = REPOS.get(name, GOOD)
        if "/resolve/" in path:
            return self.reply_file(files, path.split("/resolve/")[1].split("/", 1)[1])
        sizes = {file: 10**18 if name == HUGE else len(content) for file, content in files.items()}
        if "/tree/" in path:
            listing = [
                {"type": "file", "path": file, "size": sizes[file], "oid": oid(content)}
                for file, content in files.items()
            ]
            return self.reply(200, json.dumps(listing).encode())
        siblings = [{"rfilename": file, "size": size, **checksum(file, files[file])} for file, size in sizes.items()]
        info = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        self.reply(200, json.dumps(info).encode())

    def reply_file(self, files: dict[str, bytes], file: str) -> None:
        if file not in files:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = files[file]
        headers = {"ETag": f'"{oid(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked is None or self.command == "HEAD":
            if content is LARGE and self.command == "GET" and self.server.stalls.is_set():  # type: ignore[attr-defined]
                return self.stall(content, headers)
            return self.reply(200, content, headers)
        self.server.ranges.append(asked)  # type: ignore[attr-defined]
        begin = int(asked.removeprefix("bytes=").removesuffix("-"))
        headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        rest = content[begin:]
        if self.server.damages.is_set():  # type: ignore[attr-defined]
            rest = b"?" + rest[1:]
        self.reply(206, rest, headers)

    def stall(self, content: bytes, headers: dict[str, str]) -> None:
        """Sends a part of a file, then nothing, until the client is gone."""
        self.send_response(200)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content[:SENT_AT_FIRST])
        self.rfile.read(1)  # the end of the connection
        self.close_connection = True

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def checksum(file: str, content: bytes) -> dict[str, object]:
    """What the hub says of large files. One of them is another than it says."""
    if not file.endswith(".gguf"):
        return {}
    told = b"another" if file == "damaged.gguf" else content
    return {"lfs": {"sha256": hashlib.sha256(told).hexdigest(), "size": len(content), "pointerSize": 100}}


def oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture(scope="module")
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.asked, server.ranges = [], []  # type: ignore[attr-defined]
    server.stalls, server.damages = threading.Event(), threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def variables_for(home: Path, endpoint: str, **variables: str) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RATOON_"))}
    return environment | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1", **variables}


def ratoon(home: Path, endpoint: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_forked(*words, env=variables_for(home, endpoint, **variables))


def address(server: http.server.ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def test_a_model_is_fetched_listed_and_not_fetched_again(hub, tmp_path: Path) -> None:
    empty = ratoon(tmp_path, address(hub), "models", "--json")
    assert empty.returncode == 0 and "org/good" not in empty.stdout
    first = ratoon(tmp_path, address(hub), "pull", "org/good")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.startswith("org/good: 293.1 KiB in ")
    folder = Path(first.stdout.split(" in ")[1].strip())
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    hub.asked.clear()
    assert ratoon(tmp_path, address(hub), "pull", "org/good").returncode == 0
    assert not any("safetensors" in path for path in hub.asked)
    listed = [json.loads(line) for line in ratoon(tmp_path, address(hub), "models", "--json").stdout.splitlines()]
    found = next(model for model in listed if model["name"] == "org/good")
    assert (found["kind"], found["architecture"], found["note"]) == ("hub", "LlamaForCausalLM", "")
    assert found["size"] >= 300_000 and found["path"] == str(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/nothing", "org/nothing: is neither here nor on the hub"),
        ("org/gated", "org/gated: is gated on the hub; accept its terms there, then set HF_TOKEN"),
        ("org/other-family", "architecture 'OtherForCausalLM' is not supported"),
        ("org/gguf-only", "org/gguf-only: is no model in the form that is read; a repository with config.json"),
        ("org/huge", "are free at"),
        ("org/gguf-only", "or --file NAME, one of damaged.gguf, model.gguf"),
        ("good", "good: is no hub id"),
    ],
)
@pytest.mark.one_in(3)
def test_what_can_not_be_fetched_says_why_in_one_line(hub, tmp_path: Path, name: str, words: str) -> None:
    hub.asked.clear()
    refused = ratoon(tmp_path, address(hub), "pull", name)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and words in refused.stderr
    assert not any("safetensors" in path for path in hub.asked)


def test_without_a_network_it_says_so_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    refused = ratoon(tmp_path, endpoint, "pull", "org/good")
    assert refused.returncode == 2
    assert refused.stderr == f"error: org/good: the hub ({endpoint}) can't be reached; is there a network?\n"
    offline = ratoon(tmp_path, endpoint, "pull", "org/good", HF_HUB_OFFLINE="1")
    assert offline.returncode == 2 and "HF_HUB_OFFLINE is set" in offline.stderr


def test_a_gguf_file_is_fetched_compared_and_deleted(hub, tmp_path: Path) -> None:
    pulled = ratoon(tmp_path, address(hub), "pull", "org/gguf-only", "--file", "model.gguf")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert pulled.stdout.startswith("org/gguf-only: 4 B, 1 checksum compared in ")
    file = Path(pulled.stdout.split(" in ")[1].strip())
    assert file.read_bytes() == b"GGUF"
    damaged = ratoon(tmp_path, address(hub), "pull", "org/gguf-only", "--file", "damaged.gguf")
    assert damaged.returncode == 2 and "and the hub's is" in damaged.stderr
    assert not (file.parent / "damaged.gguf").exists()
    other = ratoon(tmp_path, address(hub), "pull", "org/gguf-only", "--file", "modle.gguf")
    assert "has no GGUF file 'modle.gguf'; did you mean model.gguf?" in other.stderr
    removed = ratoon(tmp_path, address(hub), "rm", "org/gguf-only")
    assert removed.stdout == "org/gguf-only: 4 B freed\n" and not file.exists()
    again = ratoon(tmp_path, address(hub), "rm", "org/gguf-only")
    assert again.returncode == 2 and "org/gguf-only: is not in the hub's cache" in again.stderr
    own = ratoon(tmp_path, address(hub), "rm", str(tmp_path))
    assert own.returncode == 2 and "is a file or a folder here" in own.stderr


def test_a_revision_is_fetched_by_its_name(hub, tmp_path: Path) -> None:
    hub.asked.clear()
    pulled = ratoon(tmp_path, address(hub), "pull", "org/good", "--revision", "v1")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    assert any("/revision/v1" in path for path in hub.asked)
    wrong = ratoon(tmp_path, address(hub), "rm", "org/good", "--revision", "v2")
    assert wrong.returncode == 2 and "has no revision 'v2' in the cache" in wrong.stderr
    assert ratoon(tmp_path, address(hub), "rm", "org/good", "--revision", "v1").returncode == 0


def interrupt_pull(hub, home: Path) -> int:
    """Starts to fetch the large file, and interrupts that when a part of it is in the cache; returns how much."""
    blobs = home / "hub" / "models--org--large" / "blobs"
    hub.stalls.set()
    try:
        words = ("pull", "org/large", "--file", "large.gguf")
        process = ForkedCommand(*words, env=variables_for(home, address(hub)))
        wait_until("a part is written", lambda: any(file.stat().st_size for file in blobs.glob("*")))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        hub.stalls.clear()
    assert process.wait() == 130, errors
    assert "Traceback" not in errors
    (partial,) = blobs.iterdir()
    return partial.stat().st_size


def test_an_interrupted_download_is_resumed_where_it_was(hub, tmp_path: Path) -> None:
    num_bytes = interrupt_pull(hub, tmp_path)
    assert 0 < num_bytes < len(LARGE)
    hub.ranges.clear()
    resumed = ratoon(tmp_path, address(hub), "pull", "org/large", "--file", "large.gguf")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert hub.ranges == [f"bytes={num_bytes}-"], "only the rest is fetched"
    assert resumed.stdout.startswith("org/large: 24.0 MiB, 1 checksum compared in ")
    file = Path(resumed.stdout.split(" in ")[1].strip())
    assert file.read_bytes() == LARGE
    assert [blob.stat().st_size for blob in file.resolve().parent.iterdir()] == [len(LARGE)]


def test_a_resumed_file_with_a_wrong_checksum_is_deleted_and_fetched_anew(hub, tmp_path: Path) -> None:
    interrupt_pull(hub, tmp_path)
    hub.damages.set()
    damaged = ratoon(tmp_path, address(hub), "pull", "org/large", "--file", "large.gguf")
    hub.damages.clear()
    assert damaged.returncode == 2
    assert "large.gguf has the SHA-256 sum" in damaged.stderr and "deleted; fetch it again" in damaged.stderr
    assert not list((tmp_path / "hub" / "models--org--large" / "blobs").iterdir())
    hub.ranges.clear()
    again = ratoon(tmp_path, address(hub), "pull", "org/large", "--file", "large.gguf")
    assert (again.returncode, hub.ranges) == (0, []), "from its beginning: nothing of the damaged file is kept"
    assert Path(again.stdout.split(" in ")[1].strip()).read_bytes() == LARGE


def test_what_an_interrupted_download_left_can_be_removed(hub, tmp_path: Path) -> None:
    interrupt_pull(hub, tmp_path)
    removed = ratoon(tmp_path, address(hub), "rm", "org/large")
    assert removed.returncode == 0 and removed.stdout.startswith("org/large: ")
    assert not (tmp_path / "hub" / "models--org--large").exists()
