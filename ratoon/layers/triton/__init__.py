"""Triton kernels for layers on CUDA, as plain functions over tensors. Imported only where CudaOps is used: importing
the modules here imports triton, which installations for CPUs do not have."""
