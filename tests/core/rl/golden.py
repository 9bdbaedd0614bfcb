"""Golden losses of tests/golden/sgft in a chosen precision."""

import contextlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

GOLDEN = ["a_losses", "b_losses"]
TOLERANCES = {"float64": {"rtol": 1e-6}, "float32": {"rtol": 1e-4, "atol": 1e-5}}


@contextlib.contextmanager
def precision(file: str, dtype: str):
    """Yields (arrays by name, floats in `dtype`; tolerance for assert_allclose) with x64 on for float64."""
    path = Path(__file__).parents[2] / "golden" / "sgft" / f"{file}.npz"
    with jax.enable_x64(dtype == "float64"), np.load(path) as data:
        yield (
            {k: jnp.asarray(v, dtype if v.dtype == np.float64 else None) for k, v in data.items()},
            TOLERANCES[dtype],
        )
