"""Explanations for options of hooks in the wrong place: the hook they belong to, and the line to write."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from lightning_commhooks.interface.hook import CommHook
from lightning_commhooks.interface.names import WRAPPERS, available_hooks, get_hook_class
from lightning_commhooks.interface.options import closest, did_you_mean, misfit, options_of, parameters_of
from lightning_commhooks.interface.python_code import code

P = ParamSpec("P")
R = TypeVar("R")

# Options of some functions only, and where.
_OF_MODELS_IN_DDP = "it is for DistributedDataParallel: leave it out with a sharded model"
_OF_SHARDS = (
    "it is for sharded models: for CompressedModelParallelStrategy, attach() and use_comm_hook(accelerator, ...) with "
    "fully_shard"
)
_SUPPLIED = "it is an argument of attach() in plain PyTorch; Lightning and Accelerate supply it: leave it out"
_ELSEWHERE = {
    "accumulation": _OF_MODELS_IN_DDP,
    "hook_state": _OF_MODELS_IN_DDP,
    "gather_hook": _OF_SHARDS,
    "gather_differences": _OF_SHARDS,
    "shard_hook": _OF_SHARDS,
    "replicas": "it is an option of CompressedModelParallelStrategy; attach() takes their number from the device mesh",
    "grad_scaler": _SUPPLIED,
    "optimizers": _SUPPLIED,
    "loss_divided_by": _SUPPLIED,
    "num_steps": "Lightning's Trainer and transformers.Trainer know the length of the run: leave it out; elsewhere "
    "give the start as a number of steps",
    "strict_state": "it is an option of DDP strategies and CommHookKwargs, and in plain PyTorch an argument of "
    "attachment.load_state_dict()",
    "monitor": "it is an option of use_comm_hook() for a transformers.Trainer; otherwise use CommHookMonitor in "
    "Lightning, CommHookTracker in Accelerate, Monitor in plain PyTorch",
    "fault_tolerance": "it is an option of CompressedDDPStrategy and CommHookKwargs; in plain PyTorch give attach() a "
    "manager=",
    "manager": "it is an argument of attach(); CompressedDDPStrategy and CommHookKwargs take fault_tolerance= instead",
    "resync": "it is for hooks that average models; in plain PyTorch call attachment.averaged([optimizer], "
    "permanently=True)",
}
# Common keys in configuration files for the name or class of an object, and for its arguments.
_NAMES = ("class_path", "_target_", "hook", "name", "class", "type")
_ARGUMENTS = ("init_args", "options", "kwargs", "args", "params")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a `ValueError` that says what to write if it is called with wrong arguments."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            text = wrong_call(f"{function.__name__}()", function, args, kwargs)
            if text is None:
                raise  # raised by the function's own code
        raise ValueError(text)

    return call


def wrong_call(
    where: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    also: str = "",
    example: str = "powersgd",
) -> str | None:
    """Explain the error in the arguments of a function that takes a hook.

    Args:
        where: name of the function for the user.
        function: the function, without the first argument of a method.
        args: positional arguments.
        kwargs: keyword arguments.
        also: text on further functions without the option, such as `", and neither has FSDP"`.
        example: name of a hook that works there.

    Returns:
        the explanation, or `None` if the arguments fit.
    """
    known = parameters_of(function)
    hook = {**dict(zip(known, args, strict=False)), **kwargs}.get("hook")
    unknown = {name: value for name, value in kwargs.items() if name not in known}
    if unknown:
        return misplaced(where, unknown, known, hook, also)
    text = misfit(where, function, args, kwargs)
    if text is None:
        return None
    if "hook=" in text.partition(" needs ")[2]:
        return f"{text}, the name of a hook or a configured one, such as hook={example!r}"
    hook_class = class_of(hook)
    return text if hook_class is None else f"{text}. Options of the hook go into it: hook={hook_class.__name__}(...)"


def misplaced(
    where: str, unknown: Mapping[str, Any], known: Collection[str], hook: object = None, also: str = ""
) -> str:
    """Explain that a function does not have these options, and where they belong.

    For `also`, see `wrong_call`; `known` are the function's options.
    """
    name, value = next(iter(unknown.items()))
    text = f"{where} has no option {name!r}{also}"
    for inner in _inside(hook):
        own = {option: unknown[option] for option in unknown if option in _options(inner)}
        if own:
            return f"{text}: it is an option of the hook. Write {_line(hook, inner, own)}"
    if name in _ELSEWHERE:
        return f"{text}: {_ELSEWHERE[name]}"
    of_hooks = {option: inner for inner in reversed([*_inside(hook)]) for option in _options(inner)}
    close = closest(name, [*known, *of_hooks])
    if close is not None and close in known:
        return f"{text}; did you mean {close!r}?"
    if close is not None:
        return f"{text}; did you mean the option {close!r} of the hook? Write " + _line(
            hook, of_hooks[close], {close: value}
        )
    return text + (_of_others(name, value, hook) if "hook" in known else "")


def _of_others(name: str, value: object, hook: object) -> str:
    owners = owners_of(name)
    hook_class = class_of(hook)
    if owners and hook is None:
        return f": it is an option of a hook. Write hook={with_options(owners[0], {name: value})}"
    if owners:
        return f": it is an option of {_names(owners)}, and hook is {_shown(hook)}"
    if hook_class is None:
        return ""
    own = ", ".join(_options(hook_class)) or "none"
    return f". Options of the hook go into it, hook={hook_class.__name__}(...); it has: {own}"


def given_beside(hook: object, options: Mapping[str, Any]) -> str:
    """Explain how to write options that were given separately from a hook, perhaps as a dict."""
    unknown = [name for name in options if name not in _options(hook)]
    return "set its options instead" if unknown else f"write {_line(hook, hook, options)}"


def refusal(
    hook: object,
    option: str = "hook",
    example: str = "powersgd",
    required: Mapping[type[CommHook], Mapping[str, Any]] = MappingProxyType({}),
) -> str:
    """Explain that a value is not a hook, with the line to write if the meaning is clear.

    Args:
        hook: the value.
        option: its name.
        example: name of a hook that works there.
        required: options that hooks need there, by class.
    """
    text = f"{option} must be a name or a CommHook, got {hook!r}"
    if isinstance(hook, type) and (not required or hook in required):
        if required.get(hook):
            return f"{text}; did you mean {with_options(hook, required[hook])}?"
        needs = issubclass(hook, CommHook) and misfit(hook.__name__, hook, (), {})
        return f"{text}; did you mean {hook.__name__}({'...' if needs else ''})?"
    found = parsed(hook)
    if found is None or (required and found[0] not in required):
        return f"{text}; such as {option}={example!r}"
    hook_class, options = found
    return f"{text}: write {option}={with_options(hook_class, {**required.get(hook_class, {}), **options})}"


def written(spec: str) -> str | None:
    """Return Python code for a hook in another notation, such as `"powersgd(rank=4)"`; `None`: unknown."""
    found = parsed(spec)
    if found is None:
        return None
    hook_class, options = found
    has_more = len(re.findall(r"\w+", spec)) > 1
    return f"{hook_class.__name__}(...)" if has_more and not options else with_options(hook_class, options)


def parsed(spec: object) -> tuple[type[CommHook], Mapping[str, Any]] | None:
    """Return the class and options that a value describes, though it is not a hook; `None`: unknown."""
    if isinstance(spec, str):
        name, _, behind = re.sub(r"[()\[\]{}]", " ", spec).strip().replace(":", " ", 1).partition(" ")
        pairs = [part.partition("=") for part in re.split(r"[,;]\s*|\s+", behind.strip())]
        hook_class = class_of(name)
        return (
            None if hook_class is None else (hook_class, {k.strip(): v.strip() for k, is_pair, v in pairs if is_pair})
        )
    if isinstance(spec, (list, tuple)) and len(spec) == 2 and isinstance(spec[1], Mapping):
        hook_class = class_of(spec[0])
        return None if hook_class is None else (hook_class, spec[1])
    if not isinstance(spec, Mapping) or not spec:
        return None
    rest: dict[str, Any] = {str(key): value for key, value in spec.items()}
    named = next((rest.pop(key) for key in _NAMES if isinstance(rest.get(key), str)), None)
    if named is None and len(rest) == 1 and isinstance(next(iter(rest.values())), Mapping):
        ((named, rest),) = rest.items()
    arguments: Mapping[str, Any] = next((rest.pop(key) for key in _ARGUMENTS if isinstance(rest.get(key), Mapping)), {})
    options = {**rest, **arguments}
    if named is not None:
        hook_class = class_of(named.rpartition(".")[2])
    else:
        hook_class = next(iter(owners_of(next(iter(options)))), None) if options else None
    return None if hook_class is None else (hook_class, options)


def in_yaml(value: Any) -> str:
    """Explain how to write a hook in a configuration file, for a value in another notation.

    The value may be jsonargparse's `NestedArg`, an option of a hook given by name.
    """
    if isinstance(value, tuple) and hasattr(value, "key") and hasattr(value, "val"):
        return _nested(value.key, value.val)
    found = parsed(value)
    if found is None:
        return f"{value!r} is no hook; {did_you_mean(str(value), available_hooks())}".rstrip("; ")
    hook_class, options = found
    unknown = next((name for name in options if name not in _options(hook_class)), None)
    if unknown is not None:
        hint = did_you_mean(unknown, _options(hook_class))
        return f"{hook_class.__name__} has no option {unknown!r}; {hint}".rstrip("; ")
    paths = {f"{home}.{hook_class.__name__}" for home in (_home(hook_class), hook_class.__module__)}
    if isinstance(value, Mapping) and value.get("class_path") in paths and {*options} <= {*options_of(hook_class)}:
        return f"an option of {hook_class.__name__} is missing or has a wrong value"
    return f"a hook with options is written by its class:\n{_block(hook_class, options)}"


def _nested(name: str, value: str) -> str:
    owners = owners_of(name)
    if not owners:
        close = closest(name, [option for each in available_hooks() for option in _options(each)])
        return f"no hook with a name has an option {name!r}" + (f"; did you mean {close!r}?" if close else "")
    return (
        f"{name!r} is an option of {_names(owners)}: its value {value!r} is wrong, or the hook is given by its name "
        f"instead of its class:\n{_block(owners[0], {name: value})}\n"
        f"or, on the command line, hook={owners[0].__name__} before hook.{name}={value}"
    )


def _home(hook_class: type[CommHook]) -> str:
    package = hook_class.__module__.partition(".")[0]
    return package if package == __name__.partition(".")[0] else hook_class.__module__


def _block(hook_class: type[CommHook], options: Mapping[str, Any]) -> str:
    short = getattr(hook_class, "option_aliases", {})
    lines = [f"    {short.get(name, name)}: {value}" for name, value in options.items()]
    return "\n".join(
        [
            "hook:",
            f"  class_path: {_home(hook_class)}.{hook_class.__name__}",
            *(["  init_args:"] if lines else []),
            *lines,
        ]
    )


def class_of(hook: object) -> type[CommHook] | None:
    """Return the class of a hook, given as hook, name or class; `None` for other values."""
    if isinstance(hook, CommHook):
        return type(hook)
    if isinstance(hook, type):
        return hook if issubclass(hook, CommHook) else None
    if not isinstance(hook, str):
        return None
    try:
        return get_hook_class(hook)
    except ValueError:
        return getattr(sys.modules[__name__.partition(".")[0]], hook, None) if hook in WRAPPERS else None


def owners_of(option: str) -> list[type[CommHook]]:
    """Return the classes of the hooks that have an option; shortest names first."""
    names = sorted(available_hooks(), key=len)
    return [hook_class for hook_class in map(get_hook_class, names) if option in _options(hook_class)]


def with_options(hook: object, options: Mapping[str, Any]) -> str:
    """Return Python code of a hook, given by name, class or object, with these options added."""
    hook_class = class_of(hook)
    assert hook_class is not None
    short = getattr(hook_class, "option_aliases", {})
    options = {short.get(name, name): value for name, value in options.items()}
    if isinstance(hook, CommHook):
        try:
            return code(dataclasses.replace(hook, **options))  # type: ignore[type-var]
        except ValueError:
            pass  # show invalid values unchanged
    missing = [
        name for name, one in parameters_of(hook_class).items() if one.default is one.empty and name not in options
    ]
    given = [
        f"{name}={value if isinstance(value, str) and _is_number(value) else repr(value)}"
        for name, value in options.items()
    ]
    return f"{hook_class.__name__}({', '.join([*(f'{name}=...' for name in missing), *given])})"


def _is_number(text: str) -> bool:
    """Return whether text from a command line represents a number, `True`, `False` or `None`."""
    return re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False|None", text) is not None


def _options(hook: object) -> list[str]:
    hook_class = class_of(hook)
    return [] if hook_class is None else [*options_of(hook_class), *getattr(hook_class, "option_aliases", {})]


def _inside(hook: object) -> Iterator[object]:
    """Yield a hook, given by name, class or object, and all hooks inside it."""
    if class_of(hook) is not None:
        yield hook
    if isinstance(hook, CommHook):
        for inner in hook.inner_hooks:
            yield from _inside(inner)
    elif isinstance(hook, Mapping):
        for inner in hook.values():
            yield from _inside(inner)
    elif isinstance(hook, (list, tuple)):
        for inner in hook:
            yield from _inside(inner)


def _line(hook: object, inner: object, options: Mapping[str, Any]) -> str:
    made = with_options(inner, options)
    if inner is hook:
        hook_class = class_of(hook)
        home = "" if hook_class is None else hook_class.__module__.partition(".")[0]
        return f"hook={made}" + (f", with `from {home} import {hook_class.__name__}`" if hook_class is not None else "")
    return f"{made} in its place in hook={_shown(hook)}"


def _shown(hook: object) -> str:
    return code(hook) if isinstance(hook, CommHook) else hook.__name__ if isinstance(hook, type) else repr(hook)


def _names(hook_classes: Sequence[type]) -> str:
    *most, last = (hook_class.__name__ for hook_class in hook_classes)
    return f"{', '.join(most)} and {last}" if most else last
