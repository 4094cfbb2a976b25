"""The engines that cpu_peers.py compares, each a program of its own, and what starts, times and pauses them."""
