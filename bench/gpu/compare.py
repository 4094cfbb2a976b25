"""Ratoon and vLLM on one GPU: the same shapes, random weights, and the same prompts, one engine after the other.

    python3 bench/gpu/compare.py --engines ratoon                                   # where vLLM is not installed
    python3 bench/gpu/compare.py --vllm-path /tmp/vllm --json out.json --plot out.png
    python3 bench/gpu/compare.py --from-logs earlier.log later.log                  # tables of what was measured before
    python3 bench/gpu/compare.py --models gpt-oss-20b --same-weights --layers 12    # both read one folder of weights

Each figure is printed at once as a line `RESULT {json}`, so a run that is ended early has lost nothing. A workload that
fails prints its error, and the others go on. What is measured is in compare_parts/, the engines are in ../peers/.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compare_parts import GPU_FOLDER, REPOSITORY
from compare_parts.floors import Precision, Shape
from compare_parts.models import prepare_model, write_random_model
from compare_parts.records import ERROR_MARK, Record, format_tables, panels, read_records, summarize
from compare_parts.work import QUICK, STARTUP, WORKLOADS, Load, Sizes, floors_of
from harness import OURS, draw, verify_names
from peers.machine import describe_machine, usable_cores
from peers.process import EngineFailedError, EngineProcess
from workloads import PromptSource

ENGINES = (OURS, "vllm")
MODELS = ("qwen3-0.6b", "llama3-8b")
CACHE_FOLDER = REPOSITORY / ".cache" / "bench" / "gpu"
SEED = 0
MEMORY_SHARE = 0.8
# vLLM's own choices on a GPU of this size are a budget of 16,384 tokens and 1,024 sequences.
COMMON = {"dtype": "bfloat16", "load_format": "dummy", "gpu_memory_utilization": MEMORY_SHARE}
OUR_SETTINGS = {"device": "cuda", "max_num_batched_tokens": 16384, "max_num_seqs": 1024}


@dataclass(frozen=True)
class Variant:
    """Settings of both engines; None: the engine has no such thing, or it would show nothing."""

    precision: Precision = field(default_factory=Precision)
    ours: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] | None = field(default_factory=dict)


VARIANTS = {
    "bf16": Variant(),
    "fp8-kv": Variant(Precision(kv=1), {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
    "fp8-weights": Variant(Precision(weight=1), {"quantization": "fp8"}, {"quantization": "fp8"}),
    "fp8": Variant(
        Precision(1, 1),
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
    "batch-invariant": Variant(ours={"batch_invariant": True}, vllm=None),
}


class Comparison:
    """One run: what was measured so far, and how much time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sizes = QUICK if args.quick else Sizes()
        self.records: list[Record] = []
        self.errors: list[dict[str, str]] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.facts: dict[str, Any] = {}
        self._deadline = time.monotonic() + args.limit_seconds

    def measure(self) -> None:
        for shape in self.args.shapes:
            for variant in self.args.variants:
                for engine in self.args.engines:
                    if engine == OURS or VARIANTS[variant].vllm is not None:
                        EngineRun(self, shape, variant, engine).measure()

    @property
    def seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    def add(self, record: Record) -> None:
        self.records.append(record)
        print(record.line(), flush=True)

    def add_error(self, **facts: str) -> None:
        self.errors.append(facts)
        print(ERROR_MARK + json.dumps(facts), flush=True)

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": describe_machine() | {"gpu": gpu_name()},
            "sizes": asdict(self.sizes),
            "versions": self.versions,
            "engines": self.facts,
            "records": [asdict(record) for record in self.records],
            "errors": self.errors,
        }


class EngineRun:
    """All workloads of one engine with one model."""

    def __init__(self, comparison: Comparison, shape: Path, variant: str, engine: str) -> None:
        self._run = comparison
        self._names = {"model": shape.name, "variant": variant, "engine": engine}
        self._settings = engine_settings(comparison.args, variant, engine)
        self._settings |= {"load_format": "auto"} if comparison.args.same_weights else {}
        self._model = model = self._make_model(shape)
        precision = VARIANTS[variant].precision
        self._floors = floors_of(Shape.read(model), precision, comparison.sizes) if Shape.describes(model) else {}
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._source = PromptSource(SEED, config["vocab_size"])
        self._engine: EngineProcess | None = None

    def _make_model(self, shape: Path) -> Path:
        args = self._run.args
        if not args.same_weights:
            return prepare_model(shape, args.work_folder)
        return write_random_model(shape, args.work_folder, args.settings.get("device", "cuda"), args.layers)

    def measure(self) -> None:
        args, ours = self._run.args, self._names["engine"] == OURS
        try:
            if not self._start():
                return
            for name, workload in WORKLOADS.items():
                if name not in args.only or (workload.ours_alone and not ours):
                    continue
                if self._run.seconds_left <= 0:
                    self._fail(name, "not measured: the time limit is over")
                elif self._usable() or self._start(again=True):
                    self._measure_workload(name, args.rounds or workload.rounds)
        finally:
            self._close()

    def _start(self, again: bool = False) -> bool:
        """False if it does not start. The first answer ends what is timed."""
        self._close()
        args = self._run.args
        name = self._names["engine"]
        log = args.work_folder / "logs" / f"{'-'.join(self._names.values())}{'-again' if again else ''}.log"
        engine = self._engine = EngineProcess(
            name,
            sys.executable,
            self._model,
            len(usable_cores()),
            log,
            self._run.sizes.max_model_len,
            settings=self._settings,
            environment={"PYTHONPATH": module_path(name, args.vllm_path)},
            pausing=False,
        )
        print(f"# start {' '.join(self._names.values())} {json.dumps(self._settings)}", flush=True)
        try:
            with ended_after(engine, min(args.start_seconds, self._run.seconds_left)):
                seconds = engine.start(self._source.prompt(self._run.sizes.decode_input))
        except EngineFailedError as error:
            self._fail(STARTUP, str(error))
            return False
        self._run.versions[name] = engine.versions
        if name == OURS:
            facts = self._run.facts["-".join(self._names.values())] = engine.call("describe").value
            print(f"# engine {json.dumps(facts)}", flush=True)
        if STARTUP in args.only and not again:
            self._run.add(summarize([seconds], what="startup_s", **self._names))
        return True

    def _measure_workload(self, name: str, rounds: int) -> None:
        """One round that is not counted, then the others, as far as the time suffices."""
        assert self._engine is not None
        load = Load(self._engine, self._source, self._run.sizes)
        limit = min(self._run.args.workload_seconds, self._run.seconds_left)
        begin = time.monotonic()
        found: dict[str, list[float]] = {}
        try:
            with ended_after(self._engine, limit):
                for _ in range(1 + rounds):
                    for what, value in WORKLOADS[name].measure(load).items():
                        found.setdefault(what, []).append(value)
                    if time.monotonic() - begin > limit:
                        break
        except Exception as error:
            self._fail(name, str(error) if isinstance(error, EngineFailedError) else traceback.format_exc())
        for what, values in found.items():
            self._run.add(summarize(values, what=what, floor=self._floors.get(what), **self._names))

    def _usable(self) -> bool:
        """Whether it still answers: an error on the device can be final for its process."""
        if self._engine is None or not self._engine.running:
            return False
        try:
            with ended_after(self._engine, min(60.0, self._run.seconds_left)):
                self._engine.generate([self._source.prompt(self._run.sizes.decode_input)], 1)
        except EngineFailedError:
            return False
        return True

    def _fail(self, workload: str, error: str) -> None:
        self._run.add_error(**self._names, workload=workload, error=error[-3000:])

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@contextmanager
def ended_after(engine: EngineProcess, seconds: float) -> Iterator[None]:
    """An engine that does not answer in time is killed, so that the call under way fails."""
    timer = threading.Timer(max(seconds, 0.1), engine.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def engine_settings(args: argparse.Namespace, variant: str, engine: str) -> dict[str, Any]:
    if engine == OURS:
        return COMMON | OUR_SETTINGS | VARIANTS[variant].ours | args.settings
    return COMMON | (VARIANTS[variant].vllm or {}) | args.vllm_settings


def module_path(engine: str, vllm_path: Path | None) -> str:
    """Where the engine's process finds modules: it runs in another folder, so no entry may be relative. vLLM's packages
    come first for vLLM alone."""
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = str(REPOSITORY) if engine == OURS else str(vllm_path.resolve()) if vllm_path else ""
    return os.pathsep.join([first, *own] if first else own)


def gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "none"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ",".join([STARTUP, *WORKLOADS])
    add_options(parser)
    parser.add_argument("--variants", default="bf16", help=f"of {', '.join(VARIANTS)} (default %(default)s)")
    parser.add_argument("--same-weights", action="store_true", help="engines read random weights that are written once")
    parser.add_argument("--layers", type=int, metavar="N", help="with --same-weights: of the first N layers of a shape")
    parser.add_argument("--only", default=names, help="workloads (default %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="counted rounds (default: of each workload)")
    parser.add_argument("--workload-seconds", type=float, default=180.0, metavar="S", help="default %(default)s")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="also draw it (needs matplotlib)")
    parser.add_argument("--title", help="of tables and plot (default: the GPU and versions)")
    parser.add_argument("--from-logs", type=Path, nargs="+", metavar="LOG", help="measure nothing: read earlier runs")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and one round: does it work at all?")
    args = settle_options(parser)
    if args.layers is not None and not args.same_weights:
        parser.error("--layers: goes with --same-weights")
    args.variants = verify_names(parser, "--variants", args.variants.split(","), VARIANTS)
    args.only = verify_names(parser, "--only", args.only.split(","), [STARTUP, *WORKLOADS])
    if args.quick and args.rounds is None:
        args.rounds = 1
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that programs which compare engines on a GPU share."""
    parser.add_argument("--engines", help="default: ratoon, and vllm where --vllm-path or the environment has it")
    parser.add_argument("--models", default=",".join(MODELS), help="shapes, or folders with config.json (%(default)s)")
    parser.add_argument("--vllm-path", type=Path, metavar="DIR", help="a folder with vLLM and what it needs, unpacked")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="further settings of Ratoon")
    parser.add_argument("--vllm-settings", type=json.loads, default={}, metavar="JSON", help="the same of vLLM")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, metavar="S", help="of the whole run")
    parser.add_argument("--start-seconds", type=float, default=420.0, metavar="S", help="default %(default)s")
    parser.add_argument("--work-folder", type=Path, default=CACHE_FOLDER, metavar="DIR", help="models and logs")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write everything that was measured")


def settle_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.engines = find_engines(parser, args)
    args.shapes = [find_shape(parser, name) for name in args.models.split(",")]
    args.work_folder = args.work_folder.resolve()
    return args


def find_engines(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    """Those asked for, or those that are there."""
    is_there = importlib.util.find_spec("vllm") is not None
    if args.vllm_path is not None:
        is_there = (args.vllm_path / "vllm" / "__init__.py").is_file()
        if not is_there:
            parser.error(f"--vllm-path: {args.vllm_path} has no vllm/__init__.py")
    names = args.engines.split(",") if args.engines else [*ENGINES] if is_there else [OURS]
    if "vllm" in names and not is_there:
        parser.error("--engines: vllm is not installed here; give the folder that has it by --vllm-path")
    return verify_names(parser, "--engines", names, ENGINES)


def find_shape(parser: argparse.ArgumentParser, name: str) -> Path:
    for folder in (GPU_FOLDER / "models" / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder.resolve()
    parser.error(f"--models: {name}; expected {', '.join(MODELS)}, or a folder with config.json")


def print_report(title: str, records: list[Record], errors: list[dict[str, str]]) -> None:
    print(f"\n{title}\nMedian (min–max). Ratios: above 1, Ratoon is the faster one. Floors: compare_parts/floors.py.\n")
    print(format_tables(records))
    for error in errors:
        last = error["error"].strip().splitlines()[-1:] or [""]
        print(f"failed: {error['model']} {error['variant']} {error['engine']} {error['workload']}: {last[0][:300]}")


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that engines are ended
    comparison = Comparison(args)
    if args.from_logs:
        comparison.records = read_records(args.from_logs)
    else:
        try:
            comparison.measure()
        except KeyboardInterrupt:
            print("interrupted: these are the figures so far", file=sys.stderr)
    measured = "; ".join(
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in versions.items())
        for name, versions in comparison.versions.items()
    )
    title = args.title or ("earlier runs" if args.from_logs else f"{gpu_name()}; {measured}")
    print_report(title, comparison.records, comparison.errors)
    if args.json:
        args.json.write_text(json.dumps(comparison.as_dict(), indent=2) + "\n", encoding="utf-8")
    if args.plot:
        draw(args.plot, title, panels(comparison.records))
    return 1 if comparison.errors and not comparison.records else 0


if __name__ == "__main__":
    sys.exit(main())
