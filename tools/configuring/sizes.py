"""Published sizes of models by family and name, with their flags for pretrain_gpt.py or pretrain_bert.py."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.base.dataclass_flags import flag_of
from megatron.training.model_flops_of_unbuilt_layouts import ModelShape


class Size(NamedTuple):
    """Numbers of a published model."""

    layers: int
    hidden: int
    heads: int
    vocab: int  # without padding
    seq: int  # longest sequence in the publication
    groups: int = 0  # key/value heads; 0: one for each head
    ffn: int = 0  # width inside the MLP; 0: the family's multiple of the hidden size
    tied: bool = True  # the output layer shares the embedding weight
    rotary_base: int = 10000
    head_width: int = 0  # 0: hidden / heads
    experts: int = 0  # in every layer
    topk: int = 0  # experts of a token
    expert_ffn: int = 0  # width inside an expert


_GPT2, _GPT3 = (50257, 1024), (50257, 2048)
_LLAMA3 = (128256, 8192)
SIZES: dict[str, dict[str, Size]] = {
    "gpt": {
        "tiny": Size(4, 128, 4, 1000, 128),
        # GPT-2 (Radford et al. 2019), table 2
        "124m": Size(12, 768, 12, *_GPT2),
        "355m": Size(24, 1024, 16, *_GPT2),
        "774m": Size(36, 1280, 20, *_GPT2),
        "1.6b": Size(48, 1600, 25, *_GPT2),
        # arXiv:2104.04473, table 1, and arXiv:2005.14165, table 2.1, for 175b
        "3.6b": Size(30, 3072, 32, *_GPT3),
        "7.5b": Size(36, 4096, 32, *_GPT3),
        "18.4b": Size(40, 6144, 48, *_GPT3),
        "39.1b": Size(48, 8192, 64, *_GPT3),
        "76.1b": Size(60, 10240, 80, *_GPT3),
        "145.6b": Size(80, 12288, 96, *_GPT3),
        "175b": Size(96, 12288, 96, *_GPT3),
    },
    "bert": {
        "tiny": Size(4, 128, 4, 1000, 128),
        # arXiv:1810.04805, section 3
        "110m": Size(12, 768, 12, 30522, 512),
        "340m": Size(24, 1024, 16, 30522, 512),
    },
    "llama": {
        "tiny": Size(4, 128, 4, 1000, 128, 2, 384, False),
        # arXiv:2407.21783, table 3, and the model cards of 3.2
        "1.2b": Size(16, 2048, 32, *_LLAMA3, 8, 8192, True, 500000),
        "3.2b": Size(28, 3072, 24, *_LLAMA3, 8, 8192, True, 500000),
        "8b": Size(32, 4096, 32, *_LLAMA3, 8, 14336, False, 500000),
        "70.6b": Size(80, 8192, 64, *_LLAMA3, 8, 28672, False, 500000),
        "405.9b": Size(126, 16384, 128, *_LLAMA3, 8, 53248, False, 500000),
        # arXiv:2307.09288, section 2.2
        "6.7b": Size(32, 4096, 32, 32000, 4096, 0, 11008, False),
        "13b": Size(40, 5120, 40, 32000, 4096, 0, 13824, False),
    },
    "mixtral": {
        "tiny": Size(4, 128, 4, 1000, 128, 2, 192, False, 1000000, 32, 8, 2, 192),
        # arXiv:2401.04088, table 1
        "46.7b": Size(32, 4096, 32, 32000, 8192, 8, 14336, False, 1000000, 128, 8, 2, 14336),
    },
    "qwen3-moe": {
        "tiny": Size(4, 128, 4, 1000, 128, 2, 192, False, 1000000, 32, 16, 4, 48),
        # arXiv:2505.09388, table 2
        "30.5b": Size(48, 2048, 32, 151936, 4096, 4, 6144, False, 1000000, 128, 128, 8, 768),
    },
}
# The flags of families that are Llamas in their norms, positions and gates.
_LLAMAS = {
    "llama": {},
    "mixtral": {"moe_aux_loss_coeff": 0.02},
    "qwen3-moe": {
        "qk_layernorm": True,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_aux_loss_coeff": 0.001,
    },
}


def nearest(family: str, name: str) -> str:
    """Return the size whose name is nearest in parameters, such as 6.7b for 7b; "tiny" if `name` is no number."""
    return min(SIZES[family], key=lambda size: abs(_number(size) - _number(name)))


def _number(name: str) -> float:
    """Return the parameters by a name: 1.2e9 for 1.2b; 0 for tiny."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mb])", name.lower())
    if match is None:
        return 0.0
    return float(match[1]) * {"m": 1e6, "b": 1e9}[match[2]]


@dataclass(frozen=True)
class Model:
    """A model of one of the families of SIZES."""

    family: str
    size: Size

    @property
    def script(self) -> str:
        return "pretrain_bert" if self.family == "bert" else "pretrain_gpt"

    @property
    def is_llama(self) -> bool:
        return self.family in _LLAMAS

    @property
    def ffn(self) -> int:
        """Width inside the MLP.

        The default is 4 times the hidden size. A llama has three matrices instead of two, so two thirds of that width,
        rounded down to a multiple of 64.
        """
        if self.size.ffn:
            return self.size.ffn
        if self.is_llama:
            return max(64, 8 * self.size.hidden // 3 // 64 * 64)
        return 4 * self.size.hidden

    def shape(self, seq_length: int) -> ModelShape:
        """Return the sizes that determine its FLOPs."""
        size = self.size
        head_width = size.head_width or size.hidden // size.heads
        width = head_width * size.heads
        kv_width = head_width * (size.groups or size.heads)
        experts = {}
        if size.experts:
            experts["expert_layers"] = size.layers
            experts["expert_parameters"] = size.hidden * size.experts + size.topk * self._parameters_of_expert
        return ModelShape(
            size.layers, size.hidden, width, kv_width, self.ffn, size.vocab, seq_length, self.is_llama, **experts
        )

    @property
    def _parameters_of_expert(self) -> int:
        return 3 * self.size.hidden * self.size.expert_ffn

    @property
    def parameters_of_experts(self) -> int:
        """Elements of the matrices of all experts of all layers."""
        return self.size.layers * self.size.experts * self._parameters_of_expert

    @property
    def parameters(self) -> int:
        """Elements of all matrices and of the embedding: without positions, biases, norms and padding."""
        untied_embedding = 0 if self.size.tied else self.size.hidden * self.size.vocab
        visited = self.size.layers * self.size.topk * self._parameters_of_expert
        return self.shape(1).multiplied_parameters - visited + self.parameters_of_experts + untied_embedding

    def flags(self, seq_length: int) -> list[str]:
        """Return its flags on a command line."""
        size = self.size
        settings: dict[str, object] = {"num_layers": size.layers, "hidden_size": size.hidden}
        settings |= {"num_attention_heads": size.heads, "seq_length": seq_length}
        if self.is_llama or size.ffn:
            settings["ffn_hidden_size"] = self.ffn
        if size.groups:
            settings |= {"group_query_attention": True, "num_query_groups": size.groups}
        if size.head_width:
            settings["kv_channels"] = size.head_width
        if self.is_llama:
            settings |= {"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
            settings |= {"rotary_base": size.rotary_base, "disable_bias_linear": True, "hidden_dropout": 0}
            settings |= _LLAMAS[self.family]
        if size.experts:
            settings |= {"num_experts": size.experts, "moe_router_topk": size.topk}
            settings |= {"moe_ffn_hidden_size": size.expert_ffn, "moe_token_dispatcher_type": "alltoall"}
            settings["moe_grouped_gemm"] = True
        if not size.tied:
            settings["untie_embeddings_and_output_weights"] = True
        settings["attention_dropout"] = 0  # attention's fused kernels have no dropout
        return words(settings)


def words(settings: dict[str, object]) -> list[str]:
    """Return settings as the words of a command line. True gives the flag alone; None and False leave it out."""
    result = []
    for name, value in settings.items():
        if value is None or value is False:
            continue
        result.append(flag_of(name))
        if value is not True:
            result.append(str(value))
    return result
