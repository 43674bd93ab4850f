"""The verifier's side of the drafters: connections, sessions, what is sent and answered."""
