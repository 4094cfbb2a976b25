"""Executors: how a step plan reaches the workers."""
