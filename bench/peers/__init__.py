"""Engines that are compared, each a program of its own, and what starts, times and pauses them."""
