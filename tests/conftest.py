import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
torch.set_num_threads(1)
