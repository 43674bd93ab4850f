"""The verifier's side of drafting: connections to drafters, sessions, messages and answers."""
