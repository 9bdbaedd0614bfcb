"""The terms of the objective: golden values, the identities of the specification, gradients, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from graphs.gaa import losses
from graphs.gaa.networks import ChannelAttention, LinearAttention


def everyone(x):
    return jnp.ones(x.shape[0], bool)


def test_cross_views_and_their_distances(golden, close):
    d = golden("gaa_pieces")
    for s in "st":
        z, zf = d[f"z_{s}"], d[f"zf_{s}"]
        close(losses.unit(z) @ losses.unit(zf).T, d[f"S_{s}"])
        close(losses.cross_view_refine(z, zf, everyone(z)), d[f"R_{s}"])
        close(losses.cross_view_xcorr(z, zf, everyone(z)), d[f"K_{s}"])
        close(losses.cross_view_moment(z, zf, everyone(z)), d[f"M_{s}"])
    close(losses.moment_distance(d["M_s"], d["M_t"]), d["L_A_moment"])
    close(losses.xcorr_distance(d["K_s"], d["K_t"]), d["L_A_xcorr"])


def test_the_other_terms_and_the_totals(golden, close):
    d = golden("gaa_pieces")
    masks = [everyone(d["z_s"]), everyone(d["z_t"])]
    domain = [[d[f"{x}_{s}"] @ d["disc_w"] + d["disc_b"] for s in "st"] for x in "RH"]
    logits = [d[f"H_{s}"] @ d["cls_w"] + d["cls_b"] for s in "st"]
    found = {
        "L_A_adv": losses.balanced_domain_loss(*domain[0], *masks),
        "L_D": losses.balanced_domain_loss(*domain[1], *masks),
        "L_S": losses.cross_entropy(logits[0], d["y_s"], masks[0]),
        "L_T_ent": losses.entropy_loss(logits[1], masks[1]),
        "L_T_pl": losses.pseudo_label_loss(logits[1], masks[1]),
    }
    for name, value in found.items():
        close(value, d[name])
    rest = found["L_S"] + d["beta"] * found["L_D"] + d["tau"] * found["L_T_ent"]
    close(rest + d["alpha"] * d["L_A_moment"], d["total_moment"])
    close(rest + d["alpha"] * d["L_A_xcorr"], d["total_xcorr"])
    close(rest + d["alpha"] * found["L_A_adv"], d["total_adv"])


def test_attention_over_channels(golden, close):
    d = golden("gaa_pieces")
    query = {"hidden": {"kernel": d["att_W"], "bias": d["att_b"]}, "query": {"kernel": d["att_q"][:, None]}}
    for s in "st":
        z, zf = d[f"z_{s}"], d[f"zf_{s}"]
        weights = ChannelAttention(5).apply({"params": query}, z, zf)
        close(weights, d[f"att_{s}"])
        close(weights[:, :1] * z + weights[:, 1:] * zf, d[f"H_{s}"])


def test_linear_attention_and_its_gradient(golden, close):
    d = golden("attention_grl")
    variables = {"params": {"score": {"kernel": d["w"].T, "bias": d["b"]}}}

    def fused(z1):
        weights = LinearAttention().apply(variables, z1, d["z2"])
        return weights[:, :1] * z1 + weights[:, 1:] * d["z2"]

    out, pull = jax.vjp(fused, d["z1"])
    close(out, d["out"])
    close(pull(d["gout"])[0], d["grad_z1"])


def test_gradient_reversal(golden, close):
    d = golden("attention_grl")

    def loss(x):
        return jnp.sum(losses.grad_reverse(x, d["grl_alpha"]) ** 2 * d["grl_w"])

    close(jax.grad(loss)(d["grl_x"]), d["grl_grad"])


@pytest.mark.parametrize("factor", [0.0, 1.0, 0.3])
def test_reversal_turns_the_features_gradient_and_leaves_the_discriminator(factor):
    x, w = jnp.array([[1.0, -2.0], [0.5, 3.0]]), jnp.array([0.3, -0.7])

    def loss(x, w, reverse):
        seen = losses.grad_reverse(x, factor) if reverse else x
        return losses.balanced_domain_loss(seen @ w, seen[:1] @ w, everyone(x), jnp.ones(1, bool))

    plain, turned = (jax.grad(loss, (0, 1))(x, w, reverse) for reverse in (False, True))
    np.testing.assert_allclose(turned[0], -factor * plain[0], rtol=1e-6)
    np.testing.assert_allclose(turned[1], plain[1], rtol=1e-6)


def test_mmd_and_its_gradients(golden, close):
    d = golden("mmd")
    value, gradients = jax.value_and_grad(losses.mmd_multi_rbf, (0, 1))(d["s"], d["t"])
    close(value, d["mmd"], 1e-4)
    close(gradients[0], d["grad_s"], 1e-4)
    close(gradients[1], d["grad_t"], 1e-4)
    longer = [jnp.concatenate([d[name], jnp.full((2, 5), 7.0, d[name].dtype)]) for name in "st"]
    masks = [jnp.arange(len(x)) < len(x) - 2 for x in longer]
    close(losses.mmd_multi_rbf(*longer, *masks), d["mmd"], 1e-4)


def test_the_moment_distance_is_the_mmd_of_pairs_under_the_product_kernel():
    keys = jax.random.split(jax.random.key(0), 4)
    (zs, fs), (zt, ft) = (
        [jax.random.normal(k, (n, 5)) for k in keys[i : i + 2]] for i, n in ((0, 7), (2, 9))
    )

    def kernel(a, b):
        return jnp.mean((losses.unit(a[0]) @ losses.unit(b[0]).T) * (losses.unit(a[1]) @ losses.unit(b[1]).T))

    s, t = (zs, fs), (zt, ft)
    moments = [losses.cross_view_moment(z, f, everyone(z)) for z, f in (s, t)]
    expected = kernel(s, s) + kernel(t, t) - 2 * kernel(s, t)
    np.testing.assert_allclose(losses.moment_distance(*moments) / 5, expected, rtol=1e-5, atol=1e-7)
    doubled = losses.cross_view_moment(*(jnp.concatenate([x, x]) for x in s), jnp.ones(14, bool))
    np.testing.assert_allclose(losses.moment_distance(moments[0], doubled), 0, atol=1e-10)


def test_refined_rows_equal_the_product_of_all_pairs():
    z, zf = jax.random.normal(jax.random.key(1), (2, 6, 4))
    whole = (losses.unit(z) @ losses.unit(zf).T) @ zf / 6
    np.testing.assert_allclose(losses.cross_view_refine(z, zf, everyone(z)), whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("n", "m"), [(3, 9), (1, 1)])
def test_a_blind_discriminator_costs_log_2(n, m):
    value = losses.balanced_domain_loss(jnp.zeros(n), jnp.zeros(m), jnp.ones(n, bool), jnp.ones(m, bool))
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)


def test_entropy_of_the_undecided_and_of_the_certain():
    uniform, certain = jnp.zeros((3, 4)), 1e4 * jnp.eye(4)
    np.testing.assert_allclose(losses.entropy_loss(uniform, everyone(uniform)), np.log(4), rtol=1e-6)
    value, gradient = jax.value_and_grad(losses.entropy_loss)(certain, everyone(certain))
    assert abs(value) < 1e-6 and np.isfinite(gradient).all()


def test_rows_of_zeros_have_finite_gradients():
    zeros = jnp.zeros((3, 4))
    for form in (losses.cross_view_moment, losses.cross_view_refine, losses.cross_view_xcorr):
        gradient = jax.grad(lambda z, form=form: jnp.sum(form(z, zeros + 1, everyone(z))))(zeros)
        assert np.isfinite(gradient).all()


def test_padding_changes_nothing():
    z, zf = jax.random.normal(jax.random.key(2), (2, 6, 4))
    y, mask = jnp.array([0, 3, 1, 2, 0, 1]), everyone(z)
    more = lambda x: jnp.concatenate([x, jnp.full((3, *x.shape[1:]), 9).astype(x.dtype)])  # noqa: E731
    longer = jnp.arange(9) < 6
    for form in (losses.cross_view_moment, losses.cross_view_xcorr):
        np.testing.assert_allclose(form(more(z), more(zf), longer), form(z, zf, mask), rtol=1e-5, atol=1e-6)
    refined = losses.cross_view_refine(more(z), more(zf), longer)[:6]
    np.testing.assert_allclose(refined, losses.cross_view_refine(z, zf, mask), rtol=1e-5, atol=1e-6)
    for loss in (losses.entropy_loss, losses.pseudo_label_loss):
        np.testing.assert_allclose(loss(more(z), longer), loss(z, mask), rtol=1e-6)
    unlabelled = jnp.concatenate([y, jnp.full(3, -1)])
    np.testing.assert_allclose(
        losses.cross_entropy(more(z), unlabelled, longer), losses.cross_entropy(z, y, mask), rtol=1e-6
    )


def test_gradients_by_finite_differences():
    with jax.enable_x64(True):
        z, zf = jax.random.normal(jax.random.key(3), (2, 6, 4), jnp.float64)
        mask = jnp.arange(6) < 5
        for form in (losses.cross_view_moment, losses.cross_view_refine, losses.cross_view_xcorr):
            check_grads(lambda a, b, form=form: form(a, b, mask), (z, zf), order=1, modes=["rev"], rtol=1e-6)
        check_grads(lambda a: losses.entropy_loss(a, mask), (z,), order=1, modes=["rev"], rtol=1e-6)


def test_schedule(golden, close):
    progress = jnp.asarray([0, 0.1, 0.25, 0.5, 1.0])
    expected = [0.0, 0.4621171572600098, 0.8482836399575131, 0.9866142981514305, 0.9999092042625952]
    close(losses.reversal_factor(progress), expected, 1e-6)
