"""Config files: finding them, their variants, overrides from the command line, their comments and hash."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import json
import math
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from core.errors import UserError, nearest
from core.files import plain, read_json

__all__ = [
    "Recorded",
    "comment_of",
    "comments",
    "differences",
    "find",
    "flatten",
    "from_plain",
    "load",
    "override",
    "recorded",
    "sha256",
]

ROOT = Path(__file__).resolve().parent.parent
REQUIRED = ("name", "method", "seed", "mesh", "check", "expected")


def find(path: str) -> Path:
    """Returns the config file meant by `path`: as given, else relative to the folder that holds `configs`."""
    given = Path(path)
    names = (given, given.with_suffix(".py"))
    for name in [*names, *(ROOT / n for n in names), *(ROOT / "configs" / n for n in names)]:
        if name.is_file():
            return name.resolve()
    known = sorted(file.stem for file in (ROOT / "configs").glob("[!_]*.py"))
    listing = f"; there are: {', '.join(known)}" if known else ""
    raise UserError(f"no config file {path} (looked here and in {ROOT / 'configs'}){listing}")


def load(spec: str) -> tuple[ConfigDict, str, Path]:
    """Loads `FILE[:VARIANT]`; returns the unlocked config (lists turned to tuples), the variant, the file.

    The file defines VARIANTS and get_config(variant); the variant is "small" unless given.
    Raises UserError if the file, the variant or a key that every config needs is not there.
    """
    name, _, variant = spec.partition(":")
    variant = variant or "small"
    path = find(name)
    module_spec = importlib.util.spec_from_file_location(f"methodax_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"{path} is not a Python file: --config wants FILE.py[:VARIANT]")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    for attribute in ("VARIANTS", "get_config"):
        if not hasattr(module, attribute):
            raise UserError(f"{path} is no config file: it defines no {attribute}")
    if variant not in module.VARIANTS:
        hint = nearest(variant, module.VARIANTS) or f"; there are: {', '.join(module.VARIANTS)}"
        raise UserError(f"{path.name} has no variant {variant!r}{hint}")
    config = from_plain(module.get_config(variant).to_dict())
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise UserError(f"{path} sets no {', '.join(missing)}: configs need {', '.join(REQUIRED)}")
    return config, variant, path


def from_plain(tree: Mapping[str, Any]) -> ConfigDict:
    """Returns the ConfigDict of a nested dict; lists become tuples, so that it survives JSON."""

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): convert(item) for key, item in value.items()}
        return tuple(convert(item) for item in value) if isinstance(value, list | tuple) else value

    return ConfigDict(convert(tree))


def flatten(config: ConfigDict | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns `{dotted.path: value}` of every leaf, in the order of the source; empty sections are leaves."""
    leaves: dict[str, Any] = {}
    for key, value in (config.to_dict() if isinstance(config, ConfigDict) else config).items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[prefix + key] = value
    return leaves


def sha256(config: ConfigDict) -> str:
    """Returns the hex digest of the config's canonical JSON; equal configs hash equal on every machine."""
    for path, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"config.{path} is {value}: a config holds finite numbers, use None for 'none'")
    text = json.dumps(plain(config.to_dict()), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class Recorded(NamedTuple):
    """What config.json says: the config, its variant, the overrides in it and its hash."""

    config: ConfigDict
    variant: str
    overrides: dict[str, Any]
    sha256: str


def recorded(workdir: Path) -> Recorded:
    """Reads WORKDIR/config.json; UserError if there is none or it can not be read."""
    path = workdir / "config.json"
    try:
        data = read_json(path)
        return Recorded(from_plain(data["config"]), data["variant"], data["overrides"], data["config_sha256"])
    except FileNotFoundError:
        raise UserError(
            f"{workdir} holds no run ({path.name} is missing): train one with --config=FILE"
        ) from None
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{path} can not be read ({error}): choose another --workdir") from None


def differences(old: ConfigDict, new: ConfigDict, limit: int = 4) -> str:
    """Returns "a.b: 1 -> 2, c: gone, d: new" for the keys in which two configs differ, or ""."""
    before, after = flatten(old), flatten(new)
    parts = []
    for path in [*before, *(key for key in after if key not in before)]:
        if path not in after:
            parts.append(f"{path}: gone")
        elif path not in before:
            parts.append(f"{path}: new")
        elif plain(before[path]) != plain(after[path]):
            parts.append(f"{path}: {before[path]} -> {after[path]}")
    more = f" and {len(parts) - limit} more" if len(parts) > limit else ""
    return ", ".join(parts[:limit]) + more


def override(config: ConfigDict, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Sets `config.PATH = VALUE` in place for each (dotted path, text); returns `{path: typed value}`.

    The text is read as the type the key has (a key that is None takes a literal or a word). Raises UserError
    with the nearest real key for an unknown one, and for text that is not of the key's type.
    """
    values: dict[str, Any] = {}
    for path, text in pairs:
        section, leaf = _section(config, path)
        value = _parse(path, text, section[leaf])
        with section.ignore_type():
            section[leaf] = value
        values[path] = value
    return values


def _section(config: ConfigDict, path: str) -> tuple[ConfigDict, str]:
    *parents, leaf = path.split(".")
    section = config
    for depth, key in enumerate([*parents, leaf]):
        if not isinstance(section, ConfigDict):
            raise UserError(f"config.{'.'.join(parents[:depth])} is a value, it has no key {key!r}")
        if key not in section:
            here = "".join(f"{parent}." for parent in parents[:depth])
            elsewhere = [name for name in flatten(config) if name.split(".")[-1] == leaf]
            siblings = nearest(here + key, [here + name for name in section])
            hint = nearest(path, elsewhere, cutoff=0.0) or siblings or nearest(path, flatten(config))
            raise UserError(f"config has no key {here + key!r}{hint} (--help_config lists all)")
        if depth < len(parents):
            section = section[key]
    if isinstance(section[leaf], ConfigDict):
        raise UserError(f"config.{path} is a section: set one of its keys ({', '.join(section[leaf])})")
    return section, leaf


def _parse(path: str, text: str, default: Any) -> Any:
    try:
        return _convert(text, default)
    except (ValueError, KeyError, TypeError):
        kind = type(default).__name__
        raise UserError(f"config.{path} is {kind} ({default!r} by default), {text!r} is not") from None


def _convert(value: Any, default: Any) -> Any:
    """Converts text, or an element of a parsed tuple, to the type of `default`; ValueError if it can not."""
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError
        return value
    if isinstance(default, bool):
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    if isinstance(default, int | float):
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        if isinstance(default, float):
            return number
        if not number.is_integer():
            raise ValueError
        return (
            int(value) if not isinstance(value, str) or value.strip().lstrip("+-").isdigit() else int(number)
        )
    if isinstance(default, tuple):
        return _convert_tuple(value, default)
    return _literal(value) if isinstance(value, str) else value


def _literal(text: str) -> Any:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return tuple(value) if isinstance(value, list) else value


def _convert_tuple(value: Any, default: tuple) -> tuple:
    if isinstance(value, str):
        value = _literal(value)
    if isinstance(value, str):
        value = [item.strip() for item in value.strip("()[]").split(",") if item.strip()]
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(_convert(item, default[0]) for item in items) if default else tuple(items)


def comments(path: Path) -> dict[str, str]:
    """Returns `{dotted.path: comment}` of a config's source: the `# ...` after what sets a key.

    Keys that a helper function returns are listed by the path they have there, after a dot: `.lr`.
    """
    source = path.read_text(encoding="utf-8")
    lines = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip()
    }
    found: dict[str, str] = {}
    for dotted, first, last in _settings(ast.parse(source)):
        text = lines.get(first) or lines.get(last)
        if text:
            found.setdefault(dotted, text)
    return found


def comment_of(key: str, table: Mapping[str, str]) -> str:
    """Returns the comment of `a.b.c` in `comments(...)`, its own or a helper's `.b.c` or `.c`; or ""."""
    suffixes = [f".{key}", *(key[i:] for i, letter in enumerate(key) if letter == ".")]
    return next((table[name] for name in [key, *suffixes] if name in table), "")


def _settings(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yields (dotted path, first line, last line) of each place in the source that sets a config key."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                path = _path(target)
                if path:
                    yield path, node.lineno, node.end_lineno or node.lineno
                yield from _entries(node.value, f"{path}.", inside)
    for node in ast.walk(tree):
        if node not in inside:
            yield from _entries(node, ".", inside)


def _path(target: ast.AST) -> str:
    """Returns "a.b" for the target `config.a.b`, "" for a plain name."""
    names: list[str] = []
    while isinstance(target, ast.Attribute):
        names.insert(0, target.attr)
        target = target.value
    return ".".join(names)


def _entries(node: ast.AST, prefix: str, inside: set[ast.AST]) -> Iterator[tuple[str, int, int]]:
    pairs: list[tuple[str, ast.expr, int]] = []
    if isinstance(node, ast.Call):
        inside.add(node)
        pairs = [(keyword.arg, keyword.value, keyword.lineno) for keyword in node.keywords if keyword.arg]
        for argument in node.args:
            yield from _entries(argument, prefix, inside)
    elif isinstance(node, ast.Dict):
        inside.add(node)
        for key, value in zip(node.keys, node.values):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                pairs.append((key.value, value, key.lineno))
    for name, value, line in pairs:
        yield prefix + name, line, value.end_lineno or line
        yield from _entries(value, f"{prefix}{name}.", inside)
