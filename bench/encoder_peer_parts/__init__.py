"""The parts of cpu_encoder_peers.py."""
