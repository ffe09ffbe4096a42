"""The command line of `kvortex serve`: KVortex's own arguments apart from vLLM's.

vLLM's may stand anywhere and in all of vLLM's spellings: `--max-model-len 4096`, `--max_model_len=4096`,
`-tp 2`, `-O3`, `--no-enforce-eager`, `--served-model-name a b`, `--compilation-config.mode 3`. What follows
`--` goes to vLLM as it stands: the way for an option that is newer than KVortex's list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvortex.config.names import nearest
from kvortex.config.option_values import Dotted, from_entry, from_text
from kvortex.config.redaction import SECRET_OPTIONS
from kvortex.config.settings import KV_CACHE_KEYS
from kvortex.config.vllm_options import Kind, ValueType, VllmOption, vllm_options
from kvortex.config.yaml_file import Entry
from kvortex.errors import ConfigError, Place, UsageError
from kvortex.sizes import BadValueError

_WITH_VALUE: Final = ("--config", "-c", "--set")
_WITHOUT_VALUE: Final = ("--dry-run", "--json", "--help", "-h")
_SECRET_FLAGS: Final = tuple("--" + name.replace("_", "-") for name in SECRET_OPTIONS)
_NUMBER: Final = re.compile(r"-[0-9.]")


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """One option of vLLM's with its value, and how the user wrote it."""

    option: VllmOption
    written: str
    value: Any

    @property
    def place(self) -> Place:
        return Place(self.written)


@dataclass(slots=True)
class ServeArguments:
    """What stood on the command line.

    Attributes:
        own: KVortex's arguments, in `--name value` form, and the model.
        vllm: vLLM's options, in their order.
        untouched: what followed `--`.
    """

    own: list[str] = field(default_factory=list)
    vllm: list[VllmArgument] = field(default_factory=list)
    untouched: tuple[str, ...] = ()


def split_arguments(arguments: Sequence[str]) -> ServeArguments:
    """Sorts the arguments of `kvortex serve`.

    Raises:
        UsageError: an unknown option, with the nearest right one; an option without its value; a bad value.
    """
    result = ServeArguments()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            result.untouched = _checked_untouched(rest)
            break
        name, equals, text = argument.partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        if name in _WITH_VALUE:
            name = "--config" if name == "-c" else name
            if name == "--config" and name in result.own:
                raise UsageError("--config is there twice", hint="KVortex reads one file")
            result.own += [name, *([text] if equals else rest[:1])]
            rest = rest if equals else rest[1:]
        elif argument in _WITHOUT_VALUE or name in _WITHOUT_VALUE:
            result.own.append("--help" if name == "-h" else name + equals + text)
        elif not argument.startswith("-") or argument == "-":
            result.own.append(argument)
        else:
            _put(result.vllm, _vllm_argument(argument, rest))
    return result


def _put(vllm: list[VllmArgument], found: VllmArgument) -> None:
    """Adds one, or joins it to the earlier one of an option that may stand several times."""
    for index, earlier in enumerate(vllm):
        if earlier.option is not found.option:
            continue
        if isinstance(earlier.value, Dotted) and isinstance(found.value, Dotted):
            joined: Any = Dotted(earlier.value.parts + found.value.parts)
        elif found.option.kind is Kind.APPEND:
            joined = earlier.value + found.value
        else:
            message = f'"{found.option.name}" is there twice'
            where = "" if earlier.written == found.written else f", first as {earlier.written}"
            raise ConfigError(found.place, message + where, hint="keep one of the two")
        vllm[index] = VllmArgument(found.option, earlier.written, joined)
        return
    vllm.append(found)


def _vllm_argument(argument: str, rest: list[str]) -> VllmArgument:
    """Reads one option, and takes its value from `rest`."""
    name, equals, text = argument.partition("=")
    if name.startswith("-O") and name != "-O":  # -O3, as compilers have it
        name, equals, text = "-O", "=", (text if name == "-O=" else name[2:])
    option, dotted, negated = _find(name)
    if negated or option.kind in (Kind.FLAG, Kind.SWITCH):
        if equals:
            raise ConfigError(Place(name), "takes no value", hint=f"write {option.flag}" + _or_no(option))
        return VllmArgument(option, name, not negated)
    place = Place(name)
    texts = [text] if equals else _take(option, rest, place)
    try:
        return VllmArgument(option, name, _value(option, dotted, texts))
    except BadValueError as bad:
        raise ConfigError(place, bad.message, hint=bad.hint) from None


def _value(option: VllmOption, dotted: str, texts: list[str]) -> Any:
    if dotted:
        if option.type is not ValueType.JSON:
            raise BadValueError(f"{option.flag} has no parts")
        return Dotted(((dotted, texts[0]),))
    if option.kind in (Kind.LIST, Kind.APPEND):
        return from_entry(option, Entry(texts, 0, items=tuple(texts)))
    if option.kind is Kind.OPTIONAL and not texts:
        return True
    return from_text(option, texts[0])


def _or_no(option: VllmOption) -> str:
    return f" or {option.no_flag}" if option.kind is Kind.SWITCH else ""


def _take(option: VllmOption, rest: list[str], place: Place) -> list[str]:
    """Takes the values of an option from what follows it, by argparse's rule: up to the next dash."""
    most = len(rest) if option.kind is Kind.LIST else 1
    taken: list[str] = []
    while rest and len(taken) < most and (not rest[0].startswith("-") or rest[0] == "-" or _NUMBER.match(rest[0])):
        taken.append(rest.pop(0))
    if not taken and option.kind is not Kind.OPTIONAL:
        raise ConfigError(place, "has no value", hint=f"write {place}=VALUE")
    return taken


def _find(name: str) -> tuple[VllmOption, str, bool]:
    """The option of a name as written, the part after its dot, and whether it says no."""
    options = vllm_options()
    base, _, dotted = name.partition(".")
    if base == "-O":
        return options.by_name["optimization_level"], dotted, False
    short = options.find_short(base)
    if short is not None:
        return short, dotted, False
    if base.startswith("--"):
        option = options.find(base[2:])
        if option is not None:
            return option, dotted, False
        option = options.find_negation(base[2:])
        if option is not None and not dotted:
            return option, "", True
    raise ConfigError(Place(base), "there is no such option", hint=_hint(base))


def option_names() -> list[str]:
    """Every option that `kvortex serve` takes, for a nearest name."""
    options = vllm_options()
    own = [option for option in (*_WITH_VALUE, *_WITHOUT_VALUE) if option.startswith("--")]
    flags = [flag for option in options for flag in (option.flag, *option.short)]
    no_flags = [option.no_flag for option in options if option.kind is Kind.SWITCH]
    return [*own, *flags, *no_flags]


def _hint(name: str) -> str:
    names = option_names()
    close = nearest(name, [*names, *("--" + key for key in KV_CACHE_KEYS)])
    if close is not None and close[2:] in KV_CACHE_KEYS and close not in names:
        return f"did you mean --set kv_cache.{close[2:]}=...?"
    after = "an option of a newer vLLM goes after --"
    return f"did you mean {close}? ({after})" if close else f"`vllm serve --help=all` lists vLLM's; {after}"


def _checked_untouched(arguments: list[str]) -> tuple[str, ...]:
    """What follows `--`; an option that KVortex knows is refused there: it would override, and a secret would stand on
    a command line."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if not name.startswith("-"):
            continue
        hint = "put it before --"
        secret = next((flag for flag in _SECRET_FLAGS if _abbreviates(name, flag)), None)
        if secret is not None:
            raise ConfigError(Place(name), f"is short for {secret}, which every user could read there", hint=hint)
        try:
            option, _, _ = _find(name)
        except UsageError:
            continue
        raise ConfigError(Place(name), f'"{option.name}" is a known option', hint=hint)
    return tuple(arguments)


def _abbreviates(name: str, flag: str) -> bool:
    """Whether argparse takes the name for the flag: it, and no other option, begins so."""
    spelled = name.replace("_", "-")
    if spelled == flag or not flag.startswith(spelled):
        return False
    return sum(option.flag.startswith(spelled) for option in vllm_options()) == 1
