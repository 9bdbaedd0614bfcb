"""F1 scores against scikit-learn's, classes that never occur included."""

import json

import jax.numpy as jnp
import numpy as np

from graphs.gaa.metrics import micro_macro_f1
from tests.graphs.gaa.conftest import GOLDEN


def test_golden_scores_with_and_without_padding():
    for case in json.loads((GOLDEN / "f1.json").read_text()):
        y, p = jnp.array(case["y"]), jnp.array(case["p"])
        expected = case["micro"], case["macro"]
        found = micro_macro_f1(y, p, jnp.ones(len(y), bool), classes=case["C"])
        np.testing.assert_allclose(found, expected, atol=1e-6)
        longer = [jnp.concatenate([values, jnp.array([-1, 0])]) for values in (y, p)]
        mask = jnp.arange(len(y) + 2) < len(y)
        np.testing.assert_allclose(micro_macro_f1(*longer, mask, classes=case["C"]), expected, atol=1e-6)
