"""The sampling mathematics as Triton kernels; `draftwire_kernels.reference` says the same in torch."""
