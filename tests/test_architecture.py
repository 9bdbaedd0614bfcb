"""The house of docs/architecture.md: where imports point, what configs have, what public names say."""

import ast
import runpy
import subprocess
import sys
import textwrap

import pytest

from core import config as configs
from tests import house

ROOT = configs.ROOT
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py"))

GOOD = {
    "core/run.py": "import importlib\nfrom core import mesh\nimportlib.import_module(f'{1}.experiment')",
    "core/mesh.py": "import jax",
    "configs/sgft.py": "import math\nfrom ml_collections import ConfigDict\nfrom configs import common",
    "configs/common.py": "",
    "launch.py": "from core import run",
    "robotics/__init__.py": "import math",
    "robotics/sgft/__init__.py": "from robotics.sgft.shaping import f\nfrom . import shaping",
    "robotics/sgft/shaping.py": "from robotics.sgft.envs.make import g\nfrom robotics import assembly_sim",
    "robotics/sgft/envs/make.py": "from ...sgft import shaping\nfrom core import mesh",
    "robotics/sgft/experiment.py": "from core.run import Run\nfrom robotics.sgft import shaping",
    "robotics/sgft/__main__.py": "from robotics.sgft import experiment",
    "robotics/srsa/__init__.py": "",
    "robotics/hamster/path.py": "from llm.models import lm",
    "robotics/assembly_sim/__init__.py": "",
    "llm/models/lm.py": "import jax",
    "llm/judge/a.py": "import llm.models.lm",
    "llm/loire/grow.py": "from llm.stats import elo",
    "face/mgfr/a.py": "from generative.diffusion import ddim",
    "ats/a.py": "from generative.diffusion import ddim\nfrom ats import b",
    "ats/b.py": "",
    "benchmarks/sgft.py": "from robotics.sgft import experiment\nfrom benchmarks import timing",
    "tests/test_sgft.py": "import launch\nfrom robotics.sgft import experiment\nfrom configs import sgft",
    "runs/sgft/x.py": "import robotics.sgft.experiment",
}
PLANTED = [
    ("core/mesh.py", "from robotics.sgft import shaping", "core never imports a method"),
    ("core/mesh.py", "def f():\n    import robotics.sgft.shaping", "core/mesh.py:2 imports robotics"),
    ("core/mesh.py", "__import__('llm.models')", "core never imports a method"),
    ("core/run.py", "import importlib\nimportlib.import_module('graphs.gaa')", "core never imports a method"),
    ("core/mesh.py", "import launch", "only tests import launch"),
    ("core/mesh.py", "import configs.sgft", "loaded by core.config"),
    ("launch.py", "from robotics.sgft import experiment", "launch never imports a method"),
    ("configs/sgft.py", "import jax.numpy as jnp", "ml_collections only"),
    ("configs/sgft.py", "from core import mesh", "ml_collections only"),
    ("configs/sgft.py", "from robotics.sgft import shaping", "ml_collections only"),
    ("robotics/sgft/shaping.py", "from robotics.srsa import retrieve", "sgft never imports robotics.srsa"),
    ("robotics/sgft/shaping.py", "from robotics import srsa", "sgft never imports robotics.srsa"),
    ("robotics/sgft/shaping.py", "from .. import srsa", "sgft never imports robotics.srsa"),
    ("robotics/sgft/envs/make.py", "from ...srsa import x", "sgft never imports robotics.srsa"),
    ("robotics/sgft/shaping.py", "from llm.models import lm", "sgft never imports llm.models"),
    ("robotics/hamster/path.py", "from llm.stats import elo", "hamster never imports llm.stats"),
    ("robotics/assembly_sim/__init__.py", "import robotics.sgft.shaping", "assembly_sim never imports"),
    ("robotics/__init__.py", "from robotics import sgft", "robotics never imports robotics.sgft"),
    ("robotics/sgft/shaping.py", "from robotics.sgft import experiment", "experiment.py uses the others"),
    ("robotics/sgft/shaping.py", "from .experiment import run", "experiment.py uses the others"),
    ("robotics/sgft/shaping.py", "from core.run import Run", "side effects belong in experiment.py"),
    ("robotics/sgft/shaping.py", "from core import run", "side effects belong in experiment.py"),
    ("robotics/sgft/experiment.py", "from benchmarks import timing", "only tests import benchmarks"),
    ("generative/diffusion/a.py", "import face.mgfr.a", "diffusion never imports face.mgfr"),
    ("attic/old.py", "import jax", "attic/: which of its imports are right?"),
]


def build(root, sources):
    for name, source in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_imports_point_one_way():
    lines = house.wrong_arrows(ROOT)
    assert not lines, "\n".join(lines)


def test_a_good_house_has_no_wrong_arrow(tmp_path):
    assert house.wrong_arrows(build(tmp_path, GOOD)) == []


@pytest.mark.parametrize(("name", "source", "message"), PLANTED)
def test_a_planted_arrow_is_found(tmp_path, name, source, message):
    lines = house.wrong_arrows(build(tmp_path, {**GOOD, name: source}))
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith(name.split("/")[0]), lines


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_has_three_scales_and_loads_in_each_variant(name):
    path = ROOT / "configs" / f"{name}.py"
    variants = runpy.run_path(str(path))["VARIANTS"]
    assert {"smoke", "small", "full"} <= set(variants)
    loaded = {variant: configs.load(f"{path}:{variant}")[0] for variant in variants}
    assert {config.name for config in loaded.values()} == {name}, "the default workdir and results/ go by it"
    hashes = {configs.sha256(config) for config in loaded.values()}
    assert len(hashes) == len(variants), "two variants are the same config"
    method = ROOT / loaded["small"].method.replace(".", "/")
    body = house.parse(method / "experiment.py").body
    assert any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body)


def test_reading_a_config_does_not_start_jax():
    """launch.py sets the platform and the number of fake devices before that."""
    code = f"""
        import sys
        import launch
        for name in {CONFIGS}:
            launch.configs.load(name)
        started = sorted({{"jax", "jaxlib", "flax", "mujoco"}} & set(sys.modules))
        sys.exit(f"imported: {{started}}" if started else 0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_says_what_it_is():
    lines = house.silent(ROOT)
    assert not lines, "\n".join(lines)


SAYS = '''
    def f(x: jax.Array):
        """Doubles `[..]`."""
    def g(x, *, gamma=1.0):
        """Doubles `[B, N]` in [0, 1]."""
    def h(config: Config, key: jax.Array, fn: Callable[[jax.Array], None], n: int = 1):
        """No shape to tell."""
    class C(NamedTuple):
        """Two fields `[N]`."""
        x: Array
        def m(self, y: Array):
            """Its shape stands above."""
        def _private(self, z): ...
    @jax.jit
    def i(x: "np.ndarray | None" = None):
        """`[]` or nothing."""
    alias = shapes.j
    LIMIT = max(1, 2)
    Kind = dict[str, jax.Array]
'''
SILENT = [
    ("def f(x: jax.Array): ...", "f has no docstring"),
    ('def f(x: jax.Array):\n    """Doubles."""', "f takes arrays"),
    ('def f(x: ArrayLike | None = None):\n    """Values in [0, 1] of `x`, and `y` [2]."""', "f takes arrays"),
    ('def f(x: "dict[str, np.ndarray]"):\n    """Doubles."""', "f takes arrays"),
    ('def f(x):\n    """Doubles."""', "f takes arrays"),
    ('def f(*, x):\n    """Doubles."""', "f takes arrays"),
    ('def f(*x: Array):\n    """Doubles."""', "f takes arrays"),
    ('class f(NamedTuple):\n    """Two."""\n    x: Array', "f takes arrays"),
    ('class f(Module):\n    """Two."""\n    def __call__(self, x: Array): ...', "f takes arrays"),
    ('class f:\n    """One."""\n    def m(self): ...', "f.m has no docstring"),
    ('class f:\n    """One."""\n    def m(self, x):\n        """Two."""', "f.m takes arrays"),
    ("f = jax.jit(g)", "f can have no docstring"),
    ("from core.shapes import silent as f", "core/shapes.py: f has no docstring"),
    ("from core import shapes\nf = shapes.silent", "core/shapes.py: f has no docstring"),
    ("g = 1", "f is in __all__ and nowhere else"),
]
SHAPES = 'def j(x):\n    """`[..]`."""\ndef silent(): ...\n'


def test_names_that_say_enough_pass(tmp_path):
    source = (
        "from core import shapes\n__all__ = ['f', 'g', 'h', 'C', 'i', 'alias', 'LIMIT', 'Kind', 'shapes']\n"
    )
    build(tmp_path, {"core/a.py": source + textwrap.dedent(SAYS), "core/shapes.py": SHAPES})
    assert house.silent(tmp_path) == []


@pytest.mark.parametrize(("source", "message"), SILENT)
def test_a_silent_name_is_found(tmp_path, source, message):
    build(tmp_path, {"core/a.py": f"__all__ = ['f']\n{source}", "core/shapes.py": SHAPES})
    lines = house.silent(tmp_path)
    assert len(lines) == 1 and message in lines[0], lines
