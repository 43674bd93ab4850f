"""Training of draft heads: data, training and evaluation (README.md)."""
