"""The settings of a run: the components' dataclasses side by side, the rules between them, and every source of flags.

Lives here: `config` (the configuration), `rules` (what cannot stand together), the flags of scripts and of Megatron, help, YAML.
May import: core, and nothing else of training. To add a flag: a field of the dataclass of the component that it configures.
"""
