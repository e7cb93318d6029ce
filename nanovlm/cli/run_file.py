"""run.yaml: the flags of a training run in a file that repeats it, `nanovlm train --config run.yaml`."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nanovlm.errors import UsageError
from nanovlm.training.config import TURNED_OFF_BY

NOT_WRITTEN = ("config", "debug", "prog", "run", "dry_run", "check_data")
# Flags of the command line that take the place of a file's, which was chosen for a run without them, or excludes them
DISPLACED_BY = {
    "max_steps": {"epochs"},
    "epochs": {"max_steps"},
    "optimizer": {"lora_rank"},
    "lr": {"lora_rank", "optimizer"},
}


class _Parser(argparse.ArgumentParser):
    """Reports a wrong value as a UsageError of the file."""

    def error(self, message: str) -> Any:
        raise UsageError(f"--config {self.prog}: {message}")


def apply_run_file(
    args: argparse.Namespace, add_flags: Callable[[argparse.ArgumentParser], None], needs: Mapping[str, str]
) -> None:
    """Set what args.config says and the command line does not; UsageError for a wrong flag in the file.

    needs are the names of flags that need something else to have an effect, and what.
    """
    add_flags(parser := _Parser(prog=args.config, add_help=False))
    typed = {name for name, value in vars(args).items() if value is not None}
    off = {name for name, value in TURNED_OFF_BY.items() if getattr(args, name) == value}
    for name, value in vars(parser.parse_args(_as_flags(read_run_file(Path(args.config))))).items():
        if name not in typed and not typed & DISPLACED_BY.get(name, set()) and needs.get(name) not in off:
            setattr(args, name, value)


def read_run_file(path: Path) -> dict[str, Any]:
    """The flags of a run file by name, without the leading dashes."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config {path} must hold lines like `max_steps: 500`, not {type(content).__name__}")
    return content


def _as_flags(content: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in content.items():
        flag = f"--{str(name).replace('_', '-')}"
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        elif flag == "--metric" and isinstance(value, list):
            flags += [f"{flag}={one}" for one in value]
        elif isinstance(value, list):
            flags += [flag, *map(str, value)]
        elif value is not None:
            flags.append(f"{flag}={value}")
    return flags


def run_file_text(args: argparse.Namespace) -> str:
    """The YAML text of all flags of args that were given."""
    import yaml

    given = {name: value for name, value in vars(args).items() if name not in NOT_WRITTEN and value is not None}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)
