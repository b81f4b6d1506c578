"""Command lines: a dataclass becomes `--flags`, its defaults and its help; a mistake becomes one clear line.

    config = cli.parse(Config, sys.argv[1:], "train.py", "Train an agent.")

transformers' HfArgumentParser does the work (its module alone imports in under a second; torch is not touched). On top:

- `--config file.yaml`: flat `name: value` lines, read as if each was typed as a flag. Flags typed beside it win, and of several
  files the later.
- A name that does not exist, in the file or on the line, stops the program and names the nearest one. Names are never
  completed (`--temp` is not `--temperature`), and nothing is ignored.
- Values in the file are taken as written, so that `lr: 1e-5` is a number (to YAML itself it would be a text).
- `--flag`, `--no_flag`, `--flag true`, `--flag false` for every bool.
- Of a flag that is given again the last one counts, as everywhere; of several `--config` files too, flag by flag.

Every error is "prog: error: setting: what is wrong; valid: ..." on standard error with exit status 2.
Left out: nested sections, interpolation, and any other way to set a value.
"""

import argparse
import dataclasses
import difflib
import functools
import os
import re
import sys
import typing

import yaml
from transformers.hf_argparser import HfArgumentParser

VALID = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def parse(config_class, argv, prog: str, description: str):
    """An instance of the dataclass from a list of arguments (None: those of the process). Exits with 2 on a mistake."""
    argv = _join_negatives(sys.argv[1:] if argv is None else list(argv))
    parser = _parser(config_class, prog, description)
    try:
        namespace = _parse(parser, config_class, argv)
        if namespace.config is not None:
            read = [arg for path in namespace.config for arg in _read(path, config_class)]
            namespace = _parse(parser, config_class, read + argv)
    except ValueError as e:
        fail(prog, e)
    fields = [f.name for f in dataclasses.fields(config_class) if f.init]
    return config_class(**{name: getattr(namespace, name) for name in fields})


def fail(prog: str, error) -> typing.NoReturn:
    """Print an error as one line on standard error, and exit with status 2. Under torchrun the first process alone prints it."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{prog}: error: {' '.join(str(error).split())}\n")
    sys.exit(2)


def quiet_when_unread(main):
    """A program whose reader may end (`| head -1`): then it ends too, without a traceback, with the status of a SIGPIPE."""

    @functools.wraps(main)
    def run(argv=None):
        try:
            try:
                main(argv)
            finally:
                sys.stdout.flush()  # also what --help printed before it left
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in its buffer goes nowhere
            sys.exit(141)

    return run


def options(text: str) -> dict:
    """Keyword arguments from "boxes=2,observation=grid": whole numbers, numbers, true/false, and text."""
    found = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not (equals and key.isidentifier() and value):
            raise ValueError(f"env_options: {part!r} is not key=value; valid: key=value,key=value")
        if key in found:
            raise ValueError(f"env_options: {key} is given twice; valid: each key once")
        found[key] = _value(value)
    return found


def nearest(name: str, config_class) -> str | None:
    """The setting that a wrong name most likely means, by its name or by words of its help ("learning_rate": lr)."""
    words = name.lower().replace("-", "_").split("_")
    scores = {}
    for f in dataclasses.fields(config_class):
        said = re.findall(r"[a-z]+", f.metadata.get("help", "").lower())
        windows = [" ".join(said[i : i + len(words)]) for i in range(len(said) - len(words) + 1)]
        of_help = max((_alike(" ".join(words), w) for w in windows), default=0.0)
        shortened = 0.9 if f.name.startswith("_".join(words)) else 0.0
        scores[f.name] = max(_alike("_".join(words), f.name), shortened, 0.9 * of_help if of_help > 0.8 else 0.0)
    best = max(scores, key=lambda name: (scores[name], -len(name)), default=None)  # of lr and critic_lr, lr
    return best if best is not None and scores[best] >= 0.5 else None


def _alike(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _number(kind):
    """int or float of a text in plain digits: Python itself also takes 1_000, and the digits of every script."""

    def read(text):
        if "_" in text or not text.isascii():
            raise ValueError(text)
        return kind(text)

    read.__name__ = kind.__name__  # argparse's word for it
    return read


def _value(text: str):
    for kind in (int, float):
        try:
            return _number(kind)(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """One spelling a flag, and no "(default: )" where there is none."""

    def _format_action_invocation(self, action):
        if len(action.option_strings) < 2 or action.dest == "help":
            return super()._format_action_invocation(action)
        return f"{action.option_strings[0]} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _get_help_string(self, action):
        return action.help if action.default in ("", None) else super()._get_help_string(action)


def _parser(config_class, prog, description) -> HfArgumentParser:
    kinds = typing.get_type_hints(config_class)
    plain = [
        (f.name, kinds[f.name], dataclasses.field(default=f.default, metadata={"help": f.metadata.get("help")}))
        for f in dataclasses.fields(config_class)
        if f.init
    ]  # HfArgumentParser takes no other metadata
    parser = HfArgumentParser(
        dataclasses.make_dataclass("Settings", plain), prog=prog, description=description, usage=f"{prog} [--setting value ...]", allow_abbrev=False,
        exit_on_error=False, formatter_class=lambda prog: _Help(prog, max_help_position=34, width=120),
    )  # fmt: skip
    for action in parser._actions:
        if action.option_strings[0].startswith("--no_"):
            action.help = argparse.SUPPRESS
        elif action.choices is None and action.dest in kinds:
            action.type = _number(action.type) if action.type in (int, float) else action.type
            action.metavar = "true|false" if kinds[action.dest] is bool else kinds[action.dest].__name__.upper()
    groups = {}  # title -> group of --help
    for f in dataclasses.fields(config_class):
        if title := f.metadata.get("group"):
            group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
            action = parser._option_string_actions[f"--{f.name}"]
            parser._optionals._group_actions.remove(action)
            group._group_actions.append(action)
        if kinds[f.name] is bool and f.default is False:  # HfArgumentParser has it only where the default is True
            names = {f"--no_{f.name}", f"--no-{f.name.replace('_', '-')}"}
            parser.add_argument(*sorted(names), action="store_false", dest=f.name, default=False, help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", metavar="FILE", action="append", help="YAML file of settings; flags win over it, later files over earlier ones"
    )
    return parser


def _join_negatives(argv: list[str]) -> list[str]:
    """`--x -1e-3` as `--x=-1e-3`: argparse takes a negative number in that notation for a flag."""
    joined = []
    for arg in argv:
        flag = joined[-1] if joined else ""
        if arg.startswith("-") and isinstance(_value(arg), (int, float)) and flag.startswith("--") and "=" not in flag:
            joined[-1] = f"{flag}={arg}"
        else:
            joined.append(arg)
    return joined


def _parse(parser, config_class, argv) -> argparse.Namespace:
    try:
        namespace, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as e:
        name = e.argument_name.split("/")[0].lstrip("-")
        kind = typing.get_type_hints(config_class).get(name, str)
        choices = typing.get_args(kind)
        wrong = e.message.split(" (choose")[0]
        if choices:
            value = wrong.partition(": ")[2].strip("'")
            near = difflib.get_close_matches(value.lower(), map(str, choices), n=1)
            wrong += f" (did you mean {near[0]!r}?)" if near else ""
        if kind is bool:
            wrong = "neither true nor false"
        raise ValueError(f"{name}: {wrong}; valid: {', '.join(map(str, choices)) or VALID.get(kind)}") from e
    for name, value in vars(namespace).items():
        if isinstance(value, list) and name != "config":  # what argparse makes of "--steps=--"
            raise ValueError(f"{name}: has no value; valid: --{name} value")
    for arg in rest:
        if not arg.startswith("-"):
            raise ValueError(f"{arg}: belongs to no setting; valid: --setting value")
        raise ValueError(_unknown(arg.split("=")[0], "", "--", config_class))
    return namespace


def _unknown(name, where, dashes, config_class) -> str:
    near = nearest(name.lstrip("-"), config_class)
    return f"{name}: there is no such setting{where}; " + (f"did you mean {dashes}{near}? " if near else "") + "valid: see --help"


def _read(path: str, config_class) -> list[str]:
    """The settings of a YAML file as a list of arguments."""
    try:
        with open(path, encoding="utf-8") as file:
            node = yaml.compose(file, Loader=yaml.SafeLoader)  # nodes keep each value's text as it was written
    except OSError as e:
        raise ValueError(f"config: {path} cannot be read ({e.strerror}); valid: a YAML file") from e
    except RecursionError as e:
        raise ValueError(f"config: {path} is nested too deep; valid: lines of name: value") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ValueError(f"config: {path} is not YAML ({e}); valid: lines of name: value") from e
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"config: {path} holds no settings; valid: lines of name: value")
    names = {f.name for f in dataclasses.fields(config_class) if f.init}
    argv, seen = [], set()
    for key_node, value in node.value:
        key = key_node.value
        if key not in names:
            raise ValueError(_unknown(str(key), f" in {path}", "", config_class))
        if key in seen:
            raise ValueError(f"{key}: is given twice in {path}; valid: each setting once")
        seen.add(key)
        if not isinstance(value, yaml.ScalarNode) or value.tag.endswith(":null"):
            raise ValueError(f"{key}: has no single value in {path}; valid: {key}: value")
        argv.append(f"--{key}={value.value}")
    return argv
