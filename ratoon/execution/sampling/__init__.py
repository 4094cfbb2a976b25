"""Choosing tokens: the sampler, and the numbers, penalties, beams and masks that it reads for each row."""
