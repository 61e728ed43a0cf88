"""Checks of options, with one text each for what many hooks refuse."""

from __future__ import annotations


def check_integer(field: str, value: object, lowest: int | None = None) -> None:
    """Refuse what is no integer, or below `lowest`.

    Raises:
        ValueError: names the field, its value and the range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or (lowest is not None and value < lowest):
        least = "" if lowest is None else f" of at least {lowest}"
        raise ValueError(f"{field} must be an integer{least}, is {value!r}")


def check_bool(field: str, value: object) -> None:
    """Refuse what is neither `True` nor `False`.

    Raises:
        ValueError: names the field and its value.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be True or False, is {value!r}")
