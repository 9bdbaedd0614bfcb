"""What a run is about: tasks, domains of equal sizes, held-out labels, and what the config may not say."""

import jraph
import numpy as np
import pytest

from core import config as configs
from core.errors import UserError
from graphs.gaa import domains, experiment, graph, problem, sparse
from tests.graphs.gaa import small


def load(variant="small", **changes):
    config = configs.load(f"configs/gaa.py:{variant}")[0]
    configs.override(config, [(path.replace("__", "."), str(value)) for path, value in changes.items()])
    return config


@pytest.mark.parametrize("variant", ["smoke", "small", "full", "baselines", "citation", "own"])
def test_every_variant_is_valid(variant):
    experiment.validate(load(variant))


REFUSED = [
    ({"families__airport__tasks": "usa>brasil"}, "airport has no graph 'brasil'; did you mean 'brazil'"),
    ({"families__airport__tasks": "usa"}, "'usa': a task is \"source>target\""),
    ({"families__airport__tasks": "usa>usa"}, 'a task is "source>target", two graphs'),
    ({"deploy": "gaaa"}, "config.deploy='gaaa'; did you mean 'gaa'"),
    ({"rows__gaa__kind": "ga"}, "config.rows.gaa.kind='ga'; did you mean 'gaa'"),
    ({"rows__gaa__steps": 15}, "steps=15 is not a multiple of config.score_every=10"),
    ({"rows__gaa__cross_view": "momen"}, "config.rows.gaa: cross_view='momen'; did you mean 'moment'"),
    ({"knn__k": 0}, "config.knn.k must be a whole number, 1 or more, not 0"),
    ({"rows__gaa__dropout": 1.5}, "dropout must be in 0..1, not 1.5"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_can_not_work_is_refused_by_name(changes, message):
    with pytest.raises(UserError) as caught:
        experiment.validate(load(**changes))
    assert message in str(caught.value)


def test_domains_of_a_family_have_equal_sizes_and_know_their_nodes():
    first, second = small.pair()
    shapes = lambda domain: [leaf.shape for leaf in jax_leaves(domain)]  # noqa: E731
    assert shapes(first) == shapes(second)
    assert first.mask.sum() == 12 and second.mask.sum() == 9 and (second.y[9:] == -1).all()


def jax_leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def test_a_domain_of_graphs_tuples_is_that_of_the_loader():
    raw = small.raw(0, 12)
    (expected,) = small.pair(raw, names=("topology",))
    made = domains.from_graphs(graph.make(raw.edges, raw.x, raw.y))
    assert isinstance(graph.make(raw.edges, raw.x), jraph.GraphsTuple)
    eye = np.eye(12, dtype=np.float32)
    for a, b in ((made, expected),):
        p = [sparse.matmul(d.channels["topology"].p, eye) for d in (a, b)]
        np.testing.assert_allclose(*p, rtol=1e-6)


def test_held_out_nodes_are_a_share_of_every_class():
    y = np.repeat([0, 1, 2, 3], [10, 5, 1, 0 + 4])
    chosen = problem.held_out(y, 0.2, seed=3)
    assert np.bincount(y[chosen], minlength=4).tolist() == [2, 1, 0, 1]
    assert (chosen == problem.held_out(y, 0.2, seed=3)).all()
    assert (chosen != problem.held_out(y, 0.2, seed=4)).any()
    assert not problem.held_out(y, 1.0, seed=0).all()


def test_pairs_that_share_no_classifier():
    a, b = small.raw(0, 12), small.raw(1, 9)
    with pytest.raises(UserError, match="source g0 has 5 attributes, target g1 4; GAA needs one"):
        domains.check_pair(a, b._replace(x=b.x[:, :4]), classes=3)
    with pytest.raises(UserError, match=r"node \d+ of g0 has label 2, outside 0\.\.1"):
        domains.check_pair(a, b, classes=2)
    with pytest.raises(UserError, match="graph g1 has no nodes"):
        domains.check_pair(a, b._replace(x=b.x[:0], y=b.y[:0]), classes=3)
    with pytest.warns(UserWarning, match="no node of source g0 has class 3: it can not be learned"):
        domains.check_pair(a, b, classes=4)
