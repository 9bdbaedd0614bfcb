"""Networks that more than one method uses."""

from core.nn.mlp import MLP, Ensemble, scaled_normal

__all__ = ["MLP", "Ensemble", "scaled_normal"]
