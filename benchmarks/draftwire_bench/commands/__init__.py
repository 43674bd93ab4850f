"""The subcommands of `draftwire bench`."""
