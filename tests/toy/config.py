"""Logistic regression on points that a line separates."""

from ml_collections import ConfigDict

VARIANTS = ("smoke", "small", "full", "nan")


def get_config(variant="small"):
    config = ConfigDict()
    config.name = "toy"
    config.method = "tests.toy"
    config.seed = 0  # of the data and of the order of minibatches
    config.mesh = {"data": -1, "fsdp": 1, "tensor": 1}
    config.check = {"devices": 8}
    config.expected = {"parameters": 4}
    config.data = None  # a file to train on instead
    config.layers = (8, 4)  # widths
    config.optimizer = ConfigDict(
        {
            "lr": 0.5,  # step size
            "momentum": 0.9,
            "nesterov": False,
        }
    )
    config.iterations = 12  # of 10 updates each
    config.checkpoint_every = 3
    config.batch = 32
    config.pause = 0.0  # seconds between iterations, for tests that interrupt
    if variant == "smoke":
        config.iterations = 4
    if variant == "nan":
        config.optimizer.lr = 1e38
    if variant == "full":
        config.batch = 1 << 20
        config.check = {"devices": 16}
    return config
