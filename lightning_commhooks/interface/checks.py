"""Checks of options that many hooks have, with one error message each."""

from __future__ import annotations


def check_integer(field: str, value: object, lowest: int | None = None) -> None:
    """Require an integer of at least `lowest`; the `ValueError` names the field, its value and the range."""
    if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
        least = "" if lowest is None else f" of at least {lowest}"
        raise ValueError(f"{field} must be an integer{least}, got {value!r}")


def check_bool(field: str, value: object) -> None:
    """Require `True` or `False`; the `ValueError` names the field and its value."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, got {value!r}")
