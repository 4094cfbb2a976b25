"""Processes of the engine: how the core's process is started, reached, balanced, watched and stopped."""
