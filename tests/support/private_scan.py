"""Finds private names of others in our sources: `torch._dynamo.config.disable`, `._comm_hooks`."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning_commhooks", "accelerate_integration")

# Of our own objects, read from outside of their methods; and parts of names.
OURS = {
    "_comm_hook_events",
    "_iter",
    "_ms",
    "_target_",
}


def is_private(name):
    return name.startswith("_") and name.strip("_") and not (name.startswith("__") and name.endswith("__"))


def sources():
    """Syntax trees of our packages by path."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def private_names(trees):
    """Files that use each private name that is not ours.

    A name is a path from a module (`torch._foreach_norm`) or an attribute of some object (`._scale`): also in a text,
    as for `getattr`; and a method or attribute of ours that only a base class can want, since nothing here reads it.
    """
    own, read = _own_names(trees), _names_read(trees)
    found = defaultdict(set)
    for path, tree in trees.items():
        for name in _used(tree, own):
            found[name].add(path)
        for name in _given(tree) - read:
            found[f".{name}"].add(path)
    return {name: files for name, files in found.items() if name.lstrip(".") not in OURS}


def _own_names(trees):
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    assigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    inherited = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Call)} - OURS
    return (defined | assigned | set.union(*map(_given, trees.values()))) - inherited


def _given(tree):
    """Private attributes that a file sets on `self`, and its methods."""
    given = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            given.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            given.update(part.name for part in node.body if isinstance(part, ast.FunctionDef))
    return set(filter(is_private, given))


def _names_read(trees):
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _used(tree, own):
    imports = _imports(tree)
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            paths = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (path for path in paths if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if any(map(is_private, a.name.split("."))))
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            yield from _of_chain(node, imports, own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.strip(".")
            if name.isidentifier() and is_private(name):
                yield f".{name}"


def _imports(tree):
    """What names of a file stand for, of modules of others."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname: a.name for a in node.names if a.asname})
            names.update({a.name.split(".")[0]: a.name.split(".")[0] for a in node.names if not a.asname})
        elif isinstance(node, ast.ImportFrom) and _is_foreign(node.module or ""):
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def _of_chain(node, imports, own):
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.insert(0, node.attr)
        node = node.value
    if not any(map(is_private, attributes)):
        return
    if isinstance(node, ast.Name) and node.id in imports:
        yield ".".join([imports[node.id], *attributes])
        return
    if _is_self(node) and attributes[0] in own:
        attributes = attributes[1:]
    yield from (f".{name}" for name in attributes if is_private(name))


def _is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_foreign(module):
    return module.split(".")[0] not in PACKAGES
