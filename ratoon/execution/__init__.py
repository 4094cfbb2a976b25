"""One device: worker, runner, persistent rows, input preparation, sampling, KV tensors. Sees only the step plan."""
