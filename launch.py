"""The one entry point: `python launch.py --config=configs/NAME.py[:VARIANT] [--config.KEY=VALUE ...]`.

Reads a config, prepares the devices, and calls the method's experiment. JAX must not be imported at the top
of this file: it reads the platform and the number of fake devices from the environment once.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from core import config as configs
from core.errors import UserError, explain

MODES = ("train", "eval", "check", "report")
PLATFORMS = ("auto", "cpu", "cuda", "tpu")
BACKENDS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv` (without the program's name); returns the exit code: 0, 2, 3 or 143."""
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("core").setLevel(logging.DEBUG if "--debug" in argv else logging.INFO)
    try:
        code = _main(argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        return explain(error)
    except BrokenPipeError:  # whoever reads stdout (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; run the same command to go on from the last checkpoint", file=sys.stderr)
        return 130


def _main(argv: list[str]) -> int:
    plain, pairs = _split(argv)
    options = _options(plain)
    if options.help:
        print(__doc__, *(f"  --{name}: {options[name].help}" for name in options), sep="\n")
        return 0
    if not options.config and not options.workdir:
        raise UserError("no --config: give --config=configs/NAME.py[:VARIANT] (--help lists all flags)")
    # A method of one's own is a folder where one works; what is installed comes first.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    config, variant, overrides, path = _read(options, pairs)
    if options.help_config:
        print(_describe(config, path))
        return 0
    if options.restart and options.mode != "train":
        raise UserError(f"--restart begins a training anew: it does not go with --mode={options.mode}")
    workdir = Path(options.workdir or f"runs/{config.name}-{variant}")
    logging.getLogger(str(config.method).split(".")[0]).setLevel(logging.INFO)
    fake = int(config.check.devices) if options.mode == "check" else 0
    _environment(options.platform, fake, quick=variant == "smoke")
    _processes(options)
    if options.mode != "report":
        _devices(options.platform, fake)
    from core import run

    return run.execute(
        config,
        workdir,
        mode=options.mode,
        variant=variant,
        overrides=overrides,
        restart=options.restart,
        results=_results(config, variant),
    )


def _split(argv: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separates `--config.PATH=VALUE` (or `--config.PATH VALUE`) from the flags."""
    plain: list[str] = []
    pairs: list[tuple[str, str]] = []
    rest = list(argv)
    while rest:
        item = rest.pop(0)
        match = re.fullmatch(r"--?config\.([^=]*)(?:=(.*))?", item, re.DOTALL)
        if match is None:
            plain.append(item)
            continue
        path, value = match.groups()
        if value is None and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if value is None:
            raise UserError(f"--config.{path} has no value: write --config.{path}=VALUE")
        pairs.append((path, value))
    return plain, pairs


def _options(argv: list[str]) -> flags.FlagValues:
    """Parses the flags into their own FlagValues, so that main can be called more than once in a process."""
    options = flags.FlagValues()

    def define(kind: str, name: str, *rest: Any, **more: Any) -> None:
        getattr(flags, f"DEFINE_{kind}")(name, *rest, flag_values=options, **more)

    define("string", "config", None, "FILE[:VARIANT], looked for here and in the installed configs.")
    define("string", "workdir", None, "Everything is written here (default runs/NAME-VARIANT).")
    define(
        "enum",
        "mode",
        "train",
        MODES,
        "Evaluate a checkpoint; lower without the hardware; rebuild report.html.",
    )
    define("enum", "platform", "auto", PLATFORMS, "Devices to use; auto takes the best there is.")
    define("bool", "restart", False, "Move an old run in the workdir to WORKDIR.N and begin anew.")
    define("bool", "distributed", False, "One of several processes: TPU pod, Slurm, MPI, GKE.")
    define("string", "coordinator", None, "HOST:PORT of process 0, where JAX can not tell.")
    define("integer", "num_processes", None, "Processes in all, with --coordinator.", 1)
    define("integer", "process_id", None, "This process, 0 to num_processes - 1.", 0)
    define("bool", "help_config", False, "Print every config key, its default and its comment.")
    define("bool", "debug", False, "Show the traceback of a mistake in the input.")
    define("bool", "help", False, "Print this help.", short_name="h")
    try:
        rest = options(["launch.py", *argv])[1:]
    except flags.Error as error:
        raise UserError(str(error)) from None
    if rest:
        raise UserError(f"launch.py takes flags only, not {rest[0]!r} (--help lists them)")
    return options


def _read(
    options: flags.FlagValues, pairs: list[tuple[str, str]]
) -> tuple[ConfigDict, str, dict[str, Any], Path | None]:
    """Returns config, variant, overrides and file; without --config, those recorded in the workdir."""
    if options.config:
        config, variant, path = configs.load(options.config)
        return config, variant, configs.override(config, pairs), path
    if pairs:
        raise UserError(f"--config.{pairs[0][0]} needs a --config to override")
    past = configs.recorded(Path(options.workdir))
    return past.config, past.variant, past.overrides, None


def _describe(config: ConfigDict, path: Path | None) -> str:
    table = configs.comments(path) if path else {}
    lines = []
    for key, value in configs.flatten(config).items():
        comment = configs.comment_of(key, table)
        line = f"--config.{key}={value!r}"
        lines.append(f"{line:<48}  # {comment}" if comment else line)
    return "\n".join(lines)


def _environment(platform: str, fake_devices: int, *, quick: bool) -> None:
    """Sets what JAX reads once, at import and first use; and keeps libraries from caching in the home."""
    if quick and "jax" not in sys.modules:
        # A smoke run computes next to nothing: compiling is its time.
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    if "MPLCONFIGDIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="methodax-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ["MPLCONFIGDIR"] = folder
    os.environ.setdefault("MESA_SHADER_CACHE_DISABLE", "true")
    if fake_devices:
        others = re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{others} --xla_force_host_platform_device_count={fake_devices}".strip()
        os.environ["JAX_PLATFORMS"] = "cpu"
    elif platform != "auto":
        os.environ["JAX_PLATFORMS"] = "cpu" if platform == "cpu" else f"{platform},cpu"


def _processes(options: flags.FlagValues) -> None:
    explicit = (options.coordinator, options.num_processes, options.process_id)
    if not options.distributed and any(value is not None for value in explicit):
        raise UserError("--coordinator, --num_processes and --process_id go with --distributed")
    if any(value is None for value in explicit) and any(value is not None for value in explicit):
        raise UserError(
            "--coordinator, --num_processes and --process_id come together, or JAX finds all three"
        )
    if options.distributed:
        from core.mesh import start_distributed

        start_distributed(*explicit)


def _devices(platform: str, fake_devices: int) -> None:
    """Looks at the devices; UserError if the platform asked for is not the one JAX got."""
    import jax

    try:
        devices, backend = jax.devices(), jax.default_backend()
    except (RuntimeError, AssertionError):  # the assertion is how jax 0.10 says that no platform was left
        devices, backend = [], "none"
    if not fake_devices and platform != "auto" and backend != BACKENDS[platform]:
        there = backend
        if not devices:
            jax.config.update("jax_platforms", None)
            there = jax.default_backend()
        hint = f" (is methodax[{platform}] installed?)" if platform != "cpu" else ""
        raise UserError(f"--platform={platform}: no such device{hint}; there is: {there}")
    if fake_devices and len(devices) != fake_devices:
        raise UserError(f"--mode=check wants {fake_devices} fake devices, JAX started with {len(devices)}")
    if not devices:
        raise UserError(f"JAX finds no device (JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')})")
    logging.getLogger("core").info("running on %d x %s", len(devices), devices[0].device_kind)


def _results(config: ConfigDict, variant: str) -> Path | None:
    """Returns the repository's results/ if this run is one of its configs as it stands there, else None."""
    if not (configs.ROOT / "setup.cfg").is_file():
        return None
    try:
        published = configs.load(f"{configs.ROOT / 'configs' / config.name}.py:{variant}")[0]
    except UserError:
        return None
    return configs.ROOT / "results" if configs.sha256(published) == configs.sha256(config) else None


if __name__ == "__main__":
    sys.exit(main())
