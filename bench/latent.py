"""Latent attention on a CPU: the comparison of cpu_peers.py with a random model of DeepSeek-V2-Lite's shape, cut to
three of its layers.

    .venv/bin/python bench/latent.py --json result.json
    .venv/bin/python bench/latent.py --random tiny-latent --tiny          # does it work at all?

Options, engines and tables are those of cpu_peers.py. The folder in float32 takes five gigabytes, in the cache of
models.
"""

from __future__ import annotations

import argparse
import sys

from cpu_peers import CpuPeers

SHAPE = "deepseek-v2-lite"
WORKLOADS = "single,many-8,many-32,prefill"


class Latent(CpuPeers):
    doc = __doc__

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.set_defaults(random=SHAPE, workloads=WORKLOADS)


if __name__ == "__main__":
    sys.exit(Latent().run())
