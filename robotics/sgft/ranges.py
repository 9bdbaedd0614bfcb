"""What the numbers of a config, or of `finetune.fit`'s settings, may be."""

from __future__ import annotations

from core.ranges import ANY, COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, SHARE, Range

__all__ = ["CONFIG", "SETTINGS"]

# By a key's own name: an agent's settings and those that model-free agents share.
SETTINGS: dict[str, Range] = {
    "candidates": COUNT,
    "members": COUNT,
    "hidden": COUNT,
    "adapter": COUNT,
    "pretrain_updates": NATURAL,
    "pretrain_batch": COUNT,
    "updates": COUNT,
    "real_batch": COUNT,
    "sim_batch": NATURAL,
    "exploration": NOT_NEGATIVE,
    "lr": POSITIVE,
    "actor_lr": POSITIVE,
    "prior_share": SHARE,
    "prefit_updates": NATURAL,
    "warmup_steps": NATURAL,
    "critics": COUNT,
    "features": COUNT,
    "batch": COUNT,
    "utd": COUNT,
    "policy_delay": COUNT,
    "tau": SHARE,
    "log_std": ANY,
    "alpha": POSITIVE,
    "alpha_lr": NOT_NEGATIVE,
}

# By patterns of whole keys; gamma, the mesh and the agents' windows have checks of their own.
CONFIG: dict[str, Range] = {
    **{f"agents.*.{name}": wanted for name, wanted in SETTINGS.items()},
    **{f"sac.{name}": wanted for name, wanted in SETTINGS.items()},
    "agents.*.seeds": COUNT,
    "agents.*.steps": COUNT,
    "agents.*.horizon": ANY,
    "seed": NATURAL,
    "num_seeds": COUNT,
    "check.devices": COUNT,
    "checkpoint_every": COUNT,
    "block": COUNT,
    "evaluation.*": COUNT,
    "threshold": SHARE,
    "gamma": SHARE,
    "mesh.*": ANY,
    "pretrain.log_std_init": ANY,
    "pretrain.*lr": POSITIVE,
    "pretrain.clip": POSITIVE,
    "pretrain.max_grad_norm": POSITIVE,
    "pretrain.*_share": SHARE,
    "pretrain.lam": SHARE,
    "pretrain.improve.exploring": SHARE,
    "pretrain.improve.tau": SHARE,
    "pretrain.improve.sweeps": NATURAL,
    "pretrain.refit.disturbed_steps": NATURAL,
    "pretrain.refit.largest_offset": NOT_NEGATIVE,
    "pretrain.value_coef": NOT_NEGATIVE,
    "pretrain.std_bonus": NOT_NEGATIVE,
    "pretrain.sim_action_noise": NOT_NEGATIVE,
    "pretrain.*": COUNT,
}
