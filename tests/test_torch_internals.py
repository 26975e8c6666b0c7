"""One contract test per private interface of torch: what `torch_internals` reads is there, and does what it says."""

import ast
import re
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fivefold import torch_internals
from fivefold.core.errors import UserError
from fivefold.doctor import machine
from tests import torch_surfaces
from tests.rehearsal import fake_world


@pytest.fixture
def world() -> Iterator[None]:
    """A world of one, without a network."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


PRIVATE = re.compile(r"_[A-Za-z]\w*")


# ---- feature tests ---------------------------------------------------------------------------------------------------


OF_CUDA = {"_C._distributed_c10d._dump_nccl_trace_json", "distributed.ProcessGroupNCCL._comm_ptr"}


def test_this_torch_has_everything() -> None:
    assert not torch_surfaces.missing()
    torch_internals.check()
    assert {surface.path for surface in torch_surfaces.surfaces() if not surface.is_there} <= OF_CUDA


@pytest.mark.parametrize(
    ("version", "is_supported"),
    [("2.10.1", False), ("2.11.0a0+nv", True), ("2.14.3+cpu", True), ("2.15.0.dev20270101", False), ("3.0.0", False)],
)
def test_another_torch_is_refused(version: str, is_supported: bool) -> None:
    """Before anything runs, and in `fivefold doctor`."""
    with patch.object(torch, "__version__", version):
        found = [finding for finding in machine.examine_machine().rows if finding.what == "torch's interfaces"]
        if is_supported:
            torch_internals.check()
            assert not found
            return
        with pytest.raises(UserError, match=f"torch {re.escape(version)} is not one of those") as caught:
            torch_internals.check()
    assert torch_internals.SUPPORTED in str(caught.value.fix)
    assert found[0].state == "missing" and version in found[0].found


def test_what_moved_is_missing() -> None:
    """A module, a class, a method, and what instances have."""
    fsdp = "distributed.fsdp._fully_shard"
    gone = (
        "_elsewhere.f", f"{fsdp}._fsdp_elsewhere.FSDPState._lazy_init", f"{fsdp}._fsdp_state.State._lazy_init",
        f"{fsdp}._fsdp_state.FSDPState._lazily_init", f"{fsdp}._fsdp_param_group.FSDPParamGroup._partial_output",
        "nn.Module._parts", "ops.c10d._allgather_other_",
    )  # fmt: skip
    assert not any(torch_surfaces.Surface(path).is_there for path in gone)
    with patch.dict(torch_surfaces.NEEDED, {"": "_moved", "nn.Module": "_parts/_parameters"}, clear=True):
        assert torch_surfaces.missing() == ["_moved"]


def test_nothing_is_assigned_that_torch_does_not_have() -> None:
    """But for what is ours, and settings that refuse other names."""

    class Torchs:
        _state = 1

    torch_internals.assign(Torchs, _state=2)
    with pytest.raises(AttributeError, match="_moved"):
        torch_internals.assign(Torchs, _moved=2)
    assert Torchs._state == 2 and not hasattr(Torchs, "_moved")
    own = {"run", "rows", "shard", "fsdp_pre_all_gather", "fsdp_post_all_gather"}
    refusing = {"asyncOp", "timeout", "recompile_limit", "skip_fwd_side_effects_in_bwd_under_checkpoint"}
    here = Path(torch_internals.__file__)
    assert {node.attr for node in assigned(here)} == own | refusing | {"grad"}
    for file in sources():
        private = {node.attr for node in assigned(file) if not is_own(node) and PRIVATE.fullmatch(node.attr)}
        assert private <= {"_name_or_path", "_plans", "_calls"}, file  # of transformers; of the class itself


def assigned(file: Path) -> list[ast.Attribute]:
    nodes = ast.walk(tree(file))
    return [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_the_versions_allowed_are_those_that_are_tested() -> None:
    """The package's range of torch, what an error says of it, and what `make versions` tries; transformers to the minor
    of the constraints."""
    root = Path(__file__).parents[1]
    asked = dict(
        each.split(">=") for each in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        if each.startswith(("torch>", "transformers>"))
    )  # fmt: skip
    first, last = torch_internals.SUPPORTED.split(" to ")
    major, minor = map(int, last.split("."))
    assert asked["torch"] == f"{first},<{major}.{minor + 1}"
    assert f"TORCHS := {first} {last}\n" in (root / "Makefile").read_text()
    tested = re.search(r"^transformers==(\d+)\.(\d+)", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert tested and asked["transformers"].endswith(f",<{tested[1]}.{int(tested[2]) + 1}")


# Private names that are not torch's: of Python, of transformers, and what the names of saved tensors begin with.
OTHERS = {
    "_exit", "_asdict", "_replace", "_getframe", "_current_frames", "_fields_", "_saved_", "_apply_gate",
    "_name_or_path", "_get_logits_processor", "_prepare_generation_config", "_prepare_special_tokens", "_supports_sdpa",
    "_is_hf_initialized", "_from_config", "_tp_plan", "_keys_to_ignore_on_load_unexpected", "_no_split_modules",
    "_get_default_generation_params", "_get_dtype_plan",
}  # fmt: skip


def test_the_list_of_private_names_is_whole() -> None:
    """Each that a file reads is looked for in torch, and what is looked for is read."""
    read = set[str]().union(*map(private_names, sources()))
    paths = [each.path for each in torch_surfaces.surfaces()]
    last = {name for path in paths for name in path.rpartition(".")[2].split("/") if PRIVATE.fullmatch(name)}
    assert read - OTHERS <= {name for path in paths for name in re.split(r"[./]", path)}
    assert last <= read


def sources() -> list[Path]:
    """The files that may read something private of others."""
    may = re.compile(r"(?<!self)(?<!cls)\._[A-Za-z]|\"_[A-Za-z]")
    files = Path(torch_internals.__file__).parent.rglob("*.py")
    return [file for file in files if may.search(file.read_text(encoding="utf-8"))]


def private_names(file: Path) -> set[str]:
    """Private names that a file reads of others: attributes, modules, arguments of `getattr` and of `assign`; of
    `torch_internals` all texts."""
    nodes, here = list(ast.walk(tree(file))), file.name == "torch_internals.py"
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= set() if here else {node.attr for node in assigned(file)}
    found = set[str]()
    for node in nodes:
        if isinstance(node, ast.Attribute) and not is_own(node):
            found.add(node.attr)
            own -= {node.attr} if ast.unparse(node.value) == "super()" else set()
        elif isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            found.update(name for module in modules if module.startswith("torch") for name in module.split("."))
        elif isinstance(node, ast.keyword) and here:
            found.add(node.arg or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "import_module"):
            texts = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
            found.update(part for text in texts for part in text.split("."))
        elif isinstance(node, ast.Constant) and here and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found - own if PRIVATE.fullmatch(name)}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_no_other_file_reads_a_private_interface() -> None:
    private = re.compile(r"\btorch\._[^_]|distributed_c10d|\b_foreach_|\._get_fsdp_state|\._(state_ctx|training_state)")
    source = Path(torch_internals.__file__).parent
    found = {
        f"{file.relative_to(source)}:{number}"
        for file in source.rglob("*.py")
        if file.name != "torch_internals.py"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    }
    assert not found


# ---- operators -------------------------------------------------------------------------------------------------------


def test_collectives_as_operators(world: None) -> None:
    name, x, ops = cast(Any, dist.group.WORLD).group_name, torch.arange(4.0), torch_internals.collectives
    made = (
        ops.all_gather_into_tensor(x, 1, name),
        ops.reduce_scatter_tensor(x, "sum", 1, name),
        ops.all_reduce(x, "sum", name),
        ops.all_to_all_single(x, [4], [4], name),
    )
    assert all(torch.equal(ops.wait_tensor(each), x) for each in made)


def test_attention_gives_its_log_sum_exp() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    out, lse = torch_internals.cpu_attention_forward(q, q, q, 0.0, False, scale=1.0)
    assert torch.allclose(lse, (q @ q.mT).logsumexp(-1), atol=1e-5)
    grads = torch_internals.cpu_attention_backward(out, q, q, q, out, lse, 0.0, False, scale=1.0)
    assert [each.shape for each in grads] == [q.shape] * 3


def test_flash_attention_takes_the_bounds_of_documents() -> None:
    """Its schema: there is no GPU to run it on."""
    for operator in (torch_internals.flash_attention_forward, torch_internals.flash_attention_backward):
        names = [each.name for each in operator.default._schema.arguments]
        assert {"query", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "is_causal", "scale", "window_size_left"} <= {
            *names
        }


def test_grouped_mm_multiplies_rows_by_their_experts_matrix() -> None:
    assert torch_internals.grouped_mm is not None
    x, weights, ends = torch.randn(6, 4), torch.randn(2, 4, 4), torch.tensor([2, 6], dtype=torch.int32)
    expected = torch.cat([x[:2] @ weights[0], x[2:] @ weights[1]])
    assert torch.allclose(torch_internals.grouped_mm(x, weights, offs=ends), expected, atol=1e-5)


def test_scaled_grouped_mm_has_shapes_for_graphs() -> None:
    """No CPU multiplies: its check of arguments, and the shape of what it gives."""
    assert torch_internals.scaled_grouped_mm is not None
    x, weights, ends = (
        torch.empty(6, 32, dtype=torch.float8_e4m3fn, device="meta"),
        torch.empty(2, 16, 32, dtype=torch.float8_e4m3fn, device="meta").transpose(1, 2),
        torch.empty(2, dtype=torch.int32, device="meta"),
    )
    scales = [torch.empty(shape, device="meta") for shape in ((6,), (2, 16))]
    found = torch_internals.scaled_grouped_mm(x, weights, *scales, offs=ends, out_dtype=torch.bfloat16)
    assert found.shape == (6, 16) and found.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_magnitudes_are_the_norm_of_infinite_order(dtype: torch.dtype) -> None:
    odd = [[-3.0, 2.0], [0.0, -0.0], [1.0, float("nan"), 5.0], [1.0, float("-inf")], [float("inf"), float("nan")]]
    tensors = [torch.tensor(each, dtype=dtype) for each in odd] + [torch.randn(70_001).to(dtype)]
    expected = torch.stack(torch._foreach_norm(tensors, float("inf")))
    found = torch.stack(torch_internals.magnitudes(tensors))
    assert found.dtype == dtype and torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_norms_and_scaling_of_many_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([-6.0])]
    assert [float(each) for each in torch_internals.norms(tensors)] == [5.0, 6.0]
    assert [float(each) for each in torch_internals.magnitudes(tensors)] == [4.0, 6.0]
    torch_internals.scale_(tensors, 0.5)
    assert [each.tolist() for each in tensors] == [[1.5, 2.0], [-3.0]]


def test_a_subclass_without_its_torch_function() -> None:
    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    assert float(nn.Parameter.__torch_function__(Tensor.sum, (Loud,), (torch.ones(2).as_subclass(Loud),), {})) == 2.0


# ---- tensors and modules ---------------------------------------------------------------------------------------------


def test_a_view_has_the_storage_of_its_whole_on_meta_too() -> None:
    whole = torch.empty(4, 4, device="meta")
    assert torch_internals.storage_key(whole[1]) == torch_internals.storage_key(whole)
    assert torch_internals.storage_key(torch.empty(4, 4, device="meta")) != torch_internals.storage_key(whole)


def test_what_backward_needs_is_known() -> None:
    x = torch.ones(3, requires_grad=True)
    assert torch_internals.saves_memory_of(torch.tanh(x))
    assert torch_internals.saves_memory_of(torch.tanh(x).view(3, 1))
    assert not torch_internals.saves_memory_of(x * 2)


def test_a_hook_runs_first_after_a_step() -> None:
    ran, optimizer = list[str](), torch.optim.SGD([torch.zeros(1)])
    optimizer.register_step_post_hook(lambda *_: ran.append("theirs"))
    torch_internals.first_after_step(optimizer, optimizer.register_step_post_hook(lambda *_: ran.append("ours")))
    optimizer.step()
    assert ran == ["ours", "theirs"]


# ---- process groups --------------------------------------------------------------------------------------------------


def test_the_worlds_store_timeout_and_splitting(world: None) -> None:
    store = torch_internals.default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert torch_internals.timeout_of_world("cpu") == timedelta(seconds=77)
    cast(Any, dist.group.WORLD).set_timeout(timedelta(seconds=88))
    assert torch_internals.timeout_of_world("cpu") == timedelta(seconds=88)
    assert not torch_internals.can_split_world()


def test_a_fork_of_a_process_that_started_cuda_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_internals.has_lost_cuda()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)  # as torch has it in such a fork
    assert torch_internals.has_lost_cuda()


def test_a_world_that_sends_nothing_has_no_timeout() -> None:
    with fake_world(4, 0):
        assert torch_internals.timeout_of_world("cpu") is None


def test_the_group_of_a_collective_is_told_from_its_arguments(world: None) -> None:
    group = cast(Any, dist.group.WORLD)
    assert torch_internals.group_among((torch.ones(1), "sum", group.group_name)) == (group.group_name, 1)
    assert torch_internals.group_among((torch.ones(1), group.boxed())) == (group.group_name, 1)
    with pytest.raises(AssertionError, match="no process group"):
        torch_internals.group_among((torch.ones(1), "sum"))


def test_gloo_has_a_flight_recorder() -> None:
    dump = torch_internals.flight_recorder("gloo")
    assert dump is not None and "{" in str(dump(True, False))


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def unit() -> Any:
    """One linear, sharded over one process."""
    return fully_shard(nn.Linear(4, 4, bias=False))


def test_a_unit_is_idle_after_a_call_that_raised(world: None) -> None:
    model = unit()
    torch_internals.fsdp_settle_root(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))  # of another width
    torch_internals.fsdp_forget(model)
    model.reshard()
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4


def test_a_unit_forgets_the_gradients_of_a_call_that_raised(world: None) -> None:
    """Those of a micro batch before it, which were to be reduced with its own, and the end of its backward."""
    model: Any = unit()
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError), model.register_full_backward_pre_hook(lambda *_: torch.zeros(3)):
        model(torch.ones(2, 4)).sum().backward()
    torch_internals.fsdp_forget(model)
    model.reshard()
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4


def test_a_backward_is_known_from_within() -> None:
    found, x = [torch_internals.is_in_backward()], torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: found.append(torch_internals.is_in_backward()))
    (2 * x).sum().backward()
    assert found == [False, True]


def test_late_gradients_are_added_and_reduced(world: None) -> None:
    """Two backwards of which the weight's part comes by hand."""
    model: Any = unit()
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    for _ in range(2):
        model(torch.ones(2, 4, requires_grad=True))
        torch.autograd.backward(model.weight, torch.ones(4, 4))
        torch_internals.fsdp_add_late(model)
    model.set_requires_gradient_sync(True)
    torch_internals.fsdp_reduce_now(model)
    model.reshard()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4
    sent = vars(model._get_fsdp_state()._comm_ctx)
    assert not (sent.get("reduce_scatter_states") or sent.get("reduce_scatter_state")), "what was sent is let go"


def test_a_unit_leaves_a_copy_on_the_ranks_of_a_node(world: None) -> None:
    """In a forward, if these are others than its shards' (here of one process too); it is freed."""
    model: Any = unit()
    model.set_reshard_after_forward(True)  # a root would stay gathered
    nodes = DeviceMesh.from_group([dist.group.WORLD] * 2, "cpu", torch.zeros(1, 1), mesh_dim_names=("copies", "node"))
    torch_internals.fsdp_keep_copy(model, nodes)
    (group,) = torch_internals._groups(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert group.is_sharded_post_forward and group.fsdp_params[0]._sharded_post_forward_param_data.numel() == 16
    model.reshard()
    torch_internals.fsdp_drop_copy(model)
    assert group.fsdp_params[0]._sharded_post_forward_param_data is None
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 4] * 4


# ---- Dynamo ----------------------------------------------------------------------------------------------------------


def test_versions_are_raised_and_never_lowered() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        assert torch_internals.compiled_versions(at_least=11) == 11
        assert torch_internals.compiled_versions(at_least=1) == 11


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_operator_records_for_autograd_and_maps(is_compiled: bool) -> None:
    """As outside of it, eagerly and below a compiled function."""

    @torch.library.custom_op("tests::squares", mutates_args=())
    def squares(x: torch.Tensor) -> torch.Tensor:
        with torch_internals.dispatched_as_outside(), torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.vmap(torch.square)(inner).sum(), inner)
        return slope.clone()

    squares.register_fake(torch.empty_like)
    squares.register_autograd(lambda ctx, grad: grad)
    x = torch.arange(3.0, requires_grad=True)
    run = torch.compile(squares, backend="aot_eager") if is_compiled else squares
    assert run(x).tolist() == [0.0, 2.0, 4.0]


def test_dynamo_is_heard_when_it_gives_up() -> None:
    torch._dynamo.reset()
    heard: list[str] = []
    twice = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), torch_internals.heard_from_dynamo(heard.append):
        for size in (2, 3):
            twice(torch.ones(size))
    assert len(heard) == 1 and heard[0]


def test_what_is_compiled_again_is_told_with_its_reason() -> None:
    """Once for each of two dtypes; and a graph that breaks."""

    @torch.compile(backend="eager")
    def double(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return 2 * x

    torch._dynamo.reset()
    before, breaks = len(torch_internals.compiles()), sum(torch_internals.graph_breaks().values())
    for dtype in (torch.float32, torch.float64):
        double(torch.zeros(2, dtype=dtype))
    found = torch_internals.compiles()[before:]
    assert {each.function.rpartition("_at_")[0] or each.function for each in found} >= {"double"}
    assert any("dtype" in each.again for each in found) and Path(found[0].file) == Path(__file__)
    assert sum(torch_internals.graph_breaks().values()) > breaks


# ---- collectives on the CPU ------------------------------------------------------------------------------------------


class Noted:
    """A carrier that takes sums of fp32 alone, by doubling them, and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_done, self.waited = False, list[timedelta | None]()

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.append(timeout)
        self.is_done = True

    def __getattr__(self, kind: str) -> Any:
        def take(*given: Any) -> Any:
            self.asked.append(kind)
            if kind != "all_reduce" or given[0].dtype is not torch.float32:
                return None
            self.is_done = False
            given[0].mul_(2)
            return self

        return take


def test_a_group_is_carried_by_what_it_is_given(world: None) -> None:
    """Synchronous, asynchronous and by operators; what is not taken goes to gloo, as other groups do."""
    own = timedelta(seconds=77)
    group, other, carrier = dist.new_group([0], timeout=own), dist.new_group([0]), Noted()
    assert torch_internals.cpu_timeout(group) == own
    torch_internals.carry(group, cast(Any, carrier))
    assert torch_internals.carried_by(group) is carrier and torch_internals.carried_by(other) is None
    x, whole = torch.ones(3), torch.empty(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 3 and carrier.waited == [None]
    work = dist.all_reduce(x, group=group, async_op=True)
    assert len(carrier.waited) == 1
    work.wait(timedelta(seconds=5))
    assert carrier.waited[1:] == [timedelta(seconds=5)] and x.tolist() == [4.0] * 3
    ops = torch_internals.collectives
    assert ops.wait_tensor(ops.all_reduce(x, "sum", group.group_name)).tolist() == [8.0] * 3
    for g in (group, other):
        dist.all_reduce(x.double(), group=g)
        dist.all_gather_into_tensor(whole, x, group=g)
        dist.reduce_scatter_tensor(whole, x, dist.ReduceOp.MAX, group=g)
        dist.broadcast(x, 0, group=g)
        dist.all_to_all_single(whole, x, [3], [3], group=g)
        dist.barrier(g)
        assert ops.wait_tensor(ops.all_gather_into_tensor(x, 1, g.group_name)).equal(x)
        assert ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 1, g.group_name)).equal(x)
        assert whole.equal(x)
    kinds = ["all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier", "all_gather", "reduce_scatter"]
    assert carrier.asked == ["all_reduce"] * 4 + kinds


def test_a_fake_group_is_never_carried() -> None:
    with fake_world(2, 0):
        assert torch_internals.cpu_timeout(cast(Any, dist.group.WORLD)) is None
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [1.0] * 3


def test_fsdp_cuts_the_shards_that_it_reads() -> None:
    """They are those of torch, whatever the rows and the ranks; and `fully_shard` asks for them."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    for rows in (1, 2, 5, 7, 8, 64):
        for ranks in (1, 2, 3, 8, 9, 100):
            tensor = torch.arange(rows * 3.0).view(rows, 3)
            usual, own = _fsdp_param._chunk_with_empty(tensor, ranks, 0), torch_internals.Shards(tensor, ranks)
            assert len(usual) == len(own) == ranks
            assert all(torch.equal(one, other) for one, other in zip(usual, own, strict=True)), (rows, ranks)
    before = _fsdp_param._chunk_with_empty
    with fake_world(4096, rank=3), torch_internals.fsdp_cuts_own_shards():
        model = nn.Linear(2, 5000, bias=False)
        with patch.object(torch_internals, "Shards", wraps=torch_internals.Shards) as asked:
            fully_shard(model)
        assert asked.call_count and cast(Any, model.weight)._local_tensor.shape == (2, 2)
    assert _fsdp_param._chunk_with_empty is before
