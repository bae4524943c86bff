"""Run a cluster's script on a CPU, unchanged: `python -m megatron.on_cpu SCRIPT [flags of the script]`.

For scripts and forks that call `torch.cuda` themselves; the training scripts of this project need none of it. Under a
launcher: `torchrun --nproc-per-node 2 -m megatron.on_cpu SCRIPT [flags]`. `-m MODULE` in place of SCRIPT runs a module.

    devices, `.cuda()`, `.to("cuda")`   the CPU; `current_device()` is the device that was set
    streams, events, graphs' queries    no stream but the program's order; events measure time
    memory                              `memory_allocated` is the resident memory of the process
    random states of the device         the CPU's
    autocast, GradScaler                those of the CPU, with the precision that was asked for
    nccl                                gloo

Nothing else is replaced: `tensor.device` is the CPU, and compiled extensions, CUDA graphs and Triton stay unavailable. The exit
code, the traceback and `sys.argv` are those of the script started by itself. The first rank says on stderr at the end
what was mapped, with the number of calls. `megatron` is this project's, also for a script with another beside it.
"""

import atexit
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from megatron.core.base.version import version_text

_USAGE = "usage: python -m megatron.on_cpu [--help] [--version] SCRIPT | -m MODULE [flags of the script]"


# ---- run the script


def _hide_own_frames() -> None:
    """A traceback begins with the script's first line, whatever hook the script has installed."""
    hook = sys.excepthook
    own = (__file__, "<frozen runpy>", runpy.__file__)

    def show(kind: Any, error: Any, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in own:
            trace = trace.tb_next
        hook(kind, error.with_traceback(trace), trace)

    sys.excepthook = show


def main(words: Sequence[str] | None = None) -> int:
    """Run the script or module with its flags; return 2 if there is none. Its exceptions pass through."""
    words = list(sys.argv[1:] if words is None else words)
    # torch.distributed.launch puts its flag behind the first word that it starts
    by_launcher = []
    while words and words[0].startswith(("--local-rank", "--local_rank")):
        by_launcher.append(words.pop(0))
    if not words or words[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{__doc__}", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(version_text())
        return 0
    is_module = words[0] == "-m"
    if is_module:
        del words[0]
    if not words or words[0].startswith("-"):
        print(f"{_USAGE}\nmegatron.on_cpu: no script is named{f', but {words[0]}' if words else ''}", file=sys.stderr)
        return 2
    script, flags = words[0], [*by_launcher, *words[1:]]
    if not is_module:
        try:
            with io.open_code(script) as file:
                source = file.read()
        except OSError as error:
            print(
                f"megatron.on_cpu: cannot open {script}: {error.strerror}; give the path of a Python file",
                file=sys.stderr,
            )
            return 2

    # before torch looks for devices
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""
    mapping = import_module("megatron.porting.map_cuda_to_cpu")
    mapping.map_to_cpu()
    if os.environ.get("RANK", "0") == "0":
        atexit.register(lambda: print(mapping.mapped.report(), file=sys.stderr, flush=True))
    sys.argv = [script, *flags]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(script))
            path = os.path.abspath(script)
            module = types.ModuleType("__main__")
            module.__file__ = path
            module.__builtins__ = __builtins__
            sys.modules["__main__"] = module
            exec(compile(source, path, "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException:
        _hide_own_frames()
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
