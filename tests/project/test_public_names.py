"""Public names, their parameters and methods, as `public_names.txt` lists them: a change of one is seen in review.

And the classes of warnings, by which users see that a name is deprecated: docs/support.md.

`python tests/project/test_public_names.py` prints the list.
"""

import ast
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("public_names.txt")
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def parameters_of(function):
    """Names and defaults; annotations print otherwise on other versions of Python."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return ADDRESS.sub("", str(signature.replace(parameters=plain, return_annotation=signature.empty)))


def members_of(cls, public):
    """Methods and properties of a class of ours, without those of a public one that it is made of."""
    bases = [base for base in cls.__mro__ if base is cls or (base not in public and is_ours(base))]
    for name in sorted({name for base in bases for name in vars(base) if not name.startswith("_")}):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, classmethod | staticmethod) or inspect.isfunction(member):
            yield f"{name}{parameters_of(getattr(cls, name))}"
        elif isinstance(member, property | functools.cached_property):
            yield name


def is_ours(cls):
    return cls.__module__.partition(".")[0] in ("lightning_commhooks", "accelerate_integration")


def lines():
    import accelerate_integration
    import lightning_commhooks

    for package in (lightning_commhooks, accelerate_integration):
        values = {name: getattr(package, name) for name in sorted(package.__all__)}
        for name, value in values.items():
            is_class = inspect.isclass(value) and is_ours(value)
            has_parameters = is_class or inspect.isfunction(value)
            yield f"{package.__name__}.{name}{parameters_of(value) if has_parameters else ''}"
            yield from (f"    .{member}" for member in (members_of(value, [*values.values()]) if is_class else ()))


def test_public_names_are_those_of_the_list():
    for package in ("lightning", "pytorch_lightning", "accelerate", "transformers", "torchft"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    from forks import run_alone  # here, since it is not found by the script that makes the list

    printed, _ = run_alone(__file__)
    now, listed = printed.splitlines(), LIST.read_text().splitlines()
    fix = "python tests/project/test_public_names.py > tests/project/public_names.txt, and an entry in CHANGELOG.md"
    assert [line for line in now if line not in listed] == [], fix
    assert now == listed, fix


def test_warnings_have_the_right_class():
    """`FutureWarning` for what is deprecated, which Python shows to users; `UserWarning`, the default, for the rest."""
    found, packages = set(), ("lightning_commhooks", "accelerate_integration")
    for path in (path for package in packages for path in (LIST.parents[2] / package).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "warnings.warn":
                given = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "category")]
                category = ast.unparse(given[0]) if given else "UserWarning"
                is_deprecated = "deprecat" in ast.unparse(call)
                assert category == ("FutureWarning" if is_deprecated else "UserWarning"), f"{path}:{call.lineno}"
                found.add(path.name)
    assert len(found) > 10


if __name__ == "__main__":
    print("\n".join(lines()))
