"""A draft step on the device."""
