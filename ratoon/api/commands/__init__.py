"""The commands of `ratoon`, a module each: `add_parser` declares it, `run` carries it out and returns the exit code."""
