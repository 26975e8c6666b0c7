"""Wrappers of torch's private interfaces; `models/hf_internals.py` is the counterpart for transformers.

Callers use the functions below instead of the interfaces, except for attributes of modules and tensors that are as old
as torch. `tests/torch_surfaces.py` lists every interface that any file reads, and `tests/test_torch_internals.py` has a
contract test of each function: both fail if a new minor version of torch moves an interface. `make versions` runs them
on the oldest and the newest torch allowed; `check` refuses others.

| interface | used for | differences between versions |
|---|---|---|
| FSDP2's state and parameter groups | late gradients, a call that raised half-way | 2.11: one group per unit |
| `_dump_fr_trace_json` | the watchdog: which collective waits | without it, no report |
| `_c10d_functional` operators | collectives inside compiled blocks | Python wrappers renamed in 2.12 |
| autograd's callbacks and version counters | copies of parameters in bf16 | |
| kernels of `c10d`'s operators | collectives over shared memory on a CPU | without them, gloo |
| `F.grouped_mm` | experts | 2.11: `torch._grouped_mm`; without it, a loop |
| `_scaled_grouped_mm` | experts in fp8 | without it, emulated |
| `_flash_attention_*` | packed attention with its log-sum-exp | |
| history of CUDA's allocator, Dynamo's metrics | `fivefold rehearse` | no other use |
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from fivefold.core.errors import UserError

if TYPE_CHECKING:  # importing it takes a second, and only training needs it
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

SUPPORTED = "2.11 to 2.14"

# Operators -----------------------------------------------------------------------------------------------------------

collectives = torch.ops._c10d_functional  # with the same operator names in 2.11 to 2.14

cpu_attention_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
flash_attention_forward = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward

# (rows [S, I], weights [E, I, O], offs=[E] int32 ends) -> [S, O]. None: not in this torch.
grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

# (rows [S, K] and weights [E, K, N] in e4m3, their decoding scales [S] and [E, N], offs=[E] int32 ends, out_dtype,
# use_fast_accum) -> [S, N]. `F.scaled_grouped_mm` calls the same kernel, but lacks a meta kernel in torch 2.13.
scaled_grouped_mm: Callable[..., Tensor] | None = getattr(torch, "_scaled_grouped_mm", None)

# Operators with saved outputs under selective recompute: matmuls of linears, and fused attention.
_DEAR = (
    "mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2", "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
DEAR = frozenset(getattr(torch.ops.aten, name) for name in _DEAR if hasattr(torch.ops.aten, name))
SUMS = frozenset({collectives.reduce_scatter_tensor, collectives.all_reduce})


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor as a scalar, in few kernels (`torch._foreach_norm`)."""
    return list(torch._foreach_norm(list(tensors)))


def magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor; NaN if it holds one. On a CPU, `aminmax` takes a sixth to a sixtieth of the
    time of the norm, which torch 2.13 computes number by number on one core (2.7 ns each)."""
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return list(torch._foreach_norm(list(tensors), inf))
    return [torch.maximum(-low, high) for low, high in map(torch.aminmax, tensors)]


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every tensor in place, in few kernels (`torch._foreach_mul_`)."""
    torch._foreach_mul_(list(tensors), factor)


_overrides: dict[str, torch.library.Library] = {}  # by namespace; an override lasts as long as its library object


def override_on_cpu(namespace: str, kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Register `kernels` for the operators of a namespace on the CPU from now on, once, in the whole process."""
    if namespace in _overrides:
        return
    library = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
    replace: Callable[..., None] = library.impl
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
        )
        for name, kernel in kernels.items():
            replace(name, kernel, "CPU")
    _overrides[namespace] = library


def import_compiler() -> None:
    """Import Inductor now; otherwise torch imports it when the first block is compiled."""
    import_module("torch._inductor.compile_fx")


def keep_headers() -> None:
    """Let Inductor keep precompiled headers next to the code that it compiles; by default they stay in TMPDIR."""
    codecache = import_module("torch._inductor.codecache")
    folder = f"{codecache.cache_dir()}/precompiled_headers"
    vars(codecache).update(_HEADER_DIR=folder, _HEADER_LOCK_DIR=f"{folder}/locks")


def of_one(name: str) -> str:
    """The operator that a foreach operator applies to each tensor, by name: `norm` for `_foreach_norm`."""
    return name.removeprefix(torch._foreach_norm.__name__.removesuffix("norm"))


class Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces every operator call inside the block by `run(operator, args, kwargs)`, which may call the operator."""

    def __init__(self, run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})


# Tensors and modules -------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """A key that a tensor shares with its views, also on meta, where there is no address."""
    return id(tensor.untyped_storage())  # one object as long as a tensor has the memory


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """The inner tensors of a wrapper subclass; for a plain tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def hooks_of_saved() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The pair (pack, unpack) of the innermost active `saved_tensors_hooks`; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def without_graph(tensor: Tensor) -> Tensor:
    """Detach a tensor; both share memory and version counter (`times_changed`), also inside operators."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_OUTSIDE = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def dispatched_as_outside() -> Iterator[None]:
    """Inside the body of an operator, let calls be dispatched as outside of it: recorded for autograd, and traced by
    Dynamo. In an operator that a compiled layer calls, autograd and `vmap` are both switched off."""
    with torch._C._ForceDispatchKeyGuard(*_OUTSIDE):
        yield


def times_changed(tensor: Tensor) -> int:
    """The number of in-place changes to the memory of a tensor."""
    return tensor._version


def saves_memory_of(output: Tensor) -> bool:
    """True if an operation in the graph of `output` saved its memory for backward, as a tanh does."""
    memory, nodes = output.untyped_storage().data_ptr(), [node for node in (output.grad_fn,) if node]
    for node in nodes:
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())
        if any(isinstance(s, Tensor) and s.untyped_storage().data_ptr() == memory for s in saved):
            return True
        nodes += [following for following, _ in node.next_functions if following]
    return False


@contextmanager
def step_hooks(optimizer: torch.optim.Optimizer, *, before: bool, after: bool) -> Iterator[None]:
    """Enable or disable the optimizer's own hooks `before` and `after` a step inside the block."""
    first, last = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    assign(
        optimizer, _optimizer_step_pre_hooks=first if before else type(first)(),
        _optimizer_step_post_hooks=last if after else type(last)(),
    )  # fmt: skip
    try:
        yield
    finally:
        assign(optimizer, _optimizer_step_pre_hooks=first, _optimizer_step_post_hooks=last)


def first_after_step(optimizer: torch.optim.Optimizer, hook: Any) -> None:
    """Let `hook`, a handle of `register_step_post_hook`, run before the optimizer's other hooks after a step."""
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(hook.id, last=False)


def assign(owner: Any, **values: Any) -> None:
    """Set existing attributes. Raises `AttributeError` for one that torch has renamed: setting it would only create an
    attribute that nothing reads."""
    for name, value in values.items():
        getattr(owner, name)
        setattr(owner, name, value)


# Process groups ------------------------------------------------------------------------------------------------------


def has_lost_cuda() -> bool:
    """True if this process was forked from one that had initialised CUDA, so that it cannot use CUDA."""
    return bool(torch.cuda._is_in_bad_fork())


def default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def can_split_world() -> bool:
    """True if one call can split the world's group: its NCCL communicator must exist before the first collective, as it
    does if the group is bound to a device."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None and torch.accelerator.is_available()


def timeout_of_world(device_type: str) -> timedelta | None:
    """The timeout of the world's group; None if its backend has none. A new NCCL group defaults to ten minutes."""
    world = dist.group.WORLD
    backend = world and world._get_backend(torch.device(device_type))
    return getattr(getattr(backend, "options", None), "_timeout", None)


def group_among(arguments: Iterable[Any]) -> tuple[str, int]:
    """Name and size of the process group in the arguments of a collective operator, given by name or boxed."""
    for argument in arguments:
        if isinstance(argument, str) and argument not in ("sum", "avg", "max", "min"):
            return argument, dist.distributed_c10d._resolve_process_group(argument).size()  # type: ignore[attr-defined,arg-type]
        if isinstance(argument, torch.ScriptObject):  # before a reduction
            group = dist.ProcessGroup.unbox(argument)
            return group.group_name, group.size()
    raise AssertionError(f"no process group among {arguments}")


def flight_recorder(backend: str) -> Callable[[bool, bool], str | bytes] | None:
    """The function `dump(with_collectives, only_active)` for the JSON of a backend's flight recorder; None if torch has
    none. NCCL has a recorder of its own."""
    name = "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json"
    return getattr(torch._C._distributed_c10d, name, None)


# Collectives on the CPU ----------------------------------------------------------------------------------------------


Carrier = Any  # `Channel` of `ops/cpu/shared_memory.py`; its methods start a collective, or return None

_carriers: "WeakKeyDictionary[dist.ProcessGroup, Carrier]" = WeakKeyDictionary()


def cpu_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """The timeout of a group whose CPU tensors go through gloo itself; None for any other group."""
    if not dist.is_gloo_available():
        return None
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for a CPU
        return None
    return backend.options._timeout if type(backend) is dist.ProcessGroupGloo else None


def carried_by(group: dist.ProcessGroup | None) -> Carrier | None:
    """The carrier of the group's collectives of CPU tensors; None if its backend carries them."""
    return _carriers.get(group) if group else None


def carriers() -> list[Carrier]:
    """The carriers of this process; from any thread."""
    return list(filter(None, [carried_by(known()) for known in _carriers.keyrefs()]))


def carry(group: dist.ProcessGroup, carrier: Carrier) -> None:
    """Let `carrier` carry the group's collectives of CPU tensors from now on, from any caller, as long as the group
    exists. Every rank of the group calls this. What a method of it returns has `is_done` and `wait(timeout)`; None
    leaves the collective to the group's own backend."""
    _carriers[group] = carrier
    if "c10d" in _overrides:
        return
    _replaced.update({name: torch.library.get_kernel(f"c10d::{name}", "CPU") for name in _CARRIED})
    override_on_cpu("c10d", _CARRIED)


_replaced: dict[str, Any] = {}  # c10d's own kernels, by operator


def _run(
    name: str, arguments: Sequence[Any], group: Any, async_op: bool, timeout: int,
    take: Callable[[Any], Any], by_gloo: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """Run a collective on the group's carrier, or else on its backend, and return its boxed work.

    gloo's thread needs the GIL to free tensors that Python knows, and blocks its waiters meanwhile. So gloo's methods
    are called, which release the GIL; `call_boxed` would hold it. `timeout`: ms, or -1 for the group's.
    """
    unboxed = dist.ProcessGroup.unbox(group)
    carrier = _carriers.get(unboxed)
    found = carrier and take(carrier)
    if found:
        return _work(found, async_op, timeout).boxed()
    backend = unboxed._get_backend(torch.device("cpu"))
    if type(backend) is dist.ProcessGroupGloo:
        return by_gloo(backend).boxed()
    returned = _replaced[name].call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments)
    return returned[-1] if isinstance(returned, tuple) else returned


def _work(found: Any, async_op: bool, timeout: int) -> Any:
    if not async_op:
        found.wait(timedelta(milliseconds=timeout) if timeout > 0 else None)
    if found.is_done:
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return torch._C._distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined]

    def wait(limit: timedelta) -> bool:
        found.wait(limit or None)
        return True

    return torch._C._distributed_c10d.PythonCallbackWork(wait)


def _options(kind: str, async_op: bool, timeout: int, **others: Any) -> Any:
    options = getattr(torch._C._distributed_c10d, kind)()
    options.asyncOp, options.timeout = async_op, timedelta(milliseconds=timeout)
    for name, value in others.items():
        setattr(options, name, value)
    return options


def _reduction(how: Any) -> Any:
    return dist.ReduceOp(dist.ReduceOp.RedOpType(how.op()))


def _all_gather(output: Tensor, given: Tensor, group: Any, async_op: bool = True, timeout: int = -1) -> Any:
    def by_gloo(gloo: Any) -> Any:
        return gloo._allgather_base(output, given, _options("AllgatherOptions", async_op, timeout))

    arguments = output, given, group, async_op, timeout
    return output, _run("_allgather_base_", arguments, *arguments[2:], lambda c: c.all_gather(output, given), by_gloo)


def _reduce_scatter(
    output: Tensor, given: Tensor, group: Any, how: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    def by_gloo(gloo: Any) -> Any:
        options = _options("ReduceScatterOptions", async_op, timeout, reduceOp=_reduction(how))
        return gloo._reduce_scatter_base(output, given, options)

    def take(carrier: Carrier) -> Any:
        return carrier.reduce_scatter(output, given, how.op())

    arguments = output, given, group, how, async_op, timeout
    return output, _run("_reduce_scatter_base_", arguments, group, async_op, timeout, take, by_gloo)


def _all_reduce(
    tensors: list[Tensor], group: Any, how: Any, sparse: Tensor | None, async_op: bool = True, timeout: int = -1
) -> Any:
    def by_gloo(gloo: Any) -> Any:
        return gloo.allreduce(tensors, _options("AllreduceOptions", async_op, timeout, reduceOp=_reduction(how)))

    def take(carrier: Carrier) -> Any:
        return carrier.all_reduce(tensors[0], how.op()) if len(tensors) == 1 else None

    arguments = tensors, group, how, sparse, async_op, timeout
    return tensors, _run("allreduce_", arguments, group, async_op, timeout, take, by_gloo)


def _broadcast(
    tensors: list[Tensor], group: Any, root: int, root_tensor: int, async_op: bool = True, timeout: int = -1
) -> Any:
    def by_gloo(gloo: Any) -> Any:
        options = _options("BroadcastOptions", async_op, timeout, rootRank=root, rootTensor=root_tensor)
        return gloo.broadcast(tensors, options)

    def take(carrier: Carrier) -> Any:
        return carrier.broadcast(tensors[0], root) if len(tensors) == 1 else None

    arguments = tensors, group, root, root_tensor, async_op, timeout
    return tensors, _run("broadcast_", arguments, group, async_op, timeout, take, by_gloo)


def _all_to_all(
    output: Tensor, given: Tensor, group: Any, received: list[int], sent: list[int], async_op: bool = True,
    timeout: int = -1,
) -> Any:  # fmt: skip
    def by_gloo(gloo: Any) -> Any:
        return gloo.alltoall_base(output, given, received, sent, _options("AllToAllOptions", async_op, timeout))

    def take(carrier: Carrier) -> Any:
        return carrier.all_to_all(output, given, received, sent)

    arguments = output, given, group, received, sent, async_op, timeout
    return _run("alltoall_base_", arguments, group, async_op, timeout, take, by_gloo)


def _barrier(tensor: Tensor, group: Any, devices: list[int], async_op: bool = True, timeout: int = -1) -> Any:
    def by_gloo(gloo: Any) -> Any:
        return gloo.barrier(_options("BarrierOptions", async_op, timeout, device_ids=devices))

    arguments = tensor, group, devices, async_op, timeout
    return _run("barrier", arguments, group, async_op, timeout, lambda c: c.barrier(), by_gloo)


def _gather_each(outputs: list[Tensor], given: list[Tensor], group: Any, async_op: bool = True) -> Any:
    """The kernel called by the operator `all_gather_into_tensor`, with one tensor."""
    works = [_all_gather(output, its, group, async_op)[1] for output, its in zip(outputs, given, strict=True)]
    return _all_of(works)


def _scatter_each(
    outputs: list[Tensor], given: list[Tensor], group: Any, how: Any, async_op: bool = True, timeout: int = -1
) -> Any:
    """The kernel called by the operator `reduce_scatter_tensor`, with one tensor."""
    works = [_reduce_scatter(o, i, group, how, async_op, timeout)[1] for o, i in zip(outputs, given, strict=True)]
    return _all_of(works)


def _all_of(works: list[Any]) -> Any:
    if len(works) == 1:
        return works[0]

    def wait(limit: timedelta) -> bool:
        return all([dist.Work.unbox(work).wait(limit) for work in works])

    return torch._C._distributed_c10d.PythonCallbackWork(wait).boxed()


_CARRIED: Mapping[str, Callable[..., Any]] = {
    "allgather_into_tensor_coalesced_": _gather_each,
    "reduce_scatter_tensor_coalesced_": _scatter_each,
    "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "alltoall_base_": _all_to_all,
    "barrier": _barrier,
}


# FlashAttention ------------------------------------------------------------------------------------------------------


def takes_flash_attention_3() -> bool:
    """True if this torch can use FlashAttention 3 for its flash operators."""
    return hasattr(import_module("torch.nn.attention"), "activate_flash_attention_impl")


def use_flash_attention(which: Literal["fa2", "fa3"]) -> None:
    """Choose the kernels of torch's flash operators, for all models of this process. Raises `ImportError`, or
    `RuntimeError` for a package without the kernels."""
    attention: Any = import_module("torch.nn.attention")
    if which == "fa3":
        attention.activate_flash_attention_impl("FA3")
    elif takes_flash_attention_3() and attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()


# Autograd ------------------------------------------------------------------------------------------------------------


def after_this_backward(call: Callable[[], None]) -> None:
    """Call `call` when the running backward ends (as FSDP does, `_execution_engine.queue_callback`)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def is_in_backward() -> bool:
    """True if a backward runs on this thread (`_current_graph_task_id`)."""
    return torch._C._current_graph_task_id() != -1


def through_gradient_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Apply a parameter's hooks (`register_hook`) to a gradient that did not come from autograd, before it is
    accumulated. They see it in the parameter's dtype."""
    for hook in (parameter._backward_hooks or {}).values():
        gradient = gradient.to(parameter.dtype)
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def call_gradient_hooks(parameter: nn.Parameter) -> None:
    """Call a parameter's post-accumulate hooks for a gradient that did not come from autograd (as FSDP does)."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def overwrite_unseen(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy `values` to `tensors` in few kernels (`torch._foreach_copy_`). Later backwards do not notice: `.data` has a
    version counter of its own."""
    with torch.no_grad():
        torch._foreach_copy_([tensor.data for tensor in tensors], list(values))


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def fsdp_forget(module: "FSDPModule") -> None:
    """Reset a unit to idle after a call that raised half-way: drop prefetched parameters, the pending end of a
    backward, and hidden gradients that the next backward would add to its own. (`reset_iter_state` is newer than torch
    2.11, and keeps these.) Also sets the gradient dtypes of a unit that was frozen entirely before."""
    state = module._get_fsdp_state()
    assign(state._state_ctx, iter_forward_root=None, post_backward_final_callback_queued=False)
    state._comm_ctx.post_forward_order.clear()
    groups = [group for group in _groups(module) if group]
    for state_ in (state, *groups):
        assign(state_, _training_state=type(state_._training_state).IDLE)
    for group in groups:
        group.wait_for_unshard()
        group._post_forward_indices.clear()
        assign(group, _partial_reduce_output=None)
        if group._orig_dtype is None:
            group._init_mp_dtypes()
        for of in group.fsdp_params:
            assign(of, unsharded_accumulated_grad=None)
            if hasattr(of, "_unsharded_param"):
                of._unsharded_param.grad = None


def fsdp_settle_root(module: Any) -> None:
    """Make `module` the root of its FSDP units now; otherwise the first one called would become the root."""
    module._get_fsdp_state()._lazy_init()


def fsdp_add_late(module: "FSDPModule") -> None:
    """Add gradients of a unit's parameters that arrived after FSDP's hooks to its sums, which are in the reduce dtype.

    In `.grad` those of several micro batches would be summed in the compute dtype. A unit with other, timely gradients
    would have gradients of two dtypes, which FSDP cannot reduce.
    """
    for group in _groups(module):
        for parameter in group.fsdp_params:
            if parameter.unsharded_accumulated_grad is None:
                parameter.to_accumulated_grad_if_needed()
            else:
                parameter.accumulate_unsharded_grad_if_needed()


def fsdp_reduce_now(module: "FSDPModule") -> None:
    """Reduce the gradients in `.grad` of a unit's parameters, as FSDP's own post-backward hook does.

    FSDP would keep the send buffer until the next backward ends. The compute stream has waited for the reduction, so
    the buffer is freed now.
    """
    for group in _groups(module):
        before, shared = group._training_state, group.comm_ctx
        group.post_backward()
        group.finalize_backward()
        assign(group, _training_state=before)
        if hasattr(shared, "reduce_scatter_states"):
            shared.reduce_scatter_states.clear()
        else:  # torch 2.11 keeps one
            assign(shared, reduce_scatter_state=None)


def fsdp_shards(model: nn.Module) -> "dict[tuple[nn.Module, str], FSDPParam]":
    """Map (module, parameter name) to FSDP's object for it, for all units of a model. A tied one has several keys."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    found = dict[tuple[nn.Module, str], FSDPParam]()
    for parameter in (
        parameter for unit in units for group in filter(None, _groups(unit)) for parameter in group.fsdp_params
    ):
        own = parameter._module_info
        found[own.module, own.param_name] = parameter
        found |= dict.fromkeys(zip(own.shared_modules, own.shared_param_names, strict=True), parameter)
    return found


def fsdp_sent(module: "FSDPModule") -> list[tuple[tuple[nn.Module, str], int]]:
    """List what a rank sends when a unit is gathered, in order: ((module, parameter name), numbers with padding)."""
    parameters = [parameter for group in _groups(module) for parameter in group.fsdp_params]
    return [
        ((of._module_info.module, of._module_info.param_name), of.padded_sharded_param_size.numel())
        for of in parameters
    ]


def fsdp_pad(of: "FSDPParam") -> None:
    """Pad a newly made shard. FSDP would do so at its first call: the shard would then move away from existing
    references to it, and exist twice for a while."""
    of.reset_sharded_param()  # type: ignore[no-untyped-call]


def fsdp_gather_by(of: "FSDPParam", gather: Any) -> None:
    """Let FSDP gather a padded parameter with `gather`, an all-gather extension of FSDP2. Its `before` and `after`
    become the hooks of the shard. `gather.rest(size, dtype)` returns storage for the shard, padded to `size`, or None
    to leave it in place. `gather.shard` is set to the shard.

    FSDP looks for hooks when it shards a parameter, on the meta device; here the parameter is on its device.
    """
    parameter: Any = of.sharded_param
    size = of.padded_sharded_param_size
    gather.rows, shard = size[0], parameter._local_tensor
    if (home := gather.rest(size, shard.dtype)) is not None:
        assign(of, _sharded_param_data=home.view(-1))
        assign(parameter, _local_tensor=home[: len(shard)])
    gather.shard = shard = parameter._local_tensor
    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = gather.before, gather.after
    of._init_extensions()


@contextmanager
def fsdp_cuts_own_shards() -> Iterator[None]:
    """Inside, `fully_shard` cuts out of a parameter what it reads: this rank's shard, and the first for its size.

    torch makes a view for every rank of the group and parameter, which took 100 s for 291 parameters on 16,384 ranks.
    """
    module = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    usual = getattr(module, "_chunk_with_empty", None)
    if usual is None:  # this torch cuts in another way
        yield
        return
    assign(module, _chunk_with_empty=lambda tensor, num_chunks, dim: (
        Shards(tensor, num_chunks) if dim == 0 and len(tensor) else usual(tensor, num_chunks, dim)
    ))  # fmt: skip
    try:
        yield
    finally:
        assign(module, _chunk_with_empty=usual)


@dataclass(frozen=True, eq=False)
class Shards(Sequence[Tensor]):
    """The `ranks` shards of a tensor along dimension 0, as FSDP cuts it, each made when it is read."""

    tensor: Tensor
    ranks: int

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, at: Any) -> Any:
        if not 0 <= at < self.ranks:
            raise IndexError(f"shard {at} of {self.ranks}")
        rows = -(-len(self.tensor) // self.ranks)
        return self.tensor[at * rows : (at + 1) * rows] if at * rows < len(self.tensor) else self.tensor.new_empty(0)


def fsdp_keep_copy(module: "FSDPModule", nodes: "DeviceMesh") -> None:
    """Let a unit reshard after a pass to the ranks of the last dimension of `nodes` (copies, ranks of a copy). So
    does a backward that is not the last of a step (`set_requires_all_reduce`).

    `fully_shard(reshard_after_forward=N)` makes new groups for every unit, hangs if other ranks shard apart, as under
    tp, and drops the copy after a backward.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    info = HSDPMeshInfo(nodes, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in _groups(module):
        assign(group, post_forward_mesh_info=info, _to_sharded=partial(_to_copy, group))
        for of in group.fsdp_params:
            assign(of, post_forward_mesh_info=info)
            of._init_sharded_post_forward_param_metadata(torch.empty(of._orig_size, device="meta"))


def _to_copy(group: Any) -> None:
    """Do what a group's `_to_sharded` does, but at the end of a backward that is not the last, leave a copy."""
    if group._training_state.name == "POST_BACKWARD" and not (group.is_sharded or group.all_reduce_grads):
        group._to_sharded_post_forward()
    else:
        type(group)._to_sharded(group)


def fsdp_drop_copy(module: "FSDPModule") -> None:
    """Free the copy that passes have left (`fsdp_keep_copy`), of a unit that is sharded again."""
    for group in filter(None, _groups(module)):
        for of in group.fsdp_params:
            if getattr(of, "_sharded_post_forward_param_data", None) is not None:
                assign(of, _sharded_post_forward_param=None, _sharded_post_forward_param_data=None)


def _groups(module: "FSDPModule") -> list[Any]:
    """The parameter groups of a unit (torch 2.11 has one)."""
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


# Dynamo --------------------------------------------------------------------------------------------------------------

_GIVES_UP = "torch._dynamo hit config."  # prefix of Dynamo's log message when it gives up on a function


def compiled_versions(at_least: int = 0) -> int:
    """Dynamo's recompile limit per function, raised to `at_least`."""
    config: Any = import_module("torch.compiler.config")
    config.recompile_limit = max(at_least, config.recompile_limit)
    # Python side effects of a checkpointed forward happen once: not again when the backward recomputes it.
    import_module("torch._dynamo").config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return int(config.recompile_limit)


@contextmanager
def heard_from_dynamo(given_up: Callable[[str], None]) -> Iterator[None]:
    """Call `given_up(reason)` inside the block if Dynamo gives up on a function; only its log reports that."""

    def note(record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(_GIVES_UP):
            given_up(str(record.args[-2]) if isinstance(record.args, tuple) else "")
        return True

    logger = logging.getLogger("torch._dynamo.convert_frame")
    logger.addFilter(note)
    try:
        yield
    finally:
        logger.removeFilter(note)


# Observation in a rehearsal ------------------------------------------------------------------------------------------


def record_allocations() -> None:
    """Make CUDA's caching allocator record all allocations and frees from now on, with Python frames."""
    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=10_000_000)


def allocations(device: int) -> list[dict[str, Any]]:
    """The recorded history of one device: dicts with `action`, `addr`, `size`, `time_us` and `frames`."""
    return list(torch.cuda.memory._snapshot()["device_traces"][device])


def communicator(group: dist.ProcessGroup) -> int:
    """The address of a group's NCCL communicator."""
    return int(group._get_backend(torch.device("cuda"))._comm_ptr())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Compile:
    """A function that Dynamo compiled: its place and name. `again`: why it was recompiled; "" the first time."""

    file: str
    line: int
    function: str
    again: str


def compiles(most: int = 100_000) -> list[Compile]:
    """Functions compiled by Dynamo so far: the last `most`, which Dynamo keeps from the first call of this on."""
    utils: Any = import_module("torch._dynamo.utils")
    utils.set_compilation_metrics_limit(most)
    return [
        Compile(
            compiled.co_filename or "",
            compiled.co_firstlineno or 0,
            compiled.co_name,
            getattr(compiled, "recompile_reason", "") or "",
        )
        for compiled in utils.get_compilation_metrics()
        if compiled.co_name
    ]


def graph_breaks() -> dict[str, int]:
    return dict(import_module("torch._dynamo.utils").counters["graph_break"])


# Versions ------------------------------------------------------------------------------------------------------------


def is_supported() -> bool:
    """True for a torch of `SUPPORTED`, on whose versions the contract tests of these interfaces run."""
    first, last = (tuple(map(int, version.split("."))) for version in SUPPORTED.split(" to "))
    return first <= tuple(map(int, torch.__version__.split(".")[:2])) <= last


def check() -> None:
    """Raise `UserError` for another torch, whose private interfaces may have moved."""
    if not is_supported():
        raise UserError(
            f"torch {torch.__version__} is not one of those whose interfaces fivefold knows",
            fix=f"install torch {SUPPORTED}",
        )
