"""Steps from which on hooks do something: a number, a fraction of the run, or `"auto"`."""

from __future__ import annotations

from typing import Any

from lightning_commhooks.interface.checks import check_integer

# The part of the run after which "auto" begins, where that is known and sooner than the default of the class.
_PART = 0.1


def check_start(field: str, value: object) -> None:
    """Refuse what is neither a step nor a fraction of the run nor `"auto"`; raises a `ValueError`."""
    if (isinstance(value, float) and not 0 < value < 1) or (isinstance(value, str) and value != "auto"):
        raise ValueError(f"{field} must be a step, an integer, a fraction of the run, as 0.1, or 'auto'; is {value!r}")
    if not isinstance(value, (float, str)):
        check_integer(field, value, 0)


def text_of_steps(num: int) -> str:
    """A number of steps, as `1 step` or `1,200 steps`."""
    return f"{num:,} step{'' if num == 1 else 's'}"


def is_start(field: str) -> bool:
    """Whether an option of a hook is a start, as `start_powerSGD_iter`."""
    return field.startswith("start_") and field.endswith("_iter")


def depends_on_length(start: object) -> bool:
    """Whether a start is another one where the length of the run is known."""
    return isinstance(start, (float, str))


def start_of(hook: Any, field: str, num_steps: int = 0) -> float:
    """The step that a start of a hook means.

    Args:
        hook: its configuration.
        field: name of the option.
        num_steps: length of the run, in synchronized backwards; 0: not known. A fraction stays one then.
    """
    start = getattr(hook, field)
    if start == "auto":
        default: int = type(hook).__dataclass_fields__[field].default
        return min(default, int(num_steps * _PART)) if num_steps else default
    return int(num_steps * start) if isinstance(start, float) and num_steps else start


def auto_starts(hook_class: type) -> dict[str, str]:
    """Options that the name of a hook stands for: `"auto"` for each start above 0 whose type allows it."""
    fields: dict[str, Any] = getattr(hook_class, "__dataclass_fields__", {})
    starts = {name: field for name, field in fields.items() if is_start(name) and "auto" in str(field.type)}
    return {name: "auto" for name, field in starts.items() if isinstance(field.default, int) and field.default > 0}
