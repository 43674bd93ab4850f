"""The target model and its forward pass."""
