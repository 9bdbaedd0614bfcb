"""PPMI: golden values, and what the walks may visit."""

import jax
import numpy as np
import scipy.sparse

from graphs.gaa import ppmi
from tests.graphs.gaa.conftest import GOLDEN


def test_golden_values():
    with np.load(GOLDEN / "ppmi.npz") as d:
        for counts in (d["counts"], scipy.sparse.csr_array(d["counts"])):
            found = ppmi.ppmi_from_counts(counts, int(d["path_len"]))
            np.testing.assert_allclose(found.toarray(), d["ppmi"], rtol=1e-9, atol=1e-12)
            normed = ppmi.normalised_ppmi(found).toarray()
            np.testing.assert_allclose(normed, d["normed"], rtol=1e-9, atol=1e-12)


def test_walks_stay_on_the_graph_and_have_uniform_lengths():
    path = np.array([[0, 1, 1], [1, 2, 2]])  # 0 - 1 - 2, and 3 alone
    counts = ppmi.random_walk_counts(jax.random.key(0), path, 4, walks=4000, length=3).toarray()
    assert not counts[3].any() and not counts[:, 3].any()
    # From 1: one step certain, a second with probability 2/3, a third with 1/3.
    expected = 4000 * np.array([(1 + 1 / 3) / 2, 2 / 3, (1 + 1 / 3) / 2])
    np.testing.assert_allclose(counts[1, :3], expected, rtol=0.06)


def test_walks_are_those_of_their_key():
    ring = np.stack([np.arange(6), (np.arange(6) + 1) % 6])
    walks = [ppmi.random_walk_counts(jax.random.key(i), ring, 6).toarray() for i in (0, 0, 1)]
    np.testing.assert_array_equal(walks[0], walks[1])
    assert (walks[0] != walks[2]).any()


def test_a_graph_without_edges_has_loops_alone():
    counts = ppmi.random_walk_counts(jax.random.key(0), np.zeros((2, 0), int), 3)
    assert counts.nnz == 0
    np.testing.assert_array_equal(
        ppmi.normalised_ppmi(ppmi.ppmi_from_counts(counts, 10)).toarray(), np.eye(3)
    )
