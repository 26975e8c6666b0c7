"""Every private interface of torch that a file of `src/` reads, and whether this torch has it."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from fivefold import torch_internals

_FSDP = "distributed.fsdp._fully_shard"

# Owner, as a path from `torch`, -> its attributes that are read. `a/b`: one of them is enough.
NEEDED: Mapping[str, str] = {
    "": "_dynamo _foreach_copy_ _foreach_mul_ _foreach_norm _inductor",
    "Tensor": "_backward_hooks _make_wrapper_subclass _post_accumulate_grad_hooks _version",
    "_C": "_ForceDispatchKeyGuard _SetExcludeDispatchKeyGuard _current_graph_task_id "
    "_dispatch_tls_local_exclude_set _dispatch_tls_local_include_set _distributed_c10d",
    "_C._autograd": "_top_saved_tensors_default_hooks",
    "_dynamo.config": "skip_fwd_side_effects_in_bwd_under_checkpoint",
    "autograd.Variable._execution_engine": "queue_callback",
    "cuda": "_is_in_bad_fork",
    "distributed.ProcessGroup": "_get_backend",
    "distributed.distributed_c10d": "_get_default_store _resolve_process_group",
    "distributed.tensor.DTensor": "_local_tensor _spec",
    f"{_FSDP}._fully_shard.FSDPModule": "_get_fsdp_state",
    f"{_FSDP}._fsdp_state.FSDPState": "_comm_ctx _fsdp_param_groups/_fsdp_param_group _lazy_init _state_ctx "
    "_training_state",
    f"{_FSDP}._fsdp_state.FSDPStateContext": "iter_forward_root post_backward_final_callback_queued",
    f"{_FSDP}._fsdp_common": "HSDPMeshInfo",
    f"{_FSDP}._fsdp_common.TrainingState": "IDLE",
    f"{_FSDP}._fsdp_param_group.FSDPCommContext": "post_forward_order reduce_scatter_states/reduce_scatter_state",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup": "_init_mp_dtypes _orig_dtype _partial_reduce_output "
    "_post_forward_indices _training_state comm_ctx finalize_backward fsdp_params post_backward "
    "_to_sharded _to_sharded_post_forward all_reduce_grads is_sharded post_forward_mesh_info wait_for_unshard",
    f"{_FSDP}._fsdp_param.FSDPParam": "_init_extensions _init_sharded_post_forward_param_metadata _module_info "
    "_orig_size _sharded_param_data _sharded_post_forward_param _sharded_post_forward_param_data _unsharded_param "
    "accumulate_unsharded_grad_if_needed padded_sharded_param_size post_forward_mesh_info reset_sharded_param "
    "sharded_param to_accumulated_grad_if_needed unsharded_accumulated_grad",
    f"{_FSDP}._fsdp_param.ParamModuleInfo": "module param_name shared_modules shared_param_names",
    "nn.Module": "_apply _buffers _forward_hooks _forward_pre_hooks _parameters",
    "ops._c10d_functional": "all_gather_into_tensor all_reduce all_to_all_single reduce_scatter_tensor wait_tensor",
    "ops.aten": "_flash_attention_backward _flash_attention_forward "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward",
    "optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
    "utils": "_python_dispatch _pytree",
}  # fmt: skip

# For collectives over shared memory.
FOR_CARRIERS: Mapping[str, str] = {
    "_C._distributed_c10d": "PythonCallbackWork _create_work_from_future",
    "_C._distributed_c10d.Work": "boxed",
    "_C._distributed_c10d.Backend.Options": "_timeout",
    "distributed.ProcessGroupGloo": "_allgather_base _reduce_scatter_base",
    "ops.c10d": " ".join(torch_internals._CARRIED),
}

# Their readers work without them.
OPTIONAL: Mapping[str, str] = {
    "": "_grouped_mm _scaled_grouped_mm",
    "_C._distributed_c10d": "_dump_fr_trace_json _dump_nccl_trace_json",
    "_inductor.codecache": "_HEADER_DIR _HEADER_LOCK_DIR",
    "_dynamo.utils": "counters get_compilation_metrics set_compilation_metrics_limit",
    f"{_FSDP}._fsdp_param": "_chunk_with_empty",
    "cuda.memory": "_record_memory_history _snapshot",
    "distributed.ProcessGroupNCCL": "_comm_ptr",
    "ops.aten": " ".join(torch_internals._DEAR),
    "ops.mkldnn": "_is_mkldnn_bf16_supported _linear_pointwise",
    "testing": "_internal",
}


@dataclass(frozen=True)
class Surface:
    """A private interface: its path from `torch`. `is_optional`: its readers work without it."""

    path: str
    is_optional: bool = False

    @property
    def is_there(self) -> bool:
        owner, _, names = self.path.rpartition(".")
        try:
            found = _at(owner)
        except (ImportError, AttributeError):
            return False
        return any(_has(found, name) for name in names.split("/"))


def surfaces() -> Iterator[Surface]:
    """Yield every private interface of torch that any file reads."""
    for table in (NEEDED, FOR_CARRIERS, OPTIONAL):
        for owner, names in table.items():
            yield from (Surface(f"{owner}.{name}".strip("."), table is OPTIONAL) for name in names.split())


def _at(path: str) -> Any:
    """Resolve a path from `torch`, importing modules. Raises `ImportError` or `AttributeError`."""
    found: Any = torch
    for name in path.split(".") if path else ():
        found = import_module(f"{found.__name__}.{name}") if _has_module(found, name) else getattr(found, name)
    return found


def _has(owner: Any, name: str) -> bool:
    """True if `owner` has `name` as a module or an attribute, or if its methods use the name (instance attributes)."""
    return _has_module(owner, name) or hasattr(owner, name) or name in _of_instances(owner)


def _has_module(package: Any, name: str) -> bool:
    """True if the package has a module of this name that is not imported yet."""
    own = getattr(package, "__dict__", {})
    return "__path__" in own and name not in own and find_spec(f"{package.__name__}.{name}") is not None


def _of_instances(owner: Any) -> set[str]:
    own = list(vars(owner).values()) if isinstance(owner, type) else []
    methods = [getattr(member, "fget", member) for member in own]
    named = [method.__code__.co_names for method in methods if hasattr(method, "__code__")]
    return {*getattr(owner, "__annotations__", {}), *itertools.chain(*named)}


def missing() -> list[str]:
    """The required interfaces that this torch lacks."""
    return [surface.path for surface in surfaces() if not (surface.is_optional or surface.is_there)]
