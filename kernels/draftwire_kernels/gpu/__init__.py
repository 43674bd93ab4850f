"""The Triton kernels; `draftwire_kernels.reference` has the same mathematics in torch."""
