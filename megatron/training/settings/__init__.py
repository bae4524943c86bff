"""The settings of a run: `config` (one dataclass per component), `rules`, flags of scripts and of Megatron, help, YAML.

May import: core, and nothing else of training but `watch.watch_config`. To add a flag: add a field to its component's dataclass.
"""
