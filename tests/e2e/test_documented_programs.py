"""Every program and command of README.md and docs/ prints what the page shows below it, with default settings and the
model that it names; only the server's address is another one.

A page is run from top to bottom, in a folder of its own: its Python in this process, as one program, its commands in a
shell. All pages share a server. What is not run is listed with the reason (NOT_RUN), and nothing else is left out.

The quantised model's numbers differ between architectures, log-probabilities by up to 0.15 in these pages, and so do
some of its texts. Pages show those of aarch64; what x86-64 prints otherwise is run there and not compared
(DIFFERENT_ON_X86).
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import pytest

from ratoon.layers import native
from ratoon.models.source import resolve_model
from tests import real_models
from tests.e2e.documents import Step, difference, steps_of
from tests.e2e.forked_commands import forked_commands
from tests.e2e.servers import ADMIN_KEY, AS_ADMIN, Server, serving

pytestmark = [real_models.needs_embedded_model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if steps_of(page)]
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):(?:8000|8210)")
SERVE = re.compile(r"((?:\w+=\S+ )*)ratoon serve (\S+)(.*)")
MODEL = "smollm2-135m"
HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
LIMIT = 600  # seconds; a command takes a few, but the machine may be busy

# By page: how a step begins, and why it and those behind it in its block are not run. "" is every step of the page.
NOT_RUN = {
    "README.md": {
        "llm.generate({": "is about a model that is not here",
    },
    "adapters.md": {"": "is about adapters that are not here"},
    "command-line.md": {
        "ratoon chat smollm2-135m": "is a session on a terminal",
        "ratoon pull": "needs the hub",
        "ratoon bench profile Qwen": "needs the hub",
    },
    "deployment.md": {"": "sets up an environment"},
    "experts.md": {"ratoon info Qwen": "needs the hub", "ratoon serve Qwen": "needs the hub"},
    "states.md": {"ratoon serve ibm": "needs the hub"},
    "gpu.md": {"": "needs a GPU"},
    "images.md": {"": "is about a model that takes minutes to train; test_images.py asks one"},
    "models.md": {
        "ratoon generate ./smollm2-hf": "is written by bench/export_hf.py, half a gigabyte",
        "ratoon serve smollm2-135m --max-model-len 10000 --rope-scaling": "is a server that is asked nothing",
        "python bench/quality.py": "takes minutes",
        '"""SmolLM3': "is a file of the package, as an example",
        "# On a small random SmolLM3": "needs that file",
    },
    "prefill-decode.md": {
        "ratoon serve MODEL --encode": "is about a model that is not here; test_images.py starts one"
    },
    "tiers.md": {"lmcache server": "needs LMCache; tests/golden/test_lmcache.py starts it"},
    "rerank.md": {"reranker = LLM(": "is about a model that is not here"},
    "several-models.md": {"cat ratoon.toml": "is a server by a file, and test_several_models.py starts one"},
    "serving.md": {"curl -sN localhost:8000/v1/completions -H 'Content-Type: application/json' -o": "kills an engine"},
    "cpu.md": {"ratoon info": "is about the kernels of another processor"},
    "hidden-states.md": {
        "python examples/": "takes long, and test_examples.py looks at it",
        "outputs = llm.extract_hidden_states(texts": "is a part of an example",
        "everything =": "is a part of an example",
    },
    "benchmarking.md": {
        "ratoon bench two-stage": "takes minutes; test_two_stage.py and test_two_stage_http.py run it",
        "ratoon bench serve --url http://127.0.0.1:8210 --dataset multi-turn": "waits most of the time",
        "cat capitals.jsonl": "is for a command that is not run",
    },
}
# By page: a part of each step whose texts or numbers are others on x86-64, with the kernels for AVX-512.
DIFFERENT_ON_X86 = {
    "README.md": ("make demo", "from ratoon import LLM, BeamSearchParams, SamplingParams"),
    "clients.md": (
        "from openai import OpenAI\n\nclient = OpenAI(base_url",
        'search = {"use_beam_search"',
        'ratoon complete --url localhost:8000 --chat "Name a river',
    ),
    "command-line.md": (
        'ratoon generate smollm2-135m "Name a river',
        'ratoon generate smollm2-135m "Name a colour." "Name a river',
        'ratoon generate smollm2-135m "Name a primary colour."',
        'ratoon generate smollm2-135m "What is the capital of Japan?" --json',
        "ratoon hidden-states smollm2-135m",
        "ratoon demo",
    ),
    "python.md": (
        "from ratoon import BeamSearchParams\n\nsearch =",
        'for output in llm.stream("The first month',
        "with_states = SamplingParams(",
    ),
    "sampling.md": (
        "food =",
        'for position in ask("The capital of France is", temperature=1.5',
        "from ratoon import BeamSearchParams\n\nsum_of_two",
    ),
    "serving.md": (
        '"use_beam_search": true, "beam_width": 4, "n": 2, "retain_kv"',
        '"use_beam_search": true, "beam_width": 4, "stream": true',
        '"prompt": "The sky is blue", "echo": true',
    ),
}
X86_KERNELS = "avx512vnni"  # those for AMX round attention to 16 bits
# Their figures are those of a machine: the words are compared.
MEASURED = ("ratoon bench ", "ratoon demo", "ratoon info", "make demo")
# Of a load generator on a machine that has other work.
LATE = re.compile(r"^note: requests were sent up to .* late: .*\n?", re.MULTILINE)
MAKE_DEMO = f'make --no-print-directory -C {ROOT} -o .venv/.runs RATOON="$(command -v ratoon)" demo'


def steps_to_run(page: Path) -> list[Step]:
    steps, left_out = [], None
    for step in steps_of(page):
        if any(f"{step.source}\n".startswith(begin) for begin in NOT_RUN.get(page.name, {})):
            left_out = step.block
        if step.block != left_out:
            steps.append(step)
    return steps


@pytest.fixture(scope="module", autouse=True)
def same_kernels() -> Iterator[None]:
    """All x86-64 processors that have them use the same kernels, also in processes that pages start."""
    if X86_KERNELS not in native._supported_sets():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.VARIABLE, X86_KERNELS)
        native._found.cache_clear()
        yield
    native._found.cache_clear()


def is_compared(page: str, step: Step) -> bool:
    if platform.machine() in ("aarch64", "arm64"):
        return True
    return not any(part in step.source for part in DIFFERENT_ON_X86.get(page, ()))


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    options = ("--load-format", "auto", "--admin", "--admin-key", ADMIN_KEY)
    with serving(MODEL, *options) as running:
        yield running


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of `ratoon` and `python`, which are those of this environment."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    with forked_commands(folder / "ratoon"):
        yield folder


@pytest.fixture
def folder(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page is run."""
    for name in ("tests", "examples", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return tmp_path


class Reader:
    """Follows a page: what its steps leave behind is there for the next ones."""

    def __init__(self, server: Server, folder: Path, stack: contextlib.ExitStack) -> None:
        self.server, self.folder, self._stack = server, folder, stack
        self._shared, self._section = server, -1
        self._names: dict[str, object] = {"__name__": "__main__"}
        self._definitions = ""  # functions of the shell

    def run(self, step: Step) -> str | None:
        """What the step prints; None where there is nothing to compare."""
        if step.section != self._section:  # a server is started for its section
            self._section, self.server = step.section, self._shared
        if step.language == "python":
            return self._run_python(step)
        if match := re.fullmatch(r"cat (\S+)", step.source):
            (self.folder / match[1]).write_text(f"{step.shown}\n")
            return None
        if re.match(r"\w+\(\) \{", step.source):
            self._definitions += f"{step.source}\n"
            return None
        if step.source == "make demo":  # as after the installation
            return self._run_shell(replace(step, source=MAKE_DEMO))
        match = SERVE.fullmatch(step.source)
        if match and not (step.shown or "").startswith("error"):
            self._serve(match[2], match[3].split(), dict(part.split("=") for part in match[1].split()))
            return None
        return self._run_shell(step)

    def close(self) -> None:
        for value in self._names.values():
            if hasattr(value, "close") and type(value).__name__ == "LLM":
                value.close()

    def _serve(self, model: str, options: list[str], environment: dict[str, str]) -> None:
        if "--port" in options:
            del options[options.index("--port") : options.index("--port") + 2]
        if model == MODEL and not options and not environment:
            self.server = self._shared
        else:
            self.server = self._stack.enter_context(serving(model, "--load-format", "auto", *options, **environment))

    def _run_python(self, step: Step) -> str:
        printed = io.StringIO()
        program = compile(ADDRESS.sub(self._address, step.source), f"line {step.line}", "exec")
        with contextlib.redirect_stdout(printed):
            exec(program, self._names)
        return printed.getvalue()

    def _run_shell(self, step: Step) -> str:
        command = ADDRESS.sub(self._address, step.source)
        asks_a_server = command.startswith(("ratoon complete ", "ratoon ps", "ratoon stop "))
        if asks_a_server and "--url" not in command:  # the default is 127.0.0.1:8000
            command += f" --url {self._address}"
        done = subprocess.run(
            ["bash", "-c", self._definitions + command],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=LIMIT,
        )
        assert step.shown is not None or done.returncode == 0, f"line {step.line}: {done.stdout}"
        return done.stdout.replace(self._address, "127.0.0.1:8000")

    @property
    def _address(self) -> str:
        return self.server.url.removeprefix("http://")


def prepare(page: str, folder: Path) -> None:
    """The files that a page speaks of."""
    if page == "encoder-decoder.md":
        shutil.copytree(real_models.bart_g2p(), folder / "bart-g2p-us")
    elif page == "models.md":
        file = Path(resolve_model(MODEL).path)
        (folder / file.name).symlink_to(file)
    elif page == "speech.md":
        (folder / "whisper-tiny").symlink_to(real_models.whisper_tiny())
        (folder / "jfk.wav").symlink_to(ROOT / "tests/data/audio/jfk.wav")
        write_mp3(folder / "jfk.wav", folder / "speech.mp3")
    elif any(HUB_MODEL in step.source for step in steps_of(ROOT / "docs" / page)):
        (folder / HUB_MODEL).parent.mkdir()
        (folder / HUB_MODEL).symlink_to(real_models.minilm())  # a path is looked for before the hub is asked


def write_mp3(recording: Path, target: Path) -> None:
    with av.open(str(recording)) as source, av.open(str(target), "w") as mp3:
        stream = mp3.add_stream("mp3", rate=16000)
        for frame in source.decode(audio=0):
            mp3.mux(stream.encode(frame))
        mp3.mux(stream.encode(None))


def forget(server: Server) -> None:
    """The prefix cache, which the pages before have filled."""
    request = urllib.request.Request(f"{server.url}/admin/reset_prefix_cache", method="POST", headers=AS_ADMIN)
    urllib.request.urlopen(request, timeout=60).close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.one_in(4)  # README.md is the first
def test_a_page_shows_what_its_programs_and_commands_print(page: Path, shared_server: Server, folder: Path) -> None:
    steps = steps_to_run(page)
    if not steps:
        pytest.skip("; ".join(NOT_RUN[page.name].values()))
    prepare(page.name, folder)
    forget(shared_server)
    wrong = []
    with contextlib.ExitStack() as stack:
        reader = Reader(shared_server, folder, stack)
        stack.callback(reader.close)
        for step in steps:
            try:
                printed = reader.run(step)
            except Exception:  # the steps behind it are compared nevertheless
                wrong.append(f"{page.name}:{step.line}: {step.source.strip()}\n{traceback.format_exc()}")
                continue
            if printed is None or step.shown is None or not is_compared(page.name, step):
                continue
            printed = LATE.sub("", printed)
            if found := difference(step.shown, printed, is_measured=step.source.startswith(MEASURED)):
                wrong.append(f"{page.name}:{step.line}: {step.source.strip()}\n{found}\nas it is printed:\n{printed}")
    assert not wrong, "\n\n".join(wrong)


def test_what_is_not_run_or_not_compared_is_in_the_pages() -> None:
    def sources_of(name: str) -> list[str]:
        return [f"{step.source}\n" for step in steps_of(ROOT / name if name == "README.md" else ROOT / "docs" / name)]

    for name, begins in NOT_RUN.items():
        for begin in begins:
            assert any(source.startswith(begin) for source in sources_of(name)), f"{name}: {begin!r}"
    for name, parts in DIFFERENT_ON_X86.items():
        for part in parts:
            assert any(part in source for source in sources_of(name)), f"{name}: {part!r}"
