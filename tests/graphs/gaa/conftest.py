"""The golden files and the two precisions in which they must hold."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

GOLDEN = Path(__file__).parents[2] / "golden" / "gaa"


@pytest.fixture(params=["float32", "float64"])
def golden(request):
    """`load(name)` -> arrays of one golden file, floats in the precision of the test."""
    with jax.enable_x64(request.param == "float64"):

        def load(name):
            with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
            kind = {"f": request.param, "i": "int32", "u": "int32", "b": "bool"}
            return {key: jnp.asarray(array, kind[array.dtype.kind]) for key, array in arrays.items()}

        load.double = request.param == "float64"
        yield load


@pytest.fixture
def close(golden):
    """Asserts equality at the golden README's tolerance: `single` in float32, 1e-9 in float64."""

    def assert_close(actual, expected, single=1e-5, double=1e-9):
        tolerance = double if golden.double else single
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)

    return assert_close
