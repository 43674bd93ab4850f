"""The draft engine: one continuous batch over the sequences of all sessions."""
