"""Texts that speculation.py generates from: a file to rewrite, questions, and an agent's session."""
