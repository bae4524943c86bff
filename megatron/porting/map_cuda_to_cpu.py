"""torch's names of CUDA devices and of NCCL are replaced by what a CPU and gloo can do, for `megatron.on_cpu`.

`map_to_cpu()` replaces them in this process. A function that a release of torch lacks is left out.
"""

import functools
import os
import resource
import sys
import time
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # looks up torch's functions, before they are replaced
import torch.distributed as dist

import megatron
from megatron.core.parallel.device_and_process_group_config import DeviceConfig

_CUDA, _CPU = "cuda", "cpu"
_OTHERS = (str(Path(megatron.__file__).resolve().parent) + os.sep, str(Path(torch.__file__).parent) + os.sep)

# functions of torch with `device=`, which the release of torch may lack
_FACTORIES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized empty_strided
    eye frombuffer full full_like hamming_window hann_window kaiser_window linspace logspace normal ones ones_like rand
    rand_like randint randint_like randn randn_like randperm range scalar_tensor sparse_bsc_tensor sparse_bsr_tensor
    sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor tensor tril_indices triu_indices vander
    zeros zeros_like
"""
_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros"
_NOTHING = """
    _lazy_init caching_allocator_delete empty_cache init ipc_collect reset_accumulated_memory_stats reset_max_memory_allocated
    reset_max_memory_cached reset_peak_memory_stats set_per_process_memory_fraction set_stream set_sync_debug_mode synchronize
"""
_TENSOR_TYPES = "BFloat16 Bool Byte Char Double Float Half Int Long Short"


class Mapped:
    """The calls that were mapped, by name. Those of torch and of this project do not count, and see the truth."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.is_complete = False  # torch's names are replaced

    def is_script(self, depth: int = 2) -> bool:
        """Return whether the function `depth` calls up is neither torch's nor this package's."""
        return not sys._getframe(depth).f_code.co_filename.startswith(_OTHERS)

    def count(self, name: str, depth: int = 3) -> None:
        """Count a call of the script; depth: how many calls up it stands."""
        if not torch.compiler.is_compiling() and self.is_script(depth):
            self.calls[name] += 1

    def report(self) -> str:
        """Return one line with what was mapped."""
        names = [name if count == 1 else f"{name} ({count})" for name, count in sorted(self.calls.items())]
        return f"megatron.on_cpu: done by the CPU: {', '.join(names) or 'nothing; the script calls no CUDA'}"


mapped = Mapped()


# ---- devices


def is_device(place: Any) -> bool:
    """Return whether `place` means a CUDA device: "cuda", "cuda:1", torch.device("cuda") or a number."""
    if isinstance(place, bool):
        return False
    return isinstance(place, int) or str(place).split(":")[0] == _CUDA


def cpu_for(place: Any) -> Any:
    """Return the CPU's name for a CUDA device, and anything else as it is."""
    return _CPU if is_device(place) else place


def _with_cpu(options: dict[str, Any], name: str) -> dict[str, Any]:
    """Return keywords with the CPU for a CUDA device, and without pinned memory."""
    if is_device(options.get("device")):
        mapped.count(f"{name}(device=)", 4)
        options["device"] = _CPU
    if options.get("pin_memory"):
        mapped.count("pin_memory", 4)
        options["pin_memory"] = False
    return options


def _factory(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return function(*args, **(_with_cpu(options, name) if options else options))

    return call


def _moving(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `to`, of a tensor or a module: its device may be the first argument or a keyword."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if args and not isinstance(args[0], torch.Tensor) and is_device(args[0]):
            mapped.count(name)
            args = (_CPU, *args[1:])
        return function(self, *args, **(_with_cpu(options, name) if options else options))

    return call


def _same(name: str) -> Callable[..., Any]:
    """Return a method that returns its object, which is on the CPU already."""

    def call(self: Any, *_: Any, **__: Any) -> Any:
        mapped.count(name)
        return self

    return call


def _answer(name: str, value: Any) -> Callable[..., Any]:
    """Return a function of a fixed answer, or of what a function without arguments computes."""

    def call(*_: Any, **__: Any) -> Any:
        mapped.count(name)
        return value() if callable(value) else value

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


def _answer_by_caller(name: str, value: Any, truth: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose answer is `value` for the script, and the truth for torch and this project."""

    @functools.wraps(truth)
    def call(*args: Any, **options: Any) -> Any:
        if not mapped.is_script():
            return truth(*args, **options)
        mapped.calls[name] += 1
        return value() if callable(value) else value

    return call


# ---- what replaces objects of a device


class Stream:
    """A stream of a device whose work is done when the call returns."""

    cuda_stream = stream_id = device_index = 0
    priority = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        mapped.count("torch.cuda.Stream")
        self.device = device
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """A moment. It has passed once it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        mapped.count("torch.cuda.Event")
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        del stream
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        del stream

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds from this moment to `end`."""
        return 1000 * (end._seconds - self._seconds)


class Context:
    """`with torch.cuda.device(1):`, `with torch.cuda.stream(s):`."""

    def __init__(self, *_: Any) -> None:
        mapped.count(f"torch.cuda.{type(self).__name__}")

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class _Runtime:
    """`torch.cuda.cudart()`: each function answers 0, success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


class _MemoryStats(OrderedDict):
    """`torch.cuda.memory_stats()`; a number that a CPU does not have is 0."""

    def __missing__(self, key: str) -> int:
        return 0


def _resident() -> int:
    """Return the resident memory of this process, in bytes."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return _peak()


def _peak() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _free_and_total() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    return (page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else total), total


def _stats() -> _MemoryStats:
    now, peak = _resident(), _peak()
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    return _MemoryStats(
        {f"{kind}.all.{at}": value for kind in kinds for at, value in (("current", now), ("peak", peak))}
    )


def _properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="CPU",
        major=8,
        minor=0,
        total_memory=_free_and_total()[1],
        multi_processor_count=os.cpu_count(),
        warp_size=32,
    )


def _device_count() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)


# ---- replace them in torch


def map_to_cpu() -> None:
    """Replace in torch what asks for CUDA or NCCL, for this process, once."""
    if mapped.is_complete:
        return
    mapped.is_complete = True
    _map_tensors()
    _map_device_module()
    _map_precision()
    if dist.is_available():
        _map_distributed()
    _map_flags()


def _map_tensors() -> None:
    """Tensors, modules, generators and files of them."""
    builtins = torch.jit._builtins
    for name in _FACTORIES.split():
        function = getattr(torch, name, None)
        if function is None:
            continue
        call = _factory(function, f"torch.{name}")
        setattr(torch, name, call)
        operator = builtins._find_builtin(function)
        if operator:  # a scripted function that calls it is compiled as before
            builtins._register_builtin(call, operator)
    for name in _METHODS.split():
        if hasattr(torch.Tensor, name):
            setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name), f"Tensor.{name}"))
    torch.Tensor.to = _moving(torch.Tensor.to, "Tensor.to")
    torch.nn.Module.to = _moving(torch.nn.Module.to, "Module.to")
    torch.nn.Module.to_empty = _factory(torch.nn.Module.to_empty, "Module.to_empty")
    torch.Tensor.cuda, torch.nn.Module.cuda = _same("Tensor.cuda"), _same("Module.cuda")
    torch.Tensor.pin_memory = _same("Tensor.pin_memory")
    torch.Tensor.record_stream = _answer("Tensor.record_stream", None)
    for storage in (torch.UntypedStorage, torch.TypedStorage):
        storage.cuda = _same("Storage.cuda")
        storage.pin_memory = _same("Storage.pin_memory")

    cast = torch.Tensor.type

    @functools.wraps(cast)
    def as_type(self: Any, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            mapped.count("Tensor.type")
            dtype = dtype.replace("torch.cuda.", "torch.")
        return cast(self, *([] if dtype is None else [dtype]), *args, **options)

    torch.Tensor.type = as_type

    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(map_location, Mapping):
            map_location = {saved: cpu_for(place) for saved, place in map_location.items()}
        elif map_location is None:
            map_location = _CPU
        elif is_device(map_location):
            mapped.count("torch.load, its map_location")
            map_location = _CPU
        return load(f, map_location, *args, **options)

    torch.load = load_on_cpu
    make = torch.Generator
    torch.Generator = _class_like(make, lambda device=_CPU: make(cpu_for(device)), "torch.Generator")

    # torch.device(0) is a CUDA device on a cluster, and an error on a CPU
    device = torch.device

    def device_of(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = (_CUDA, *args)
        return device(*args, **options)

    torch.device = _class_like(device, device_of, None)
    context = torch.utils._device.DeviceContext.__init__  # `with torch.device("cuda"):`

    def enter(self: Any, device: Any) -> None:
        context(self, torch.device(cpu_for(device)))

    torch.utils._device.DeviceContext.__init__ = enter
    set_default = torch.set_default_device
    torch.set_default_device = lambda device: set_default(cpu_for(device))
    set_type = torch.set_default_tensor_type

    def set_default_type(t: Any) -> None:
        set_type(t.replace("torch.cuda.", "torch.") if isinstance(t, str) else t)

    torch.set_default_tensor_type = set_default_type


def _class_like(original: type, make: Callable[..., Any], name: str | None) -> type:
    """Return a class whose call is `make`, and whose instances are those of `original`, a class that cannot be derived."""

    class Kind(type):
        def __call__(cls, *args: Any, **options: Any) -> Any:
            if name is not None:
                mapped.count(name)
            return make(*args, **options)

        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, original)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, original)

        def __getattr__(cls, attribute: str) -> Any:
            return getattr(original, attribute)

        def __eq__(cls, other: object) -> bool:
            return other is cls or other is original

        def __hash__(cls) -> int:
            return hash(original)

    return Kind(original.__name__, (), {"__module__": original.__module__, "__doc__": original.__doc__})


def _map_device_module() -> None:
    """The names of `torch.cuda`."""
    cuda = torch.cuda
    number = 0

    def set_device(device: Any) -> None:
        nonlocal number
        mapped.count("torch.cuda.set_device")
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:
            number = index

    cuda.set_device = set_device
    cuda.current_device = _answer("torch.cuda.current_device", lambda: number)
    for name in _NOTHING.split():
        setattr(cuda, name, _answer(f"torch.cuda.{name}", None))
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": _device_count,
        "is_bf16_supported": True,
    }
    for name, value in answers.items():
        setattr(cuda, name, _answer_by_caller(f"torch.cuda.{name}", value, getattr(cuda, name)))

    # what an A100 answers, so that the script takes the way that it takes on a cluster
    stream = Stream()
    fixed: dict[str, Any] = {
        "get_device_capability": (8, 0),
        "get_device_name": "CPU",
        "get_device_properties": _properties,
        "get_arch_list": list,
        "can_device_access_peer": True,
        "is_current_stream_capturing": False,
        "current_stream": lambda: stream,
        "default_stream": lambda: stream,
        "current_blas_handle": 0,
        "utilization": 0,
        "cudart": _Runtime,
        "memory_allocated": _resident,
        "memory_reserved": _resident,
        "memory_cached": _resident,
        "max_memory_allocated": _peak,
        "max_memory_reserved": _peak,
        "max_memory_cached": _peak,
        "mem_get_info": _free_and_total,
        "memory_stats": _stats,
        "memory_summary": lambda: f"{_resident()} bytes resident, {_peak()} at most",
        "memory_snapshot": list,
    }
    for name, value in fixed.items():
        setattr(cuda, name, _answer(f"torch.cuda.{name}", value))
    for name in ("_record_memory_history", "_dump_snapshot"):
        setattr(cuda.memory, name, _answer(f"torch.cuda.memory.{name}", None))
    for module in (cuda.memory, cuda.random, cuda.streams):
        for name in vars(module).keys() & vars(cuda).keys():
            if not name.startswith("__"):
                setattr(module, name, getattr(cuda, name))

    for name in _TENSOR_TYPES.split():
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    cuda.Stream = cuda.ExternalStream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    for name in ("device", "device_of", "stream", "StreamContext"):
        setattr(cuda, name, type(name, (Context,), {}))
    cuda._lazy_call = lambda call, **_: call()

    # random states
    generator = torch.default_generator
    cuda.default_generators = (generator,) * max(_device_count(), 1)
    draws: dict[str, Callable[..., Any]] = {
        "manual_seed": lambda seed: generator.manual_seed(int(seed)) and None,
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)) and None,
        "seed": lambda: generator.seed() and None,
        "seed_all": lambda: generator.seed() and None,
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * len(cuda.default_generators),
        "set_rng_state_all": lambda new_states: torch.set_rng_state(new_states[0]),
    }
    for name, function in draws.items():
        call = _counted(function, f"torch.cuda.{name}")
        setattr(cuda, name, call)
        setattr(cuda.random, name, call)

    # markers for a profiler
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        setattr(cuda.nvtx, name, _answer(f"torch.cuda.nvtx.{name}", 0))
    cuda.nvtx.range = _marked
    for name in ("start", "stop", "init"):
        setattr(cuda.profiler, name, _answer(f"torch.cuda.profiler.{name}", None))
    cuda.profiler.profile = _marked


def _counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        mapped.count(name)
        return function(*args, **options)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


@contextmanager
def _marked(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _map_precision() -> None:
    """Automatic precision: the CPU's, in float16 where none is named, as on a GPU."""
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__

    @functools.wraps(enter)
    def init_autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
        if device_type == _CUDA:
            mapped.calls["autocast"] += 1
            device_type, dtype = _CPU, dtype or torch.float16
        enter(self, device_type, dtype, *args, **options)

    autocast.__init__ = init_autocast
    scaler = torch.amp.grad_scaler.GradScaler
    make = scaler.__init__

    @functools.wraps(make)
    def init_scaler(self: Any, device: str = _CUDA, *args: Any, **options: Any) -> None:
        if device == _CUDA:
            mapped.calls["GradScaler"] += 1
        make(self, cpu_for(device), *args, **options)

    scaler.__init__ = init_scaler
    for module in (torch.amp, torch.amp.autocast_mode):
        for name in ("custom_fwd", "custom_bwd"):
            setattr(module, name, _with_device_type(getattr(module, name)))
    for name in ("custom_fwd", "custom_bwd"):
        on_cpu = functools.partial(getattr(torch.amp, name), device_type=_CPU)
        setattr(torch.cuda.amp, name, on_cpu)
        setattr(torch.cuda.amp.autocast_mode, name, on_cpu)


def _with_device_type(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "device_type" in options:
            options["device_type"] = cpu_for(options["device_type"])
        return function(*args, **options)

    return call


def _map_distributed() -> None:
    """NCCL's groups are gloo's."""
    c10d = dist.distributed_c10d

    def with_gloo(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        """position: of `backend` among the arguments."""
        name = f"torch.distributed.{function.__name__}"

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            backend = args[position] if len(args) > position else options.get("backend")
            is_first = position == 0
            if "nccl" in str(backend) or (is_first and backend is None):
                mapped.count(f"{name}: {'nccl' if backend else 'its default'} -> gloo")
                args = args[:position] + ("gloo",) + args[position + 1 :] if len(args) > position else args
                if len(args) <= position:
                    options["backend"] = "gloo"
            options.pop("pg_options", None)
            options.pop("device_id", None)
            return function(*args, **options)

        return call

    replaced = {
        "init_process_group": with_gloo(dist.init_process_group, 0),
        "new_group": with_gloo(dist.new_group, 2),
        "is_nccl_available": _answer_by_caller("torch.distributed.is_nccl_available", True, dist.is_nccl_available),
    }
    barrier = dist.barrier

    @functools.wraps(barrier)
    def barrier_of_gloo(*args: Any, **options: Any) -> Any:
        options.pop("device_ids", None)
        return barrier(*args, **options)

    replaced["barrier"] = barrier_of_gloo
    for name, call in replaced.items():
        setattr(dist, name, call)
        setattr(c10d, name, call)
    if not hasattr(dist, "ProcessGroupNCCL"):
        options = type("Options", (types.SimpleNamespace,), {"config": types.SimpleNamespace()})
        dist.ProcessGroupNCCL = c10d.ProcessGroupNCCL = types.SimpleNamespace(Options=options)

    mesh = dist.device_mesh
    for name in ("init_device_mesh", "DeviceMesh"):
        original = getattr(mesh, name)
        if isinstance(original, type):
            make = original.__init__

            @functools.wraps(make)
            def init_mesh(self: Any, device_type: str, *args: Any, make: Any = make, **options: Any) -> None:
                make(self, cpu_for(device_type), *args, **options)

            original.__init__ = init_mesh
            continue

        @functools.wraps(original)
        def mesh_of_cpus(device_type: str, *args: Any, original: Any = original, **options: Any) -> Any:
            return original(cpu_for(device_type), *args, **options)

        setattr(mesh, name, mesh_of_cpus)
        if hasattr(dist, name):
            setattr(dist, name, mesh_of_cpus)

    wrapper = torch.nn.parallel.DistributedDataParallel
    wrap = wrapper.__init__

    @functools.wraps(wrap)
    def init_wrapper(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
    ) -> None:
        if device_ids or output_device is not None:
            mapped.count("DistributedDataParallel(device_ids=)")
        wrap(self, module, None, None, *args, **options)

    wrapper.__init__ = init_wrapper


def _map_flags() -> None:
    """Map the flags of this project that name a device or its back end; a cluster's launch script gives them."""
    check = DeviceConfig.__post_init__

    def map_and_check(self: DeviceConfig) -> None:
        values = {"device": {_CUDA: _CPU}, "distributed_backend": {"nccl": "gloo"}}
        for name, instead in values.items():
            given = getattr(self, name)
            if given in instead:
                flag = f"--{name.replace('_', '-')}"
                mapped.calls[f"{flag} {given} -> {instead[given]}"] = 1
                object.__setattr__(self, name, instead[given])
        check(self)

    DeviceConfig.__post_init__ = map_and_check
