"""Simulation-Guided Fine-Tuning (Yin et al., ICLR 2025): adapt a simulated policy with few real samples."""

from ml_collections import ConfigDict

VARIANTS = ("smoke", "small", "full", "h_sweep", "baselines")

# All model-free methods are one agent; what tells them apart stands in these few keys.
MODEL_FREE = dict(
    kind="model_free",
    seeds=5,
    steps=2400,
    horizon=0,
    shaping=False,
    start="simulation",
    prior_share=0.0,
    prefit_updates=0,
    warmup_steps=200,
    lr=1e-3,
    actor_lr=3e-4,
)


def model_free(**changes):
    agent = ConfigDict(MODEL_FREE)
    agent.update(changes)
    return agent


def model_based(**changes):
    agent = ConfigDict()
    agent.kind = "model_based"
    agent.seeds = 5
    agent.steps = 1600
    agent.horizon = 3  # H: model steps of a plan, all with the same action; V_sim closes it
    agent.use_value = True  # False plans on rewards alone
    agent.candidates = 256  # actions compared at every control step
    agent.members = 3  # of the dynamics ensemble
    agent.hidden = (128, 128)  # widths of a member
    agent.probabilistic = False  # predict a variance too, and train by likelihood
    agent.pretrain_updates = 2400  # on simulated transitions, before the first real step
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
    config.threshold = 0.5  # success rate that steps_to_threshold asks for

    pretrain = config.pretrain = ConfigDict()
    pretrain.actor_features = (64, 64)  # pi_sim and PPO's critic
    pretrain.value_features = (128, 128)  # V_sim
    pretrain.log_std_init = -0.7
    pretrain.num_envs = 256  # per seed
    pretrain.unroll = 40  # control steps of one iteration
    pretrain.iterations = 100
    pretrain.epochs = 4
    pretrain.minibatches = 8
    pretrain.lr = 1e-3
    pretrain.lam = 0.95  # lambda of GAE
    pretrain.clip = 0.2
    pretrain.value_coef = 0.5
    pretrain.std_bonus = 0.002  # reward for each unit of log std
    pretrain.max_grad_norm = 1.0
    pretrain.exploring_share = 0.5  # of episodes that start anywhere
    pretrain.checkpoint_every = 25  # iterations
    pretrain.sim_episodes = 200  # of D_sim
    pretrain.sim_action_noise = 0.5  # standard deviation, on pi_sim's action
    pretrain.sim_exploring_share = 0.0
    pretrain.refit = ConfigDict()
    pretrain.refit.num_envs = 4096  # rollouts per seed
    pretrain.refit.exploring_share = 0.5
    pretrain.refit.disturbed_steps = 60  # at most, before the return counts
    pretrain.refit.largest_offset = 1.2  # of the action, while disturbed
    pretrain.refit.horizon = 60  # undisturbed steps; PPO's critic closes the return
    pretrain.refit.keep = 12  # states of each rollout that V_sim is fitted to
    pretrain.refit.epochs = 30
    pretrain.refit.batch = 512
    pretrain.refit.lr = 1e-3

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
    agents.sac_finetune = model_free()
    agents.sgft_sac = model_free(horizon=3, shaping=True, prefit_updates=2000)
    agents.sgft_mb_no_value = model_based(use_value=False, seeds=2)
    agents.sac_scratch = model_free(start="random", warmup_steps=0, seeds=2)
    agents.pbrs_sac = model_free(shaping=True, prefit_updates=2000, seeds=2)
    agents.rlpd = model_free(start="random", prior_share=0.5, warmup_steps=0, seeds=2)
    # Nothing of the paper's per-task numbers could be read; its claim is an order of magnitude in samples.
    config.expected = {"claim": "up to ten times fewer real samples than normal fine-tuning"}
    return config
