"""Code that the target and the heads share: checkpoints, devices, paged caches, fused features."""
