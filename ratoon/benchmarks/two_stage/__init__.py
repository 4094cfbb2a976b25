"""What `ratoon bench two-stage` measures: sample an answer, then run a beam search after it, with each kind of
reuse."""
