"""Config files: variants, overrides and their mistakes, comments, hash."""

import textwrap

import pytest
from ml_collections import ConfigDict

from core import config as configs
from core.errors import UserError

TOY = "tests/toy/config.py"


def write(folder, text):
    path = folder / "some.py"
    path.write_text(textwrap.dedent(text))
    return path


def sample():
    tree = {"lr": 1e-3, "steps": 10, "deep": {"flag": False, "name": "a", "sizes": (4, 4)}, "file": None}
    return configs.from_plain(tree)


def test_the_small_variant_is_the_default():
    assert configs.load(TOY)[1] == "small"
    assert configs.load(f"{TOY}:smoke")[0].iterations == 4


def test_a_config_is_found_from_any_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert configs.find("tests/toy/config.py").name == "config.py"
    assert configs.find("tests/toy/config") == configs.find("tests/toy/config.py")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{TOY}:smok", "no variant 'smok'; did you mean 'smoke'?"),
        (f"{TOY}:zzzz", "there are: smoke, small"),
        ("configs/nothing.py", "no config file configs/nothing.py"),
    ],
)
def test_a_wrong_file_or_variant_is_refused(spec, message):
    with pytest.raises(UserError) as caught:
        configs.load(spec)
    assert message in str(caught.value)


def test_a_config_without_the_common_keys_is_refused(tmp_path):
    path = write(
        tmp_path,
        """
        from ml_collections import ConfigDict
        VARIANTS = ("small",)
        def get_config(variant="small"):
            return ConfigDict({"name": "x", "seed": 0})
        """,
    )
    with pytest.raises(UserError, match="sets no method, mesh, check, expected"):
        configs.load(str(path))
    with pytest.raises(UserError, match="defines no VARIANTS"):
        configs.load(str(write(tmp_path, "x = 1")))


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("lr", "1", 1.0),
        ("lr", "3e-4", 3e-4),
        ("steps", "1e5", 100000),
        ("steps", "-7", -7),
        ("steps", "123456789012345678901", 123456789012345678901),
        ("deep.flag", "true", True),
        ("deep.flag", "0", False),
        ("deep.name", "1e5", "1e5"),
        ("deep.name", "", ""),
        ("deep.sizes", "(1, 2, 3)", (1, 2, 3)),
        ("deep.sizes", "[8]", (8,)),
        ("deep.sizes", "8,16", (8, 16)),
        ("deep.sizes", "8", (8,)),
        ("deep.sizes", "()", ()),
        ("file", "/data/x", "/data/x"),
        ("file", "3", 3),
        ("file", "None", None),
    ],
)
def test_an_override_gets_the_type_of_its_key(path, text, value):
    config = sample()
    assert configs.override(config, [(path, text)]) == {path: value}
    got = config
    for key in path.split("."):
        got = got[key]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("lr", "fast"),
        ("lr", "nan"),
        ("lr", "inf"),
        ("steps", "1.5"),
        ("steps", "true"),
        ("steps", "__import__('os').getpid()"),
        ("deep.flag", "yes"),
        ("deep.sizes", "a,b"),
        ("deep.sizes", "(1.5,)"),
    ],
)
def test_an_override_of_the_wrong_type_is_refused(path, text):
    with pytest.raises(UserError) as caught:
        configs.override(sample(), [(path, text)])
    assert f"config.{path} is" in str(caught.value) and repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lrr", "no key 'lrr'; did you mean 'lr'?"),
        ("deep.flga", "no key 'deep.flga'; did you mean 'deep.flag'?"),
        ("dep.flag", "no key 'dep'; did you mean 'deep.flag'?"),
        ("flag", "did you mean 'deep.flag'?"),
        ("deep.lr", "did you mean 'lr'?"),
        ("deep", "config.deep is a section: set one of its keys (flag, name, sizes)"),
        ("lr.x", "config.lr is a value, it has no key 'x'"),
        ("", "no key ''"),
    ],
)
def test_an_unknown_key_names_the_nearest(path, message):
    with pytest.raises(UserError) as caught:
        configs.override(sample(), [(path, "1")])
    assert message in str(caught.value)


def test_the_last_override_of_a_key_wins():
    config = sample()
    assert configs.override(config, [("steps", "1"), ("steps", "2")]) == {"steps": 2}


def test_the_hash_survives_json_and_knows_every_value():
    config = configs.load(TOY)[0]
    again = configs.from_plain(configs.plain(config.to_dict()))
    assert again == config and configs.sha256(again) == configs.sha256(config)
    changed = configs.load(TOY)[0]
    changed.optimizer.lr = 0.25
    assert configs.sha256(changed) != configs.sha256(config)
    assert configs.differences(config, changed) == "optimizer.lr: 0.5 -> 0.25"


def test_differences_name_new_and_missing_keys_and_count_the_rest():
    old, new = (
        ConfigDict({f"k{i}": 0 for i in range(6)}),
        ConfigDict({f"k{i}": 1 for i in range(5)} | {"n": 1}),
    )
    text = configs.differences(old, new)
    assert text == "k0: 0 -> 1, k1: 0 -> 1, k2: 0 -> 1, k3: 0 -> 1 and 3 more"
    assert configs.differences(ConfigDict({"a": 1}), ConfigDict({"b": 1})) == "a: gone, b: new"


def test_a_config_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match=r"config\.a\.b is inf"):
        configs.sha256(ConfigDict({"a": {"b": float("inf")}}))


def test_comments_belong_to_the_key_they_follow(tmp_path):
    path = write(
        tmp_path,
        """
        from ml_collections import ConfigDict

        def agent():
            return dict(
                lr=3e-4,  # of Adam
                critic=dict(width=256),  # one hidden layer
            )

        def get_config(variant="small"):
            config = ConfigDict()
            config.lr = 1.0  # of the outer loop
            config.agents = {"sac": agent(), "size": 3}  # by name
            config.task = ConfigDict({
                "gap": "paper",  # none | mild | paper
                # a comment of its own line belongs to no key
                "steps": 50,
            })
            config.sizes = (
                1,
                2,
            )  # of the layers
            if variant == "smoke":
                config.lr = 2.0  # not this one
            return config
        """,
    )
    table = configs.comments(path)
    assert configs.comment_of("lr", table) == "of the outer loop"
    assert configs.comment_of("agents.sac.lr", table) == "of Adam"
    assert configs.comment_of("agents.sac.critic.width", table) == "one hidden layer"
    assert configs.comment_of("task.gap", table) == "none | mild | paper"
    assert configs.comment_of("task.steps", table) == ""
    assert configs.comment_of("sizes", table) == "of the layers"
