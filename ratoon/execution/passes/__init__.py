"""Ways to run a forward pass: CUDA graphs, recorded passes, the encoder, and kernels that are compiled ahead."""
