"""What both services are built on: bootstrap, security, interceptors, logs, metrics, traces."""
