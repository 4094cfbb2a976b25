"""Drafts that are made on the device: guesses at next tokens by a smaller model, or by a head that reads states."""
