"""Steps from which on hooks do something, as a number or a fraction of the run."""

from __future__ import annotations

from typing import ClassVar

from lightning_commhooks.interface.checks import check_integer


class DefaultStart(int):
    """The start of a hook that was given by its name: this step, or a tenth of the run where that is known and less."""

    fraction: ClassVar[float] = 0.1


def check_start(field: str, value: object) -> None:
    """Refuse what is neither a step nor a fraction of the run; raises a `ValueError`."""
    if isinstance(value, float):
        if not 0 < value < 1:
            raise ValueError(f"{field} must be a step, an integer, or a fraction of the run, as 0.1; is {value!r}")
    else:
        check_integer(field, value, 0)


def text_of_steps(num: int) -> str:
    """A number of steps, as `1 step` or `1,200 steps`."""
    return f"{num:,} step{'' if num == 1 else 's'}"


def is_start(field: str) -> bool:
    """Whether an option of a hook is a start, as `start_powerSGD_iter`."""
    return field.startswith("start_") and field.endswith("_iter")


def is_fraction(start: float) -> bool:
    """Whether a start needs the length of the run."""
    return isinstance(start, float)


def depends_on_length(start: float) -> bool:
    """Whether a start is another one where the length of the run is known."""
    return isinstance(start, (float, DefaultStart))


def in_steps(start: float, num_steps: int) -> int:
    """The step that a start means in a run of `num_steps` synchronized backwards."""
    if isinstance(start, DefaultStart):
        return min(int(start), int(num_steps * start.fraction))
    return int(num_steps * start) if isinstance(start, float) else start
