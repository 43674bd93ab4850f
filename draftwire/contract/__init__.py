"""The contract in Python: validation, errors, versions, names and addresses that every side agrees on."""
