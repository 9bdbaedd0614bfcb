"""Simulation-Guided Fine-Tuning (SGFT): adapt a simulated policy to the real robot with few real samples.

P. Yin, T. Westenbroek, S. Bagaria, K. Huang, C.-A. Cheng, A. Kolobov, A. Gupta, "Rapidly Adapting Policies to
the Real World via Simulation-Guided Fine-Tuning", ICLR 2025, arXiv:2502.02705.

A value function learned in simulation, V_sim, still says which states are on the way to the goal when the
simulator's dynamics are wrong. Fine-tuning therefore maximises the reward r + gamma V_sim(s') - V_sim(s) over
a window of H steps and counts nothing after it: model-free (SGFT-SAC), or by short plans in a learned model
that end in V_sim (SGFT-MB).
"""

from robotics.sgft.finetune import fit
from robotics.sgft.planner import plan, score_actions
from robotics.sgft.shaping import hstep_return, improvability, shaped_reward
from robotics.sgft.source import Networks, Source, policy_action, sim_value
from robotics.sgft.tabular import sgft_vi, value_iteration

__all__ = [
    "Networks",
    "Source",
    "fit",
    "hstep_return",
    "improvability",
    "plan",
    "policy_action",
    "score_actions",
    "sgft_vi",
    "shaped_reward",
    "sim_value",
    "value_iteration",
]
