"""A YAML file may hold the flags: `key: value` becomes the flag of that name, with the checks of the command line.

    tensor-model-parallel-size: 2     # hyphens or underscores, with or without the leading --
    model:                            # groups: any name, any depth
      num_layers: 24
      add_bias_linear: false          # a switch: true or false, also where only the other one has a flag
      data_path: [0.3, books, 0.7, web]

Values are read as written: 1e-4 is a number, although YAML 1.1 reads it as text. A key without a value (null) has no
effect. Megatron-LM's own files name fields of its config classes; fields without a flag are listed below. Of a recipe of
its functional tests (model_config.yaml) the group MODEL_ARGS is read.
"""

import argparse
import os
from typing import Any, NamedTuple

from megatron.core.base.dataclass_flags import ConfigError, FlagParser, field_of_action, nearest_flag
from megatron.core.base.warn_waiting_on_named_pipe import told_if_nobody_writes

YAML_FLAG = "--yaml-cfg"
_OF_THE_COMMAND_LINE = (YAML_FLAG, "--help", "--help-all", "-h")

# Fields of Megatron's config classes: the equivalent field here, a hint, or why they have no effect.
_OTHER_NAMES = {
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
}
_HINTS = {
    "activation_func": "swiglu",
    "gated_linear_unit": "swiglu",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
}
_KERNELS = "kernels are chosen by what the device can do"
_OVERLAP = "products and communication are overlapped where the code can"
_TRANSFERS = "transfers between stages always overlap with computation"
_PRECISION = "--fp16 and --bf16 set the precision"
_OFFLOAD = "--cpu-offloading-num-layers sets how many layers' activations are offloaded; weights are not"
_NO_EFFECT = {
    "bias_activation_fusion": _KERNELS,
    "memory_efficient_layer_norm": _KERNELS,
    "tp_comm_atomic_ag": _OVERLAP,
    "tp_comm_atomic_rs": _OVERLAP,
    "overlap_p2p_comm": _TRANSFERS,
    "batch_p2p_comm": _TRANSFERS,
    "batch_p2p_sync": _TRANSFERS,
    "deallocate_pipeline_outputs": _TRANSFERS,
    "perform_initialization": "weights are always initialized; a checkpoint then replaces them",
    "enable_autocast": _PRECISION,
    "autocast_dtype": _PRECISION,
    "params_dtype": _PRECISION,
    "cpu_offloading": _OFFLOAD,
    "cpu_offloading_weights": _OFFLOAD,
    "cpu_offloading_activations": _OFFLOAD,
    "add_position_embedding": "--position-embedding-type sets it",
}
_RECIPE = "MODEL_ARGS"  # the group of flags in a recipe of Megatron's functional tests
_LARGEST = 16 << 20  # bytes of a file: about a hundred thousand settings or data prefixes
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class YamlFlags(NamedTuple):
    """The settings of a file, written as a command line."""

    words: list[str]
    settings: dict[
        str, bool
    ]  # switches at the value that no flag expresses; a checkpoint or the script may have the other
    problems: list[str]
    no_effect: dict[str, str]  # name -> why


def read_yaml(path: str, parser: FlagParser) -> YamlFlags:
    """Return the file as a command line. Raises ConfigError for a file that is not YAML."""
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{YAML_FLAG} {path} needs the package PyYAML (pip install PyYAML)") from None
    try:
        with told_if_nobody_writes(path, YAML_FLAG), open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigError(f"{YAML_FLAG} {path} is longer than {_LARGEST >> 20} MB; give a file of settings")
        root = yaml.compose(content.decode("utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{YAML_FLAG} {path} cannot be read: {error.strerror}; give a YAML file") from None
    except RecursionError:
        raise ConfigError(f"{YAML_FLAG} {path} is nested too deeply; write fewer groups inside groups") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{YAML_FLAG} {path} is not valid YAML: {' '.join(str(error).split())}; correct it") from None
    if root is None:
        return YamlFlags([], {}, [], {})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{YAML_FLAG} {path} must hold `key: value` lines, not a list or a single value")
    reader = _Reader(path, parser)
    reader.read_group(reader.flags_of_test_recipe(root))
    reader.share_heads()
    return YamlFlags(reader.words, reader.settings, reader.problems, reader.no_effect)


def _is_usable(text: str) -> bool:
    """Return whether a text can be a word of a command line: without NUL, and with whole characters."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


class _Reader:
    """Walks the nodes of a YAML file and collects words and problems."""

    def __init__(self, path: str, parser: FlagParser):
        self.path = path
        self.actions = parser.actions_by_flag()
        self.refused = parser.refused
        self.own = {flag for action in parser.own for flag in action.option_strings}
        self.words: list[str] = []
        self.settings: dict[str, bool] = {}
        self.problems: list[str] = []
        self.no_effect: dict[str, str] = {}
        self.lines: dict[str, int] = {}  # setting -> line number
        self.groups: set[int] = set()  # ids of nodes read so far: an alias may repeat a node, or contain itself

    def flags_of_test_recipe(self, root: Any) -> Any:
        """Return the group of flags in a recipe of Megatron's functional tests, else the file itself.

        The other keys are for the program that runs those tests: variables of the environment, the launcher, which curves to
        compare.
        """
        groups = {key.value: value for key, value in root.value if key.id == "scalar"}
        flags = groups.get(_RECIPE)
        if flags is None or flags.id != "mapping":
            return root
        others = [name for name in groups if name != _RECIPE]
        self.no_effect |= dict.fromkeys(others, f"what a run reads of Megatron's test recipes is {_RECIPE}")
        return flags

    def read_group(self, group: Any) -> None:
        """Read the pairs of a mapping.

        A key with a mapping as its value is a group, unless it names a setting. A heading such as `model:` may be
        spelled like a flag of the script or tool that reads the file: it stays a group.
        """
        self.groups.add(id(group))
        for key, value in group.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":
                self._refuse(line, "a list or a group cannot be the name of a setting; give a name")
            elif value.id == "mapping" and id(value) in self.groups:
                self._refuse(line, f"{key.value} repeats a group that was read already; write it once")
            elif value.id == "mapping" and self._flag(key.value) in (None, *self.own):
                self.read_group(value)
            else:
                self._read_setting(str(key.value), value)

    def _refuse(self, line: int, problem: str) -> None:
        self.problems.append(f"{self.path}:{line}: {problem}")

    def _flag(self, key: str) -> str | None:
        """Return the flag that a key names, in any spelling: `num_layers` is --num-layers; None if there is none."""
        field = key.lstrip("-").replace("-", "_")

        # the flag of that name, then the flags that set the field of that name
        name = "--" + _OTHER_NAMES.get(field, key.lstrip("-"))
        candidates = [name, name.replace("_", "-")]
        for flag, action in self.actions.items():
            if action.dest == field and action.const is not False:
                candidates.append(flag)
        for flag in candidates:
            if flag in self.actions and flag not in _OF_THE_COMMAND_LINE:
                return flag
        return None

    def _opposite_flag(self, key: str) -> str | None:
        """Return the switch that turns the field `key` off, such as --disable-bias-linear for add_bias_linear.

        None if there is none.
        """
        field = key.lstrip("-").replace("-", "_")
        opposite = f"--no-{field.removeprefix('apply_').replace('_', '-')}"
        if opposite in self.actions and self.actions[opposite].nargs == 0:
            return opposite
        for flag, action in self.actions.items():
            if action.dest == field and action.const is False:
                return flag
        return None

    def _read_setting(self, key: str, value: Any) -> None:
        if value.tag.endswith(":null"):
            return  # left at its default
        line = value.start_mark.line + 1
        field = key.lstrip("-").replace("-", "_")

        # find the flag
        flag = self._flag(key)
        opposite = self._opposite_flag(key)
        if flag is None and opposite is None:
            if field in _NO_EFFECT:
                self.no_effect[key] = _NO_EFFECT[field]
                return
            near = _HINTS.get(field) or nearest_flag(f"--{key}", list(self.actions), self.refused)
            hint = "; --help lists the known ones"
            if near:
                hint = f"; did you mean {near.lstrip('-')}?"
            if field.replace("_", "-") in [flag.lstrip("-") for flag in _OF_THE_COMMAND_LINE]:
                self._refuse(line, f"{key} is given on the command line, not in a file")
            else:
                self._refuse(line, f"unknown setting {key if key.isprintable() else repr(key)}{hint}")
            return

        # refuse a setting that is given twice
        action = self.actions[flag or opposite]
        if action.dest in self.lines:
            earlier = self.lines[action.dest]
            self._refuse(line, f"{key} was given in line {earlier} already; leave one out")
            return
        self.lines[action.dest] = line

        # write the flag with its value
        is_list = value.id == "sequence"
        items = value.value if is_list else [value]
        unusable = next((item.value for item in items if item.id == "scalar" and not _is_usable(item.value)), None)
        has_groups = value.id == "mapping" or (is_list and any(item.id != "scalar" for item in value.value))
        if has_groups:
            self._refuse(line, f"{key} takes a value or a list of values, not a group of settings")
        elif unusable is not None:
            self._refuse(line, f"{key} is {unusable!r:.60}; no flag can hold such a character; take it out")
        elif action.nargs == 0:
            self._read_switch(key, value, action, when=flag is not None)
        else:
            texts = [item.value for item in items]
            # Only --flag=value allows a value that begins with a hyphen; a flag with several values needs separate words.
            takes_several = action.nargs in ("+", "*") or isinstance(action.nargs, int)
            if takes_several:
                self.words += [action.option_strings[0], *texts]
            else:
                is_pattern = is_list and str(action.metavar).endswith("|LIST")  # one value, written as a list
                text = f"[{','.join(texts)}]" if is_pattern else " ".join(texts)
                self.words.append(f"{flag}={text}")

    def _read_switch(self, key: str, value: Any, action: argparse.Action, *, when: bool) -> None:
        """Add the switch's flag if the value equals `when`, else set the field to its other value.

        when: False for a switch that turns its field off.
        """
        switch = _SWITCH.get(str(value.value).lower())
        if switch is None:
            self._refuse(value.start_mark.line + 1, f"{key} is {value.value!r}; it must be true or false")
        elif switch is when:
            self.words.append(action.option_strings[0])
        elif field_of_action(action) is not None:
            self.settings[action.dest] = not action.const

    def share_heads(self) -> None:
        """Add --group-query-attention to a number of groups.

        num_query_groups of a file is the field of Megatron's TransformerConfig, where the number alone says that heads
        share keys and values.
        """
        groups = "1"
        for word in self.words:
            if word.startswith("--num-query-groups="):
                groups = word.split("=")[1]
                break
        if groups != "1" and "group_query_attention" not in self.lines:
            self.words.append("--group-query-attention")
