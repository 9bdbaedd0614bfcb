"""From the config to agents: what can not work is refused by name; the agents are those of the table."""

from fnmatch import fnmatchcase

import pytest

from core import config as configs
from core.errors import UserError
from core.ranges import numbers
from robotics.sgft import methods
from robotics.sgft.ranges import CONFIG


def load(variant="small", **changes):
    config = configs.load(f"configs/sgft.py:{variant}")[0]
    pairs = [(path.replace("__", "."), str(value)) for path, value in changes.items()]
    configs.override(config, pairs)
    return config


@pytest.mark.parametrize("variant", ["smoke", "small", "full", "h_sweep", "baselines"])
def test_every_variant_is_valid(variant):
    config = load(variant)
    methods.validate(config)
    assert config.deploy in config.agents


REFUSED = [
    (
        {"gamma": 0.99},
        r"V_sim was trained with gamma 0\.97 but the real task uses gamma 0\.99: the shaping would be wrong",
    ),
    (
        {"agents__sgft_sac__horizon": -1},
        r"config\.agents\.sgft_sac\.horizon=-1: the window H must be at least",
    ),
    ({"agents__sgft_mb__horizon": 0}, r"config\.agents\.sgft_mb\.horizon=0: the window H must be at least 1"),
    ({"agents__sac_finetune__horizon": 3}, "a window of H=3 steps needs shaping=True"),
    ({"agents__rlpd__start": "radnom"}, r"config\.agents\.rlpd\.start='radnom'; did you mean 'random'"),
    ({"sim__backend": "mjxx"}, r"config\.sim\.backend='mjxx'; did you mean 'mjx'"),
    ({"terminal_potential": "zeros"}, r"config\.terminal_potential='zeros'; did you mean 'zero'"),
    ({"task": "puck_pull"}, "no task 'puck_pull'; did you mean 'puck_push'"),
    ({"gap": "papers"}, "no gap level 'papers'; did you mean 'paper'"),
    ({"deploy": "sgft"}, r"config\.deploy='sgft'; did you mean 'sgft_sac'|'sgft_mb'"),
    ({"evaluation__every": 190}, r"config\.evaluation\.every = 190 is not a multiple of config\.block = 40"),
    ({"agents__sgft_mb__seeds": 9}, r"config\.agents\.sgft_mb\.seeds=9 is not in 1\.\.config\.num_seeds=5"),
    ({"pretrain__num_envs": 0}, r"config\.pretrain\.num_envs must be a whole number, 1 or more, not 0"),
    ({"agents__sgft_mb__hidden": "64,0"}, r"config\.agents\.sgft_mb\.hidden must be .* 1 or more, not 0"),
    ({"agents__rlpd__prior_share": 1.5}, r"config\.agents\.rlpd\.prior_share must be in 0\.\.1, not 1\.5"),
    ({"sac__alpha": 0.0}, r"config\.sac\.alpha must be above 0, not 0\.0"),
    ({"pretrain__minibatches": 7}, r"unroll = 10240 is not a multiple of .*minibatches = 7"),
    ({"sac__policy_delay": 3}, r"config\.block = 160 is not a multiple of config\.sac\.policy_delay = 3"),
    ({"pretrain__refit__keep": 61}, r"keep=61 is more than the 60 steps of config\.pretrain\.refit\.horizon"),
    ({"agents__sgft_mb__steps": 300}, r"steps = 300 is not a multiple of config\.evaluation\.every = 200"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_what_can_not_work_is_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        methods.validate(load(**changes))


@pytest.mark.parametrize("variant", ["smoke", "small", "full", "h_sweep", "baselines"])
def test_every_number_has_a_range(variant):
    for key, _ in numbers(load(variant)):
        assert any(fnmatchcase(key, pattern) for pattern in CONFIG), key


def test_the_agents_are_those_of_the_table():
    config = load(agents__sgft_sac__horizon=3)
    parts = methods.make(config)
    table = {}
    for name, settings in config.agents.items():
        rules = methods.agent(settings, config, parts).options
        if rules is not None:  # model-free
            switches = rules.from_simulation, rules.shaping, rules.hyper.bootstrap, rules.prior_share > 0
            table[name] = tuple(bool(switch) for switch in switches)
    assert table == {
        "sac_finetune": (True, False, True, False),
        "sgft_sac": (True, True, True, False),
        "sac_scratch": (False, False, True, False),
        "pbrs_sac": (True, True, True, False),
        "rlpd": (False, False, True, True),
    }
    assert config.agents.keys() - table.keys() == {"sgft_mb", "sgft_mb_no_value"}


@pytest.mark.parametrize(("horizon", "window", "bootstrap"), [(0, 1, 1), (1, 1, 0), (3, 3, 1)])
def test_a_window_of_one_bootstraps_nothing_and_no_window_always(horizon, window, bootstrap):
    config = load(agents__sgft_sac__horizon=horizon)
    agent = methods.agent(config.agents.sgft_sac, config, methods.make(config))
    settings = agent.init.keywords["settings"]
    assert settings.actor.horizon == settings.critic.horizon == window
    assert agent.options.hyper.bootstrap == bootstrap
