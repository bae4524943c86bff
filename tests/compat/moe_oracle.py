"""Runs the MoE layer of a folder's Megatron core on the cases of a file, on a CPU in one process, and writes what it computes.

    TORCHDYNAMO_DISABLE=1 python -I moe_oracle.py FOLDER CASES.pt ANSWERS.pt

A script of its own, in a process of its own: that package is called `megatron`, as ours is. A case is a dict: options
(Megatron's names), x and factors [s, b, h], size: samples of a microbatch, weights by the names of `named_weights`, expert_bias [E] or None.
Or it is a call of a function of its moe_utils: function, inputs, options; the answer is what it returns.
"""

import contextlib
import functools
import importlib.machinery
import os
import sys
import types
import typing
import warnings

folder, cases_path, answers_path = sys.argv[1:4]
sys.path[:] = [folder] + [p for p in sys.path if not os.path.exists(os.path.join(p, "megatron", "__init__.py"))]
warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils._triton import has_triton_package  # noqa: E402

# ---------------------------------------------------------------- what the package imports or asks of CUDA


class Anything:
    """A decorator that changes nothing, and whatever else a module of kernels says while it is imported."""

    def __call__(self, *inputs, **options):
        return inputs[0] if inputs and callable(inputs[0]) else self

    def __getattr__(self, name):
        return self

    __getitem__ = __call__
    __enter__ = __call__

    def __exit__(self, *error):
        pass


class TritonStub(types.ModuleType):
    __version__ = "3.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class TritonFinder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "triton" else None

    def create_module(self, spec):
        return TritonStub(spec.name)

    def exec_module(self, module):
        pass


has_triton_package()  # torch remembers that there is none
sys.meta_path.insert(0, TritonFinder())
if not hasattr(typing, "override"):  # before Python 3.12
    typing.override = lambda function: function
torch.cuda.current_device = lambda: "cpu"
torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = lambda *inputs, **options: Anything()
torch.cuda.stream = lambda stream: contextlib.nullcontext()

import megatron.core  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import moe_utils, router  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

assert megatron.core.__file__.startswith(folder), megatron.core.__file__
moe_utils.te_general_gemm = None  # a NameError without Transformer Engine
# a sum over one rank is a view, to which experts with a bias add in place: an error of torch without a copy
layers.reduce_from_tensor_model_parallel_region = lambda x, *inputs, **options: x.clone()
recorded: list[tuple[str, float]] = []


def record(name, value, *_, **__):
    recorded.append((name, value.item()))


router.save_to_aux_losses_tracker = record  # to 0.17
router.get_moe_metrics_tracker = lambda: types.SimpleNamespace(record=record)  # from 0.18
topk = torch.topk


def first_of_equal(x, k, dim=-1, largest=True, sorted=True):
    """torch.topk leaves open which of equal values it takes; of whole numbers, the map of --moe-token-drop-policy position, the
    first, which is one of the answers that it may give."""
    if x.is_floating_point():
        return topk(x, k, dim, largest, sorted)
    values, indices = x.sort(dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


torch.topk = first_of_equal


# ---------------------------------------------------------------- a case


def named_weights(layer) -> dict[str, list[torch.Tensor]]:
    """Our names -> the parameters that are stacked in ours."""
    experts = layer.experts.local_experts
    named = {"router.weight": [layer.router.weight]}
    for linear in ("linear_fc1", "linear_fc2"):
        named[f"experts.{linear}.weight"] = [getattr(expert, linear).weight for expert in experts]
        if layer.config.add_bias_linear:
            named[f"experts.{linear}.bias"] = [getattr(expert, linear).bias for expert in experts]
    if layer.config.add_bias_linear:
        named["router.bias"] = [layer.router.bias]
    if layer.shared_experts is not None:
        for linear in ("linear_fc1", "linear_fc2"):
            named[f"shared_experts.{linear}.weight"] = [getattr(layer.shared_experts, linear).weight]
        if layer.config.moe_shared_expert_gate:
            named["shared_experts.gate_weight"] = [layer.shared_experts.gate_weight]
    return named


def answer(case: dict) -> dict:
    options = dict(case["options"])
    if "function" in case:
        return getattr(moe_utils, case["function"])(*case["inputs"], **options)
    if options.pop("swiglu", True):
        options |= {"gated_linear_unit": True, "activation_func": functional.silu}
    else:  # the GELU of its fused kernel; without fusion it takes the exact one
        options["activation_func"] = functools.partial(functional.gelu, approximate="tanh")
    config = TransformerConfig(
        num_layers=1, use_cpu_initialization=True, perform_initialization=False, bias_activation_fusion=False, **options
    )
    spec = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    layer = MoELayer(config, submodules, layer_number=1)
    layer.set_layer_number(1)
    named = named_weights(layer)
    with torch.no_grad():
        for name, parameters in named.items():
            whole = case["weights"][name]
            parts = [whole] if len(parameters) == 1 else whole.unbind()
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.reshape(parameter.shape))
        if case["expert_bias"] is not None:
            layer.router.expert_bias.copy_(case["expert_bias"])
    x, factors = case["x"].clone().requires_grad_(), case["factors"]
    samples, size = x.shape[1], case["size"]
    moe_utils.MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(size / samples))
    recorded.clear()
    outputs = []
    for i in range(0, samples, size):
        y, bias = layer(x[:, i : i + size])
        outputs.append(y if bias is None else y + bias)
        (outputs[-1] * factors[:, i : i + size]).sum().div(factors.numel()).backward()
    found = {"output": torch.cat(outputs, 1).detach(), "input": x.grad}
    for name, parameters in named.items():
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        found[name] = torch.stack(gradients) if len(gradients) > 1 else gradients[0]
    for name in {name for name, _ in recorded}:
        found[name] = torch.tensor([value for other, value in recorded if other == name])
    if case["expert_bias"] is not None:
        counts, before = layer.router.local_tokens_per_expert, layer.router.expert_bias
        found["counts"] = counts.clone()
        found["expert_bias"] = moe_utils.get_updated_expert_bias(
            counts.clone(), before.clone(), config.moe_router_bias_update_rate
        )
    return found


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
torch.save([answer(case) for case in torch.load(cases_path)], answers_path)
