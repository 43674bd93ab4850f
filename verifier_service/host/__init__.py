"""Where the engine runs: its process, the workers of a split target, and how both start."""
