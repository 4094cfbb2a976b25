"""What `ratoon bench two-stage` measures: sample an answer, then search with beams behind it, and what is reused."""
