"""Times sampling and beam candidates on a GPU against the time of reading the logits once.

    python3 bench/gpu/sampling.py
    python3 bench/gpu/sampling.py --quick      # one vocabulary

Every figure is a replayed CUDA graph that goes over buffers larger than the L2 cache, the best of several replays. The
floor is the logits' bytes over 4.39 TB/s; what torch's own functions take for the largest batch is shown beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from time import perf_counter

import torch

from ratoon.layers import beams, sampling
from ratoon.layers.beams import SearchRows
from ratoon.layers.sampling import Filters, Mode
from ratoon.layers.triton import top

READ_BANDWIDTH = 4.39e12  # bytes per second
L2_BYTES = 60e6
MAX_BUFFERS = 24
REPLAYS = 7
# name, mode, scale of the logits, temperature, top_k, top_p, min_p
KINDS = [
    ("greedy", Mode.GREEDY, 3.0, 0.0, 0, 1.0, 0.0),
    ("random", Mode.RANDOM, 3.0, 0.8, 0, 1.0, 0.0),
    ("top_k 20, top_p 0.95", Mode.FILTERED, 3.0, 0.6, 20, 0.95, 0.0),
    ("top_p 0.9, steep", Mode.FILTERED, 5.0, 0.6, 0, 0.9, 0.0),
    ("top_p 0.9, flat", Mode.FILTERED, 1.0, 1.0, 0, 0.9, 0.0),
    ("min_p 0.05", Mode.FILTERED, 3.0, 0.8, 0, 1.0, 0.05),
]


def microseconds(call: Callable[[torch.Tensor], object], buffers: list[torch.Tensor]) -> float:
    """Of one call, over all buffers in turn."""
    for buffer in buffers[:2]:
        call(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(buffer) for buffer in buffers]
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(buffers))
    del results
    return min(times)


def make_buffers(num_rows: int, vocab_size: int, dtype: torch.dtype, scale: float) -> list[torch.Tensor]:
    size = num_rows * vocab_size * dtype.itemsize
    count = min(max(2, int(2 * L2_BYTES // size) + 1), MAX_BUFFERS)
    made = []
    for seed in range(count):
        generator = torch.Generator(device="cuda").manual_seed(seed)
        made.append((torch.randn(num_rows, vocab_size, device="cuda", generator=generator) * scale).to(dtype))
    return made


def report(name: str, rows: int, vocab_size: int, dtype: torch.dtype, time: float, floor: float) -> None:
    short = str(dtype).removeprefix("torch.")
    print(f"{name:28} {rows:5} × {vocab_size:7} {short:9} {time:9.1f} µs, floor {floor:7.1f}, × {time / floor:.1f}")
    record = {"bench": "sampling", "what": name, "rows": rows, "vocab_size": vocab_size, "dtype": short}
    print("RESULT", json.dumps({**record, "us": round(time, 2), "floor_us": round(floor, 2)}), flush=True)


def time_sampling(vocab_size: int, num_rows: int, dtype: torch.dtype) -> None:
    for name, mode, scale, temperature, top_k, top_p, min_p in KINDS:
        buffers = make_buffers(num_rows, vocab_size, dtype, scale)
        numbers = (
            torch.full((num_rows,), temperature, device="cuda"),
            torch.full((num_rows,), top_k, device="cuda"),
            torch.full((num_rows,), top_p, dtype=torch.float64, device="cuda"),
            torch.full((num_rows,), min_p, device="cuda"),
            torch.rand(num_rows, dtype=torch.float64, device="cuda"),
        )

        def sample(
            logits: torch.Tensor, numbers: tuple[torch.Tensor, ...] = numbers, mode: Mode = mode
        ) -> sampling.Chosen:
            temperatures, top_ks, top_ps, min_ps, uniforms = numbers
            return sampling.sample_plain(logits, temperatures, top_ks, top_ps, min_ps, uniforms, mode)

        floor = buffers[0].numel() * dtype.itemsize / READ_BANDWIDTH * 1e6
        report(name, num_rows, vocab_size, dtype, microseconds(sample, buffers), floor)


def time_torch(vocab_size: int, num_rows: int) -> None:
    """The same by torch's functions."""
    buffers = make_buffers(num_rows, vocab_size, torch.float32, 3.0)
    temperature = torch.full((num_rows,), 0.8, device="cuda")
    uniforms = torch.rand(num_rows, dtype=torch.float64, device="cuda")
    filters = Filters(
        torch.full((num_rows,), 20, device="cuda"),
        torch.full((num_rows,), 0.95, dtype=torch.float64, device="cuda"),
        torch.zeros(num_rows, device="cuda"),
    )
    floor = buffers[0].numel() * 4 / READ_BANDWIDTH * 1e6
    for name, call in (
        ("torch: argmax", lambda logits: logits.argmax(-1)),
        ("torch: random", lambda logits: sampling.draw(logits, temperature, uniforms)),
        ("torch: sort and cut", lambda logits: sampling.draw_filtered(logits, temperature, filters, uniforms)),
    ):
        report(name, num_rows, vocab_size, torch.float32, microseconds(call, buffers), floor)


def time_beams(vocab_size: int, num_searches: int, num_beams: int, dtype: torch.dtype) -> None:
    num_rows = num_searches * num_beams
    buffers = make_buffers(num_rows, vocab_size, dtype, 3.0)
    scores = -torch.rand(num_rows, device="cuda")
    starts = torch.arange(0, num_rows, num_beams, device="cuda")
    bounds = torch.stack([starts, starts + num_beams])

    def choose(logits: torch.Tensor) -> torch.Tensor:
        normalizers, maxima = top.normalizers_and_maxima(logits)
        return top.best_keys(logits, normalizers, scores, maxima, bounds, num_beams, 2 * num_beams)

    floor = buffers[0].numel() * dtype.itemsize / READ_BANDWIDTH * 1e6
    name = f"beams {num_searches} × {num_beams}"
    report(name, num_rows, vocab_size, dtype, microseconds(choose, buffers), floor)
    searches = [SearchRows(at, at + num_beams, 2 * num_beams) for at in range(0, num_rows, num_beams)]
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        start = perf_counter()
        beams.best_candidates_of_searches(buffers[0], scores, searches)
        times.append((perf_counter() - start) * 1e6)
    report(f"{name}, with the host", num_rows, vocab_size, dtype, min(times), floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the larger vocabulary only")
    args = parser.parse_args()
    with torch.inference_mode():
        for vocab_size in [151_936] if args.quick else [151_936, 128_256]:
            for dtype in (torch.bfloat16, torch.float32):
                for num_rows in (1, 32, 256):
                    time_sampling(vocab_size, num_rows, dtype)
                for num_searches in (1, 32):
                    time_beams(vocab_size, num_searches, 32, dtype)
        time_torch(151_936, 256)


if __name__ == "__main__":
    main()
