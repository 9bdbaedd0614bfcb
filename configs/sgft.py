"""Simulation-Guided Fine-Tuning (Yin et al., ICLR 2025): adapt a simulated policy with few real samples."""

from ml_collections import ConfigDict

VARIANTS = ("smoke", "small", "full", "h_sweep", "baselines")


# All model-free methods are one agent; what tells them apart stands in these few keys.
def model_free(**changes):
    agent = ConfigDict()
    agent.kind = "model_free"
    agent.seeds = 5  # the first so many of config.num_seeds
    agent.steps = 2400  # real control steps per seed
    agent.horizon = 0  # H, the window of the shaped reward; 0 is the infinite horizon
    agent.shaping = False  # train on r + gamma V_sim(s') - V_sim(s) instead of r
    agent.start = "simulation"  # actor: pi_sim ("simulation") or random
    agent.prior_share = 0.0  # share of every batch that is simulated transitions
    agent.prefit_updates = 0  # of the critic on simulated transitions, before the first real step
    agent.warmup_steps = 200  # real steps before the actor moves
    agent.lr = 1e-3  # critic's Adam step size
    agent.actor_lr = 3e-4
    agent.update(changes)
    return agent


def model_based(**changes):
    agent = ConfigDict()
    agent.kind = "model_based"
    agent.seeds = 5
    agent.steps = 1600
    agent.horizon = 2  # H: model steps of a plan, all with the same action; V_sim closes it
    agent.use_value = True  # False plans on rewards alone
    agent.candidates = 128  # actions compared at every control step
    agent.members = 3  # of the dynamics ensemble
    agent.hidden = (128, 128)  # widths of a member
    agent.adapter = (32,)  # widths of the network that turns real actions into simulated ones; () has none
    agent.probabilistic = False  # predict a variance too, and train by likelihood
    agent.pretrain_updates = 10_000  # on simulated transitions, before the first real step
    agent.pretrain_batch = 256
    agent.updates = 150  # of the model after each block of real steps
    agent.real_batch = 128  # real transitions in a batch
    agent.sim_batch = 128  # simulated transitions in a batch: without them the model forgets contact
    agent.lr = 1e-3  # Adam's step size for the model
    agent.exploration = 0.3  # standard deviation of the noise on planned actions
    agent.update(changes)
    return agent


def get_config(variant="small"):
    config = ConfigDict()
    config.name = "sgft"
    config.method = "robotics.sgft"
    config.seed = 0  # seeds are seed, seed + 1, ...; each has its own simulation stage
    config.num_seeds = 5  # simulation stages; an agent's `seeds` may be fewer
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1}
    config.check = {"devices": 16, "compile": False}
    config.checkpoint_every = 10  # blocks of real steps

    config.task = "puck_push"  # of robotics.sgft.tasks
    config.gap = "paper"  # how far the real robot is from the simulator: none, mild, milder, paper, hard
    config.gamma = 0.97  # discount of the real task; V_sim must have been trained with it
    config.terminal_potential = "zero"  # V_sim(s') at true ends: zero or keep
    config.sim = {"backend": "auto"}  # auto, native (CPU threads) or mjx (accelerators)
    config.block = 40  # real steps between two rounds of learning: one episode of puck_push
    config.evaluation = ConfigDict()
    config.evaluation.every = 200  # real steps
    config.evaluation.episodes = 50  # per seed
    config.tabular = True  # also draw the figures of the exactly solvable worlds
    config.threshold = 0.5  # success rate that steps_to_threshold asks for

    pretrain = config.pretrain = ConfigDict()
    pretrain.actor_features = (64, 64)  # pi_sim and PPO's critic
    pretrain.value_features = (128, 128)  # V_sim, with layer norm
    pretrain.value_members = 2  # networks; V_sim is their mean
    pretrain.log_std_init = -0.7
    pretrain.num_envs = 256  # per seed
    pretrain.unroll = 40  # control steps of one iteration
    pretrain.iterations = 80
    pretrain.epochs = 4
    pretrain.minibatches = 8
    pretrain.lr = 1e-3
    pretrain.lam = 0.95  # lambda of GAE
    pretrain.clip = 0.2
    pretrain.value_coef = 0.5
    pretrain.std_bonus = 0.002  # reward for each unit of log std
    pretrain.max_grad_norm = 1.0
    pretrain.exploring_share = 0.1  # of episodes that start anywhere
    pretrain.checkpoint_every = 25  # iterations
    pretrain.sim_episodes = 200  # of D_sim
    pretrain.sim_action_noise = 0.5  # standard deviation, on pi_sim's action
    pretrain.sim_exploring_share = 0.0
    refit = pretrain.refit = ConfigDict()  # of V_sim to pi_sim's own returns
    refit.rounds = 1
    refit.num_envs = 2048  # rollouts per round and seed
    refit.exploring_share = 0.7  # of rollouts that start anywhere
    refit.disturbed_steps = 40  # at most, before the return counts
    refit.largest_offset = 1.2  # of the action, while disturbed
    refit.horizon = 60  # undisturbed steps; PPO's critic closes the return
    refit.keep = 16  # states of each rollout that V_sim is fitted to
    refit.epochs = 8
    refit.batch = 512
    refit.lr = 1e-3
    improve = pretrain.improve = ConfigDict()  # of V_sim, by planning on it in simulation and value iteration
    improve.sweeps = 2  # 0 leaves V_sim the value of pi_sim
    improve.num_envs = 256  # per seed
    improve.steps = 40  # of each environment and sweep
    improve.exploring_share = 0.5  # of environments that start anywhere
    improve.exploring = 0.25  # how often a random action begins; it goes on with probability 1/2
    improve.candidates = 16  # actions tried in each state
    improve.horizon = 3  # steps that each is held
    improve.updates = 2000  # of V_sim per sweep
    improve.batch = 128
    improve.lr = 1e-3
    improve.tau = 0.01  # of the slow average that values what is reached

    sac = config.sac = ConfigDict()  # what all model-free agents share
    sac.critics = 2
    sac.features = (128, 128)  # of a critic
    sac.batch = 128
    sac.utd = 4  # critic updates per real step
    sac.policy_delay = 2  # critic updates per actor update
    sac.tau = 0.01
    sac.log_std = -1.2  # of the exploring actor
    sac.alpha = 0.002  # temperature
    sac.alpha_lr = 0.0  # 0 keeps it
    sac.backup_entropy = False

    agents = config.agents = ConfigDict()
    agents.sgft_mb = model_based()
    agents.sac_finetune = model_free(prefit_updates=10_000)
    agents.sgft_sac = model_free(horizon=10, shaping=True, prefit_updates=10_000)
    agents.sgft_mb_no_value = model_based(use_value=False, seeds=2)
    agents.sac_scratch = model_free(start="random", warmup_steps=0, seeds=2)
    agents.pbrs_sac = model_free(shaping=True, prefit_updates=10_000, seeds=2)
    agents.rlpd = model_free(start="random", prior_share=0.5, warmup_steps=0, seeds=2)
    config.deploy = "sgft_mb"  # the agent that load and export give

    # Nothing of the paper's per-task numbers could be read; its claim is an order of magnitude in samples.
    config.expected = {"claim": "up to ten times fewer real samples than normal fine-tuning"}

    if variant == "smoke":
        _smoke(config)
    if variant == "full":
        _full(config)
    if variant == "h_sweep":
        config.agents = ConfigDict()
        for horizon in (1, 2, 3, 5, 10):
            if horizon < 10:  # a plan holds one action, too coarse for a whole second
                config.agents[f"sgft_mb_h{horizon}"] = model_based(horizon=horizon)
            config.agents[f"sgft_sac_h{horizon}"] = model_free(
                horizon=horizon, shaping=True, prefit_updates=10_000
            )
        config.agents.sgft_mb_no_value_h3 = model_based(horizon=3, use_value=False)
        config.agents.sac_finetune = model_free(prefit_updates=10_000)
        config.deploy = "sgft_mb_h3"
    if variant == "baselines":
        for agent in config.agents.values():
            agent.seeds = config.num_seeds
    return config


def _smoke(config):
    """The two methods of the paper once, in under a minute: nothing is learned."""
    config.num_seeds = 1
    config.tabular = False
    for name in ("sgft_mb_no_value", "sac_finetune", "pbrs_sac", "sac_scratch", "rlpd"):
        del config.agents[name]
    config.update({"block": 20, "checkpoint_every": 1})
    config.evaluation.update({"every": 20, "episodes": 4})
    config.pretrain.update({"num_envs": 16, "iterations": 2, "sim_episodes": 4, "checkpoint_every": 1})
    config.pretrain.update({"actor_features": (16,), "value_features": (16,)})
    refit = {"epochs": 1, "batch": 64, "num_envs": 16, "disturbed_steps": 4, "horizon": 18}
    config.pretrain.refit.update(refit)
    improve = {"sweeps": 1, "updates": 5, "steps": 2, "num_envs": 16, "candidates": 4, "batch": 16}
    config.pretrain.improve.update(improve)
    config.sac.update({"features": (16,), "batch": 16, "utd": 2})
    for agent in config.agents.values():
        agent.update({"seeds": 1, "steps": 40})
        if agent.kind == "model_based":
            agent.update({"hidden": (16,), "pretrain_updates": 20, "updates": 5, "candidates": 16})
        elif agent.prefit_updates:
            agent.prefit_updates = 20


def _full(config):
    """The setting of an accelerator: MJX, 4096 environments, 10 critics of 256x256, 20 updates a step."""
    config.sim.backend = "mjx"
    config.pretrain.num_envs = 4096
    config.pretrain.iterations = 200
    config.pretrain.minibatches = 32
    config.pretrain.refit.num_envs = 16384
    config.pretrain.improve.num_envs = 4096
    config.sac.update({"critics": 10, "features": (256, 256), "batch": 256, "utd": 20})
    for agent in config.agents.values():
        agent.seeds = config.num_seeds
