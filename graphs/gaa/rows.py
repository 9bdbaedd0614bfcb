"""From a row of the config to a method: its functions, its scalars, the channels that it needs."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from graphs.gaa import method as gaa
from graphs.gaa.baselines import a2gnn, adagcn, grade, strurw, udagcn
from graphs.gaa.networks import GAA
from graphs.gaa.training import Method

__all__ = ["KINDS", "Row", "make"]

KINDS = ("gaa", "udagcn", "grade", "a2gnn", "adagcn", "strurw")


class Row(NamedTuple):
    """One line of the comparison; `hyper` holds scalars `[]` by name."""

    method: Method
    hyper: dict[str, jax.Array]
    channels: tuple[str, ...]


def make(row: ConfigDict, *, classes: int, hidden: int) -> Row:
    """The Row that an entry of `config.rows` describes.

    Raises:
      UserError: a choice of the row that there is not.
    """
    method, names, channels = _make(row, classes, hidden)
    scalars = ("lr", "weight_decay", "dropout", *names)
    return Row(method, {name: jnp.float32(row[name]) for name in scalars}, channels)


def _make(row, classes, hidden):
    if row.kind == "udagcn":
        return udagcn.make(udagcn.UDAGCN(classes, hidden)), (), ("topology", "ppmi")
    if row.kind == "grade":
        network = grade.GRADE(classes, hidden, row.layers, row.alignment)
        return grade.make(network), (), ("topology",)
    if row.kind == "a2gnn":
        return a2gnn.make(a2gnn.A2GNN(classes, hidden, row.hops, row.alignment)), ("weight",), ("topology",)
    if row.kind == "adagcn":
        return adagcn.make(adagcn.AdaGCN(classes, hidden), row.critic_steps), ("weight",), ("topology",)
    if row.kind == "strurw":
        network = strurw.StruRW(classes, hidden, row.mode)
        return strurw.make(network, row.start, row.every), ("share", "weight"), ("edges",)
    network = GAA(
        classes,
        hidden,
        hidden,
        fusion=row.fusion,
        share_channels=row.share_channels,
        disc_on=row.disc_on,
    )
    terms = gaa.Objective(row.cross_view, row.domain, row.target, row.ramp)
    channels = {"z": ("topology",), "zf": ("features",)}.get(row.fusion, ("topology", "features"))
    return gaa.make(network, terms), ("alpha", "beta", "tau"), channels
