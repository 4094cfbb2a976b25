"""Triton kernels for layers on CUDA, as plain functions over tensors; how kernels are launched, and compiled ahead.
Imported only where CudaOps is used: all modules but compiler_process.py import triton, which installations for CPUs do
not have."""
