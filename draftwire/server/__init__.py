"""Server code of both services: bootstrap, security, interceptors, logs, metrics, traces."""
