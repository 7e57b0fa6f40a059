"""Settings as they were written, held against the sections and keys there are: a refusal lists what could be meant."""

import re
from typing import Any, Literal, get_args, get_origin

import msgspec

from cluster.errors import ConfigError

_MSGSPEC_PLACE = re.compile(r"(?P<text>.*) - at `\$\.(?P<path>[^\[`]+)(\[.+)?`")


def check_known(tree: dict[str, Any], config_type: type[msgspec.Struct]) -> None:
    """Raises ConfigError for a section or key that does not exist, and for a word outside a closed set."""
    sections = {field.name: field.type for field in msgspec.structs.fields(config_type)}
    for name, values in tree.items():
        if name not in sections:
            raise ConfigError(f"unknown section {name!r} of settings; known: {', '.join(sections)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{name} = {values!r}: must be a table of settings, [{name}]")
        _check_section(name, values, sections[name])


def _check_section(name: str, values: dict[str, Any], section_type: type[msgspec.Struct]) -> None:
    types = {field.name: field.type for field in msgspec.structs.fields(section_type)}
    for key, value in values.items():
        if key not in types:
            raise ConfigError(
                f"unknown setting {name}.{key} = {value!r}; known in {name}: {', '.join(types)}"
            )
        if get_origin(types[key]) is Literal and value not in get_args(types[key]):
            supported = ", ".join(get_args(types[key]))
            raise ConfigError(f"{name}.{key} = {value!r}; supported: {supported}")


def wrong_type(tree: dict[str, Any], error: msgspec.ValidationError) -> ConfigError:
    """msgspec's complaint about a setting of known sections and keys, with the setting and its value first."""
    match = _MSGSPEC_PLACE.fullmatch(str(error))
    assert match is not None, error
    section, key = match["path"].split(".")
    return ConfigError(f"{section}.{key} = {tree[section][key]!r}: {match['text']}")
