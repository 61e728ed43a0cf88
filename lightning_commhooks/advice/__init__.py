"""Measures or predicts whether a hook makes the training of the user's model faster; see `cli.py`."""
