"""The commands below `draftwire bench`."""
