"""Attention over the paged cache: the interface and its backends. Imports layers and core."""
