"""The baselines' own pieces: GRADE's loss, A2GNN's propagation, StruRW's weights, AdaGCN's critic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from core.errors import UserError
from graphs.gaa import graph, losses, sparse
from graphs.gaa.baselines import a2gnn, adagcn, grade, strurw
from graphs.gaa.networks import Channel, Convolution


def everyone(x):
    return jnp.ones(len(x), bool)


def test_grade(golden, close):
    d = golden("grade")
    discriminator = d["param.discriminator.0.weight"].T, d["param.discriminator.0.bias"]
    logits = [d[f"feat_{s}"] @ discriminator[0] + discriminator[1] for s in "st"]
    close(grade.domain_loss(*logits, *map(everyone, logits)), d["domain_loss"])
    close(d["feat_s"][:, 5:10] @ d["param.cls.weight"].T + d["param.cls.bias"], d["logits_s"])
    close(d["feat_s"][:, 10:], d["logits_s"])
    longer = [jnp.concatenate([x, x[:2]]) for x in logits]
    masks = [jnp.arange(len(x)) < len(x) - 2 for x in longer]
    close(grade.domain_loss(*longer, *masks), d["domain_loss"])


def test_propagation_after_a_linear_map(golden, close):
    d = golden("gcn")
    n, dtype = 9, d["gcn_x"].dtype
    s, r, w = graph.gcn_norm(*d["gcn_edge_index"], n, jnp.ones(d["gcn_edge_index"].shape[1], dtype))
    p = sparse.from_coo(r, s, w, shape=(n, n))
    params = {"params": {"kernel": d["gcn_w"], "bias": d["gcn_b"]}}
    for hops in (0, 1, 2, 5, 10):
        found = Convolution(4).apply(params, Channel(p), d["gcn_x"], hops)
        close(found, d[f"prop_y_{hops}"], double=1e-6 if hops else 1e-9)


def test_strurw_weights(golden, close):
    d = golden("strurw")
    y_t = d["y_t_pred"]
    p = {s: d[f"p_{s}"] for s in "st"}
    for s, y in (("s", d["y_s"]), ("t", y_t)):
        edges = d[f"edge_{s}"]
        found = strurw.edge_class_probs(y, *edges, jnp.ones(edges.shape[1], p["s"].dtype), classes=3)
        close(found, p[s], 1e-6)
    ratios = strurw.edge_ratios(p["s"], p["t"])
    close(ratios, d["R"], 1e-6)
    u, v = d["edge_s"]
    close(ratios[d["y_s"][v], d["y_s"][u]], d["edge_weight"], 1e-6)
    n = len(d["y_s"])
    adjacency = sparse.from_coo(v, u, jnp.ones(len(u), p["s"].dtype), shape=(n, n))
    mean = strurw.neighbour_mean(adjacency, d["y_s"], d["R"], 0.6)
    expected = np.zeros((n, n))
    np.add.at(expected, (v, u), (0.4 + 0.6 * np.asarray(d["edge_weight"])) / np.bincount(v, minlength=n)[v])
    close(sparse.matmul(mean, jnp.eye(n)), expected, 1e-6)
    close(sparse.matmul(mean.T, jnp.eye(n)), expected.T, 1e-6)


def test_a_ratio_is_1_where_the_source_has_no_edges_and_0_for_a_class_that_the_target_lacks():
    p_s, p_t = jnp.array([[0.0, 0.5], [0.2, jnp.nan]]), jnp.array([[0.1, 0.25], [0.0, 0.3]])
    np.testing.assert_allclose(strurw.edge_ratios(p_s, p_t), [[1.0, 0.5], [0.0, 1.0]])


def test_the_critic_is_penalised_for_slopes_other_than_1():
    h = jax.random.normal(jax.random.key(0), (2, 5, 3))
    slope = jnp.array([0.6, 0.0, 0.8])

    def critic(z, rate, key):
        return 2.0 * z @ slope

    gap = jnp.mean(critic(h[0], 0, None)) - jnp.mean(critic(h[1], 0, None))
    value = adagcn.critic_loss(critic, *h, *map(everyone, h), jax.random.key(1))
    np.testing.assert_allclose(value, -abs(gap) + 5.0 * (2.0 - 1.0) ** 2, rtol=1e-5)


def test_sampled_mmd_draws_real_nodes_only():
    x = jnp.concatenate([jax.random.normal(jax.random.key(0), (20, 2)), jnp.full((5, 2), 1e3)])
    mask = jnp.arange(25) < 20
    same = a2gnn.sampled_mmd(jax.random.key(1), x, x, mask, mask, size=400)
    other = a2gnn.sampled_mmd(jax.random.key(1), x, x + 1.0, mask, mask, size=400)
    assert abs(same) < 0.02 < 0.1 < other
    exact = losses.mmd_multi_rbf(x[:20], x[:20] + 1.0)
    np.testing.assert_allclose(other, exact, rtol=0.15)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: grade.GRADE(3, alignment="js"), "alignment='js'.* one of JS, MMD, C"),
        (lambda: a2gnn.A2GNN(3, alignment="mmd"), "alignment='mmd'.*one of MMD, adversarial"),
        (lambda: strurw.StruRW(3, mode="mixup"), "mode='mixup'; one of erm, adv, mmd"),
    ],
)
def test_unknown_choices_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
