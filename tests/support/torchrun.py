"""A script of this folder in several real processes."""

from forks import FOLDER, run_ranks

__all__ = ["FOLDER", "run_twice"]


def run_twice(script, *arguments, timeout=240, num_processes=2, **environment):
    """Standard output of `script`, on two ranks as torchrun starts them, or more, which must end well."""
    outputs = run_ranks(FOLDER / script, *arguments, world=num_processes, timeout=timeout, **environment)
    return "".join(output for output, _ in outputs)
