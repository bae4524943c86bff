"""pretrain_gpt.py in a process that may have so many bytes of memory of its own, and no more: limited.py BYTES FLAGS...

The limit (RLIMIT_DATA) counts every private writable page from when it is asked for, torch's own and those of stacks too. Pages of
files that the system caches are the system's: the file tier asks for none of its own but through buffers, which count.
"""

import resource
import runpy
import sys
from pathlib import Path

limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
runpy.run_path(str(Path(__file__).resolve().parents[2] / "pretrain_gpt.py"), run_name="__main__")
