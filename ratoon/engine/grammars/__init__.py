"""Grammars of requests on their way to the engine: what is refused, and the process that compiles them under limits."""
