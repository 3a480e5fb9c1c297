"""GPUs: driver, buffers, kernels that reshape paged KV. Imports without CUDA; only `ops` needs torch."""
