"""UDAGCN's whole loss and every gradient of it, against the golden values (no PPMI view, no dropout)."""

import jax
import jax.numpy as jnp

from graphs.gaa import graph, sparse
from graphs.gaa.baselines import udagcn
from graphs.gaa.networks import Channel, Domain
from graphs.gaa.training import Progress


def domain(edges, x, y=None):
    n = x.shape[0]
    s, r, w = graph.gcn_norm(*edges, n, jnp.ones(edges.shape[1], x.dtype), degree_at="sender")
    p = sparse.from_coo(r, s, w, shape=(n, n))
    y = jnp.full(n, -1) if y is None else y
    return Domain(x, {"topology": Channel(p)}, y, jnp.ones(n, bool))


def as_params(d, prefix):
    dense = lambda name: {"kernel": d[f"{prefix}.{name}.weight"].T, "bias": d[f"{prefix}.{name}.bias"]}  # noqa: E731
    encoder = {}
    for i in (0, 1):
        name = f"{prefix}.encoder.conv_layers.{i}"
        encoder[f"conv_{i}"] = {"kernel": d[f"{name}.weight"], "bias": d[f"{name}.bias"]}
    discriminator = {"hidden": dense("domain_model.0"), "logit": dense("domain_model.3")}
    return {"encoder": encoder, "classifier": dense("cls_model.0"), "discriminator": discriminator}


def test_loss_and_gradients(golden, close):
    d = golden("udagcn_loss")
    source, target = domain(d["edge_s"], d["x_s"], d["y_s"]), domain(d["edge_t"], d["x_t"])
    network = udagcn.UDAGCN(classes=3, hidden=5, domain_width=4, ppmi=False)
    progress = Progress(d["epoch"], d["epochs"].astype(d["x_s"].dtype))
    close(jnp.minimum((progress.step + 1) / progress.steps, 0.05), d["alpha"])

    def loss(params):
        everyone = jnp.ones(10, bool)
        arguments = (source, target, everyone, {"dropout": 0.0}, None, progress)
        return udagcn.loss({"params": params}, *arguments, network=network)

    (total, parts), gradient = jax.value_and_grad(loss, has_aux=True)(as_params(d, "param"))
    close(total, d["total"], 1e-4)
    for ours, theirs in (("source_loss", "cls"), ("domain_loss", "dom"), ("target_loss", "ent")):
        close(parts[ours], d[theirs], 1e-4)
    jax.tree.map(lambda a, b: close(a, b, 1e-4), gradient, as_params(d, "grad"))
    for which, name in ((source, "h_s"), (target, "h_t")):
        close(network.apply({"params": as_params(d, "param")}, which, method="embed"), d[name], 1e-4)
