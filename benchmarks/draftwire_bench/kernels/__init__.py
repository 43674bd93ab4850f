"""The sampling kernels, beside a peer."""
