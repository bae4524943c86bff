"""Choose the layout of a job: `python -m megatron.configure [--help]` runs tools/configure.py."""

import runpy

from megatron.console_scripts import program_of, programs_folder

if __name__ == "__main__":
    runpy.run_path(str(program_of("configure", programs_folder())), run_name="__main__")
