"""One device: worker, model runner, persistent rows, input preparation, sampling, KV tensors. Sees only the step plan."""
