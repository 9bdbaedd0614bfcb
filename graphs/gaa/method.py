"""GAA's objective over its network, and the models that are GAA with parts switched off."""

from __future__ import annotations

import dataclasses
import functools

import jax

from core.errors import UserError, nearest
from graphs.gaa import losses
from graphs.gaa.networks import GAA
from graphs.gaa.training import Method, by_gradient

__all__ = ["CROSS_VIEWS", "TARGET_LOSSES", "Objective", "make", "objective"]

Array = jax.Array
CROSS_VIEWS = ("moment", "adversarial", "xcorr", "none")
TARGET_LOSSES = ("entropy", "pseudo", "none")


@dataclasses.dataclass(frozen=True)
class Objective:
    """Which terms there are, static under jit: L = L_S + alpha L_A + beta L_D + tau L_T.

    Attributes:
      cross_view: form of L_A: "moment", "adversarial" (on refined rows), "xcorr" or "none".
      domain: whether there is an L_D.
      target: L_T: "entropy", "pseudo" or "none"; its weight grows linearly from 0 with `ramp`.
    """

    cross_view: str = "moment"
    domain: bool = True
    target: str = "entropy"
    ramp: bool = True

    def __post_init__(self):
        for name, known in (("cross_view", CROSS_VIEWS), ("target", TARGET_LOSSES)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"{name}={value!r}{nearest(value, known)}; one of {', '.join(known)}")


def objective(params, source, target, labelled, hyper, key, progress, *, network, terms):
    """L `[]` and its parts; `hyper` has alpha, beta, tau, dropout `[]`.

    Args:
      params: of `network`, a GAA. source, target: Domains. labelled: `[N_s]` bool. key: for dropout, or None.
      progress: Progress: the gradient reversal grows with it, and L_T's weight.
      terms: an Objective.
    """
    share = progress.share
    s, t = network.apply(params, source, target, losses.reversal_factor(share), hyper["dropout"], key)
    parts = {"source_loss": losses.cross_entropy(s["logits"], source.y, source.mask & labelled)}
    total = parts["source_loss"]
    if terms.cross_view != "none":
        parts["cross_view_loss"] = _cross_view(s, t, source.mask, target.mask, terms.cross_view)
        total += hyper["alpha"] * parts["cross_view_loss"]
    if terms.domain:
        parts["domain_loss"] = losses.balanced_domain_loss(s["domain"], t["domain"], source.mask, target.mask)
        total += hyper["beta"] * parts["domain_loss"]
    if terms.target != "none":
        form = losses.entropy_loss if terms.target == "entropy" else losses.pseudo_label_loss
        parts["target_loss"] = form(t["logits"], target.mask)
        total += hyper["tau"] * (share if terms.ramp else 1.0) * parts["target_loss"]
    return total, parts | {"loss": total}


def _cross_view(s, t, mask_s, mask_t, form):
    if form == "adversarial":
        return losses.balanced_domain_loss(s["refined_domain"], t["refined_domain"], mask_s, mask_t)
    view, distance = {
        "moment": (losses.cross_view_moment, losses.moment_distance),
        "xcorr": (losses.cross_view_xcorr, losses.xcorr_distance),
    }[form]
    return distance(view(s["z"], s["zf"], mask_s), view(t["z"], t["zf"], mask_t))


@functools.lru_cache(maxsize=64)
def make(network: GAA, terms: Objective) -> Method:
    """GAA, or what its parts make: a GCN (fusion "z", no terms), a kNN-GCN ("zf"), a DANN-GCN ("z", domain
    and target terms), two channels without alignment (no terms).

    Raises:
      UserError: an L_A for a network without both channels.
    """
    if terms.cross_view != "none" and network.fusion in ("z", "zf"):
        raise UserError(
            f"cross_view={terms.cross_view!r} compares two channels, but fusion={network.fusion!r} has one"
        )
    network = network.clone(refined=terms.cross_view == "adversarial")

    def init(key, source, target):
        return network.init(key, source, target)

    def predict(params, domain):
        return network.apply(params, domain, method="embed")["logits"]

    return by_gradient(init, functools.partial(objective, network=network, terms=terms), predict)
