"""What the rooms of the verifier share: requests and the rows of a step."""
