"""Triton kernels of attention over pages and of AdamW, for GPUs of both makers."""
