"""The verifier: the target model, its scheduler, verification, and the services for clients."""
