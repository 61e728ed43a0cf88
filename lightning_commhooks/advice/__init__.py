"""Would a hook make this training faster? Measured and predicted on the user's own model; see `cli.py`."""
