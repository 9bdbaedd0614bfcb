"""GAA's network and objective: what padding, the order of nodes and equal graphs leave as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from core.errors import UserError
from graphs.gaa import method, networks
from graphs.gaa.method import Objective
from graphs.gaa.networks import GAA
from graphs.gaa.training import Progress
from tests.graphs.gaa import small

HYPER = {"alpha": 0.5, "beta": 1.0, "tau": 0.1, "dropout": 0.0, "lr": 0.01, "weight_decay": 1e-3}
HALF = Progress(jnp.int32(5), jnp.float32(10))
NETWORK = GAA(small.CLASSES, hidden=4, out=4)


@pytest.fixture(scope="module")
def domains():
    return small.pair()


@pytest.fixture(scope="module")
def params(domains):
    return NETWORK.clone(refined=True).init(jax.random.key(1), *domains)


TERMS = Objective()


def value(params, source, target, terms=TERMS, network=NETWORK):
    network = network.clone(refined=terms.cross_view == "adversarial")
    labelled = jnp.ones(source.y.shape[0], bool)
    return method.objective(params, source, target, labelled, HYPER, None, HALF, network=network, terms=terms)


def padded(domain, rows):
    """The domain with further empty nodes."""
    from graphs.gaa import sparse

    def taller(channel):
        p = sparse.pad(sparse.pad(channel.p, rows=rows).T, rows=rows).T
        px = None if channel.px is None else sparse.pad(channel.px, rows=rows)
        return networks.Channel(p, px)

    spare = rows - domain.y.shape[0]
    return domain.replace(
        x=sparse.pad(domain.x, rows=rows),
        channels={name: taller(channel) for name, channel in domain.channels.items()},
        y=jnp.pad(domain.y, (0, spare), constant_values=-1),
        mask=jnp.pad(domain.mask, (0, spare)),
    )


@pytest.mark.parametrize("cross_view", ["moment", "adversarial", "xcorr"])
def test_padding_changes_neither_losses_nor_predictions(domains, params, cross_view):
    terms = Objective(cross_view)
    total, parts = value(params, *domains, terms)
    assert set(parts) == {"loss", "source_loss", "cross_view_loss", "domain_loss", "target_loss"}
    for rows in (14, 20):
        again, more = value(params, *(padded(domain, rows) for domain in domains), terms)
        np.testing.assert_allclose(again, total, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), more, parts)
    logits = NETWORK.apply(params, domains[1], method="embed")["logits"]
    taller = NETWORK.apply(params, padded(domains[1], 20), method="embed")["logits"]
    np.testing.assert_allclose(taller[: len(logits)], logits, rtol=1e-5, atol=1e-6)


def test_the_order_of_nodes_permutes_embeddings_and_leaves_losses(domains, params):
    source, target = small.raw(0, 12), small.raw(1, 9)
    orders = [np.random.default_rng(2).permutation(n) for n in (12, 9)]
    moved = small.pair(*map(small.permuted, (source, target), orders))
    expected, parts = value(params, *domains)
    found, others = value(params, *moved)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), others, parts)
    for domain, other, order in zip(domains, moved, orders):
        z, zp = (NETWORK.apply(params, d, method="embed")["h"] for d in (domain, other))
        np.testing.assert_allclose(zp[: len(order)], z[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cross_view", ["moment", "xcorr"])
def test_equal_graphs_have_no_cross_view_distance(domains, params, cross_view):
    source = domains[0]
    _, parts = value(params, source, source, Objective(cross_view))
    assert abs(parts["cross_view_loss"]) < 1e-10


def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        graphs = small.pair(small.raw(0, 12), small.raw(1, 12))
        double = [
            jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, d)
            for d in graphs
        ]
        start = NETWORK.init(jax.random.key(1), *double)
        start = jax.tree.map(lambda leaf: leaf.astype(jnp.float64) + 0.01, start)

        @jax.jit
        def loss(params):
            # The reversed gradient is no gradient of the value: leave the adversary's term out.
            return value(params, *double, Objective(domain=False))[0]

        check_grads(loss, (start,), order=1, modes=["rev"], rtol=1e-5, atol=1e-7, eps=1e-6)


def test_without_edges_a_gcn_is_an_mlp_of_each_row(domains):
    from graphs.gaa import sparse

    x = jax.random.normal(jax.random.key(0), (4, 5))
    channel = networks.Channel(sparse.from_scipy(np.eye(4)))
    gcn = networks.GCN(3, 2)
    params = gcn.init(jax.random.key(1), channel, x)
    first, second = (params["params"][f"conv_{i}"] for i in (0, 1))
    expected = jax.nn.relu(x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(gcn.apply(params, channel, x), expected, rtol=1e-6, atol=1e-6)


def test_a_stored_product_with_the_attributes_gives_the_same(domains, params):
    bare = [
        d.replace(channels={name: networks.Channel(c.p) for name, c in d.channels.items()}) for d in domains
    ]
    stored = [
        d.replace(channels={name: networks.Channel(c.p, product(c, d)) for name, c in d.channels.items()})
        for d in domains
    ]
    np.testing.assert_allclose(value(params, *stored)[0], value(params, *bare)[0], rtol=1e-5)


def product(channel, domain):
    from graphs.gaa import sparse

    eye = functools.partial(jnp.eye, dtype=jnp.float32)
    dense = sparse.matmul(channel.p, sparse.matmul(domain.x, eye(domain.x.shape[1])))
    return sparse.from_scipy(np.asarray(dense))


@pytest.mark.parametrize("fusion", ["attention", "linear", "mean", "concat", "z", "zf"])
def test_every_fusion(domains, fusion):
    network = GAA(small.CLASSES, hidden=4, out=4, fusion=fusion, share_channels=fusion == "mean")
    terms = Objective("none" if fusion in ("z", "zf") else "moment", target="pseudo")
    made = method.make(network, terms)
    state = made.init(jax.random.key(0), *domains)
    state, metrics = made.step(
        state, *domains, jnp.ones(12, bool), HYPER | {"dropout": 0.3}, jax.random.key(1), HALF
    )
    assert np.isfinite(metrics["loss"])
    assert made.predict(state, domains[1]).shape == (12, small.CLASSES)
    encoders = {name for name in state.params["params"] if name.endswith("encoder")}
    both = {"encoder", "feature_encoder"}
    assert encoders == {"z": {"encoder"}, "zf": {"feature_encoder"}, "mean": {"encoder"}}.get(fusion, both)


def test_labels_that_are_held_out_do_not_count(domains, params):
    source, target = domains
    labelled = jnp.arange(12) < 6
    changed = source.replace(y=jnp.where(labelled, source.y, (source.y + 1) % 3))
    values = [
        method.objective(params, s, target, labelled, HYPER, None, HALF, network=NETWORK, terms=Objective())[
            0
        ]
        for s in (source, changed)
    ]
    assert values[0] == values[1]


def test_the_weight_of_the_target_term_and_the_reversal_grow(domains, params):
    labelled = jnp.ones(12, bool)
    parts = {}
    for step in (0, 5):
        progress = Progress(jnp.int32(step), jnp.float32(10))
        total, found = method.objective(
            params, *domains, labelled, HYPER, None, progress, network=NETWORK, terms=Objective()
        )
        rest = found["source_loss"] + 0.5 * found["cross_view_loss"] + found["domain_loss"]
        parts[step] = float(total - rest), float(0.1 * found["target_loss"])
    assert abs(parts[0][0]) < 1e-5
    np.testing.assert_allclose(parts[5][0], 0.5 * parts[5][1], rtol=1e-3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Objective("moments"), "cross_view='moments'; did you mean 'moment'"),
        (lambda: Objective(target="pseudolabel"), "target='pseudolabel'.*one of entropy, pseudo, none"),
        (
            lambda: method.make(GAA(3, fusion="z"), Objective()),
            "compares two channels, but fusion='z' has one",
        ),
    ],
)
def test_what_can_not_be_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
