"""Sparse times dense: equal to the dense product, with its gradients, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from graphs.gaa import sparse

N, M, D = 7, 5, 4


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(0)
    matrix = scipy.sparse.random_array((N, M), density=0.4, rng=rng)
    return (
        matrix,
        sparse.from_scipy(matrix, size=20),
        jnp.asarray(rng.standard_normal((3, M, D)), jnp.float32),
    )


def value(a, x):
    return jnp.sum(jnp.sin(sparse.matmul(a, x)))


def dense_value(a, x):
    return jnp.sum(jnp.sin(a @ x))


def test_product_and_gradients(parts):
    matrix, a, x = parts
    dense = jnp.asarray(matrix.toarray(), jnp.float32)
    assert a.shape == (N, M) and a.T.shape == (M, N)
    np.testing.assert_allclose(sparse.matmul(a, x[0]), dense @ x[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(sparse.matmul(a.T, dense), dense.T @ dense, rtol=1e-5, atol=1e-6)
    of_a, of_x = jax.grad(value, (0, 1), allow_int=True)(a, x[0])
    dense_a, dense_x = jax.grad(dense_value, (0, 1))(dense, x[0])
    rows, columns = np.nonzero(dense)
    np.testing.assert_allclose(of_x, dense_x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_a.rows.data[: len(rows)], dense_a[rows, columns], rtol=1e-5, atol=1e-6)
    assert not of_a.rows.data[len(rows) :].any()


def test_under_vmap_of_either_operand(parts):
    matrix, a, x = parts
    dense = jnp.asarray(matrix.toarray(), jnp.float32)
    expected = jax.vmap(jax.grad(dense_value, 1), (None, 0))(dense, x)
    gradient = jax.jit(jax.vmap(jax.grad(value, 1), (None, 0)))
    np.testing.assert_allclose(gradient(a, x), expected, rtol=1e-5, atol=1e-6)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), a)
    both = jax.jit(jax.vmap(jax.grad(value, 1)))(stacked, x)
    np.testing.assert_allclose(both, expected, rtol=1e-5, atol=1e-6)
    first = jax.jit(jax.vmap(sparse.matmul, (0, None)))(stacked, x[0])
    np.testing.assert_allclose(first, jnp.stack([dense @ x[0]] * 3), rtol=1e-5, atol=1e-6)


def test_entries_in_any_order_with_duplicates_and_padding():
    row, column = jnp.array([2, 0, 2, 1, 0]), jnp.array([1, 0, 1, 2, 0])
    a = jax.jit(sparse.from_coo, static_argnames="shape")(
        row, column, jnp.array([1.0, 2.0, 3.0, 4.0, 0.0]), shape=(3, 4)
    )
    dense = np.array([[2, 0, 0, 0], [0, 0, 4, 0], [0, 4, 0, 0]], np.float32)
    np.testing.assert_allclose(sparse.matmul(a, jnp.eye(4)), dense)
    np.testing.assert_allclose(sparse.matmul(a.T, jnp.eye(3)), dense.T)


def test_padding_adds_rows_of_zeros(parts):
    matrix, a, x = parts
    padded = sparse.pad(sparse.from_scipy(matrix), rows=9, entries=25)
    np.testing.assert_allclose(sparse.matmul(padded, x[0])[:N], sparse.matmul(a, x[0]), rtol=1e-6)
    assert padded.shape == (9, M) and not sparse.matmul(padded, x[0])[N:].any()
    back = sparse.matmul(padded.T, jnp.ones((9, 2)))
    np.testing.assert_allclose(back, sparse.matmul(a.T, jnp.ones((N, 2))), rtol=1e-6)
    for too_small in ({"rows": 6}, {"rows": 9, "entries": 2}):
        with pytest.raises(ValueError, match="does not fit"):
            sparse.pad(a, **too_small)


def test_double_precision(parts):
    matrix = parts[0]
    with jax.enable_x64(True):
        a, x = sparse.from_scipy(matrix, dtype=np.float64), jnp.eye(M, dtype=jnp.float64)
        product = jax.jit(sparse.matmul)(a, x)
        assert product.dtype == jnp.float64
        np.testing.assert_array_equal(product, matrix.toarray())
