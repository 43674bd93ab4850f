"""Data that the verifier's packages share: requests, batches, tokenizer, stop conditions."""
