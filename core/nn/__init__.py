"""Networks that more than one method uses."""

from core.nn.mlp import MLP, Ensemble, scaled_normal, split_members, stack_members

__all__ = ["MLP", "Ensemble", "scaled_normal", "split_members", "stack_members"]
