"""How long tensors travel between two processes of one host."""
