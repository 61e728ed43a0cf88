"""What a mutation is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One thing that can be wrong, and the tests that must see it.

    Attributes:
        name: unique.
        file: path in the checkout.
        old: text that is in the file exactly once.
        new: what takes its place.
        wrong: what is wrong then.
        tests: arguments of pytest, as in a shell; `-k` with words that tests keep when they are renamed.
    """

    name: str
    file: str
    old: str
    new: str
    wrong: str
    tests: str
