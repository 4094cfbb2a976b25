"""Drafts that the scheduler makes on the host: guesses at the next tokens of branches, from text that it knows."""
