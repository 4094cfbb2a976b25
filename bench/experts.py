"""A mixture of experts on a CPU: the comparison of cpu_peers.py with a random model of Qwen3-30B-A3B's shape, cut to
two of its layers.

    .venv/bin/python bench/experts.py --json result.json
    .venv/bin/python bench/experts.py --random tiny-experts --tiny          # does it work at all?

Options, engines and tables are those of cpu_peers.py. The folder in float32 takes five gigabytes, in the cache of
models.
"""

from __future__ import annotations

import argparse
import sys

from cpu_peers import CpuPeers

SHAPE = "qwen3-30b-a3b"
WORKLOADS = "single,many-8,many-32,prefill"


class Experts(CpuPeers):
    doc = __doc__

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.set_defaults(random=SHAPE, workloads=WORKLOADS)


if __name__ == "__main__":
    sys.exit(Experts().run())
