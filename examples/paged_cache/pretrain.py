"""pretrain_gpt.py with a cache of one's own for generation: `--kv-cache paged` of tools/generate.py.

python examples/paged_cache/pretrain.py ... --save DIR          trains as pretrain_gpt.py does
python tools/generate.py --load DIR --model examples/paged_cache/pretrain.py --kv-cache paged --prompt "..."
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paged_cache import PagedCache

from megatron.core.enums import ModelType
from megatron.core.ops.attention.kv_cache import CACHES
from megatron.training import pretrain
from pretrain_gpt import GPTModel, forward_step, model_provider, train_valid_test_datasets_provider

CACHES["paged"] = PagedCache

if __name__ == "__main__":
    pretrain(
        train_valid_test_datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        rules=GPTModel.rules,
    )
