"""Grammars of structured output: which tokens may follow. Only this package imports the library (llguidance)."""
