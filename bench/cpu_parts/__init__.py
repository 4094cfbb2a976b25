"""The parts of cpu_peers.py."""
