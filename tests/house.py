"""The rules of docs/architecture.md as functions over a source tree: where imports point, what names say."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

METHODS = ("ats", "causal", "face", "generative", "graphs", "llm", "robotics", "rtrl", "segmentation")
ROOMS = ("benchmarks", "configs", "core", "docs", "launch", "tests", *METHODS)
NO_ROOMS = ("build", "dist", "runs")
# Folders that the methods of their package share, and who in another package may use one.
SHARED = (
    *("llm.models", "llm.stats", "llm.judge", "llm.sandbox"),
    *("generative.diffusion", "rtrl.envs", "robotics.assembly_sim"),
)
GUESTS = {
    ("face", "generative.diffusion"),
    ("ats", "generative.diffusion"),
    ("robotics.hamster", "llm.models"),
}
# Files, clocks and progress bars: only experiment.py and __main__.py, the front of a method, reach for them.
EFFECTS = ("core.run", "core.checkpoint", "core.metrics", "core.preemption", "core.progress", "core.report")
FRONT = ("experiment", "__main__")
IN_CONFIGS = (*sys.stdlib_module_names, "configs", "ml_collections")

# A parameter is an array if it is annotated as one. One with neither annotation nor default is presumed to be
# an array, as pure functions have them: annotate what is not. A random key has no shape worth telling.
ARRAYS = ("Array", "ArrayLike", "NDArray", "ndarray")
NO_SHAPE = ("self", "cls", "key", "rng")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def modules(root: Path) -> dict[str, Path]:
    """`{dotted name: file}` of all Python in the house; a package goes by its own name."""
    found = {"launch": root / "launch.py"} if (root / "launch.py").is_file() else {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")):
        if folder.name not in NO_ROOMS:
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def wrong_arrows(root: Path) -> list[str]:
    """One line for each import that points the wrong way, and for each folder that no rule covers."""
    found = modules(root)
    known = {".".join(name.split(".")[:n]) for name in found for n in range(1, name.count(".") + 2)}
    strangers = sorted({name.split(".")[0] for name in found} - set(ROOMS))
    lines = [f"{name}/: which of its imports are right? Add it to tests/house.py" for name in strangers]
    for module, path in found.items():
        for line, target in imports(module, path, known):
            if reason := objection(module, target):
                lines.append(f"{path.relative_to(root)}:{line} imports {target}: {reason}")
    return lines


def imports(module: str, path: Path, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import statement, wherever it stands, and of each import_module("..")."""
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"  # `from robotics import sgft` is about the folder
                yield node.lineno, full if full in known else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def objection(module: str, target: str) -> str | None:
    """Why `module` must not import `target`, or None."""
    room, other = module.split(".")[0], target.split(".")[0]
    if room == "configs":
        return None if other in IN_CONFIGS else "a config needs the standard library and ml_collections only"
    if room == "tests" or other not in ROOMS:
        return None
    if other in ("launch", "tests", "benchmarks", "docs") and other != room:
        return f"only tests import {other}"
    if other == "configs":
        return "a config is loaded by core.config, never imported"
    if room in ("core", "launch") and other in METHODS:
        return f"{room} never imports a method"
    return _objection_in_method(module, target) if room in METHODS else None


def _objection_in_method(module: str, target: str) -> str | None:
    ours, theirs = owner(module), owner(target)
    front = module.split(".")[-1] in FRONT
    if not front and any(f"{target}.".startswith(f"{name}.") for name in EFFECTS):
        return "side effects belong in experiment.py and __main__.py"
    if target.split(".")[0] == "core":
        return None
    if ours == theirs:
        upwards = target.split(".")[-1] == "experiment" and not front
        return "experiment.py uses the others, not they it" if upwards else None
    package = ours.split(".")[0]
    if theirs in SHARED and (
        theirs.startswith(f"{package}.") or GUESTS & {(ours, theirs), (package, theirs)}
    ):
        return None
    return f"{ours} never imports {theirs}"


def owner(module: str) -> str:
    """The method or shared folder of a module: robotics.sgft; the method ats is a whole package."""
    parts = module.split(".")
    return ".".join(parts[: 1 if parts[0] == "ats" else 2])


def silent(root: Path) -> list[str]:
    """One line for each name in an `__all__` that says nothing, or takes arrays and gives no shapes."""
    found = {n: path for n, path in modules(root).items() if n.split(".")[0] not in ("tests", "configs")}
    trees = {name: parse(path) for name, path in found.items()}
    lines = set()
    for module, tree in trees.items():
        for name in exported(tree):
            owner_of_name, node = defined(name, module, trees)
            where = f"{found[owner_of_name].relative_to(root)}: {name}"
            if node is None:
                lines.add(f"{where} is in __all__ and nowhere else")
            elif isinstance(node, Definition):
                lines |= {f"{where}{problem}" for problem in _problems(node)}
            elif name.islower() and isinstance(node, ast.Call | ast.Lambda):
                lines.add(f"{where} can have no docstring: write it with def")
    return sorted(lines)


def exported(tree: ast.Module) -> list[str]:
    """The names of a literal `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def defined(
    name: str, module: str, trees: dict[str, ast.Module]
) -> tuple[str, Definition | ast.expr | ast.Module | None]:
    """Where `name` of `module` is written and what it is there, through re-exports and aliases."""
    head, _, rest = name.partition(".")
    for node in trees[module].body:
        if isinstance(node, Definition) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == head:
                    inner = f"{node.module}.{alias.name}"
                    if inner in trees:
                        return defined(rest, inner, trees) if rest else (inner, trees[inner])
                    return defined(alias.name, node.module, trees)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                alias = isinstance(node.value, ast.Name | ast.Attribute)
                place, value = defined(ast.unparse(node.value), module, trees) if alias else (module, None)
                return place, value or node.value
    return module, None


def _problems(node: Definition) -> Iterator[str]:
    text = ast.get_docstring(node) or ""
    if not text:
        yield " has no docstring"
    elif takes_arrays(node) and not says_shapes(text):
        yield " takes arrays and its docstring gives no shape such as `[B, ...]`"
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        # `setup` is Flax's: it only builds what the class's docstring lists.
        if isinstance(item, Definition) and not item.name.startswith("_") and item.name != "setup":
            own = ast.get_docstring(item) or ""
            if not own:
                yield f".{item.name} has no docstring"
            elif takes_arrays(item) and not says_shapes(own + text):
                yield f".{item.name} takes arrays and no docstring gives a shape such as `[B, ...]`"


def takes_arrays(node: Definition) -> bool:
    """Whether a function has an array among its parameters, or a class among its fields or in its call."""
    if isinstance(node, ast.ClassDef):
        fields = any(isinstance(item, ast.AnnAssign) and is_array(item.annotation) for item in node.body)
        calls = [i for i in node.body if isinstance(i, Definition) and i.name in ("__init__", "__call__")]
        return fields or any(map(takes_arrays, calls))
    a = node.args
    plain = [*a.posonlyargs, *a.args]
    required = plain[: len(plain) - len(a.defaults)]
    required += [one for one, default in zip(a.kwonlyargs, a.kw_defaults) if default is None]
    if any(one.annotation is None and one.arg not in NO_SHAPE for one in required):
        return True
    every = [*plain, *a.kwonlyargs, *filter(None, [a.vararg])]
    return any(is_array(one.annotation) for one in every if one.arg not in NO_SHAPE)


def is_array(annotation: ast.AST | None) -> bool:
    """Whether an annotation holds an array type, other than in the signature of a Callable."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if annotation is None or (
        isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Callable")
    ):
        return False
    name = getattr(annotation, "attr", getattr(annotation, "id", ""))
    return name in ARRAYS or any(map(is_array, ast.iter_child_nodes(annotation)))


def says_shapes(text: str) -> bool:
    """Whether a docstring has a shape, `[B, ...]`, between backticks: a range in the running text is none."""
    return any("[" in quoted for quoted in text.split("`")[1::2])
