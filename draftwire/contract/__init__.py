"""The contract in Python: validation, errors, versions and addresses, shared by clients and services."""
