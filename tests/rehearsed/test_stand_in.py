"""The stand-in for the driver: which names a library takes, what is generated for them, what is said to be missing."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.core.errors import RunFailed, UserError
from fivefold.hardware.cluster import Cluster
from fivefold.rehearsal import changes, stand_in
from fivefold.rehearsal.request import RehearsalRequest
from fivefold.rehearsal.stage import world_of
from fivefold.rehearsal.stand_in import SOURCE, Torch, undefined

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF files are Linux's")
needs_compiler = pytest.mark.skipif(stand_in.compiler() is None, reason="no C compiler")

CALLER = "int cudaMalloc(void **, long); int cublasSgemm_v2(void); int cudaNewInThisVersion(void); int other(void);\n"
CALLS = "int call(void) { return cudaMalloc(0, 0) + cublasSgemm_v2() + cudaNewInThisVersion() + other(); }\n"


@pytest.fixture
def torch(tmp_path: Path) -> Torch:
    """A torch whose library takes four names, of which one is not CUDA's, beside headers of CUDA."""
    folder, headers = tmp_path / "torch", tmp_path / "nvidia/cu99/include"
    for each in (folder / "lib", headers):
        each.mkdir(parents=True)
    source = tmp_path / "caller.c"
    source.write_text(CALLER + CALLS)
    stand_in.compile_library([str(source)], folder / "lib/libtorch_cuda.so")
    (headers / "driver_types.h").write_text("")
    (headers / "cuda.h").write_text("#define cuMemFree cuMemFree_v2\nCUresult CUDAAPI cuMemFree(CUdeviceptr p);\n")
    return Torch(folder, "9.9", "99.1")


@needs_compiler
def test_the_names_that_a_library_takes(torch: Torch) -> None:
    names = undefined(torch.libraries[0])
    assert {"cudaMalloc", "cublasSgemm_v2", "cudaNewInThisVersion", "other"} <= names
    assert "call" not in names


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library " * 10)
    with pytest.raises(RunFailed, match="cannot be read"):
        undefined(tmp_path / "text")


@needs_compiler
def test_what_is_not_written_is_generated(torch: Torch, tmp_path: Path) -> None:
    """Names of CUDA alone, but for those that the source has; a routine that computes counts as a kernel."""
    made = stand_in.rest(torch, "int cudaMalloc(void **out, size_t size) {\n")
    names = re.findall(r"^int (\w+)\(void\) \{", made, re.MULTILINE)
    assert names == ["cuMemFree", "cublasSgemm_v2", "cudaNewInThisVersion"]
    (tmp_path / "rest.c").write_text(made + "int rehearsal_blas(void) { return 7; }\n")
    stand_in.compile_library([str(tmp_path / "rest.c")], tmp_path / "rest.so")
    library = ctypes.CDLL(str(tmp_path / "rest.so"))
    assert (library.cudaNewInThisVersion(), library.cublasSgemm_v2()) == (0, 7)


def test_the_source_defines_what_must_do_something() -> None:
    defined = set(stand_in._DEFINED.findall(SOURCE.read_text()))
    assert {"cudaMalloc", "cuMemCreate", "cudaLaunchKernel", "ncclAllReduce", "ncclCommSplit"} <= defined
    assert "cuGetExportTable" in defined  # generated, it would leave NVRTC with a table at address 0


@needs_compiler
def test_source_that_does_not_compile_is_said(tmp_path: Path) -> None:
    (tmp_path / "wrong.c").write_text("int wrong( {\n")
    with pytest.raises(RunFailed, match=r"does not compile: .*error"):
        stand_in.compile_library([str(tmp_path / "wrong.c")], tmp_path / "wrong.so")


def test_a_damaged_stand_in_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader would pass it over, and every later rehearsal fail."""
    built = list[Path]()

    def compiled(_: Iterable[str], out: Path, *__: Iterable[str]) -> None:
        built.append(out)
        out.write_bytes(b"a library")

    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    monkeypatch.setattr(stand_in, "lacking", list)
    monkeypatch.setattr(Torch, "installed", lambda: Torch(tmp_path / "torch", "9.9", "13.0"))
    monkeypatch.setattr(stand_in, "rest", lambda *_: "")
    monkeypatch.setattr(stand_in, "compile_library", compiled)
    library = stand_in.library()
    for damage in (b"", b"a l", b"a libraro"):
        library.write_bytes(damage)
        assert stand_in.library().read_bytes() == b"a library"
    assert stand_in.library() == library and len(built) == 4


def test_a_rank_allocates_as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it joins its world, which is when training says it: a rank that is watched has started CUDA by then."""
    monkeypatch.setattr(stand_in, "library", lambda: Path("/cache/libcuda.so.1"))
    found = stand_in.environment(Cluster.parse("8xH100").chip, 8, base={})
    assert found["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_a_process_sees_the_devices_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 A100, of capability 8.0, with all that the driver shows of their memory."""
    monkeypatch.setattr(stand_in, "library", lambda: Path("/cache/libcuda.so.1"))
    chip = Cluster.parse("4xA100-80").chip
    found = stand_in.environment(chip, 4, base={"LD_LIBRARY_PATH": "/lib", "A": "b"})
    own = [found[f"FIVEFOLD_CHIP_{name}"] for name in ("DEVICES", "MAJOR", "MINOR", "SHARED", "MEMORY", "SMS")]
    assert own == ["4", "8", "0", "167936", str(chip.memory_bytes), "108"]
    assert (found["LD_LIBRARY_PATH"], found["A"]) == ("/cache:/lib", "b")


def test_a_chip_that_torch_has_kernels_for(subtests: pytest.Subtests) -> None:
    for name, is_one in {"H100": True, "A100-40": True, "B200": True, "MI250X": False, "MI300X": False}.items():
        with subtests.test(msg=name):
            assert stand_in.stands_for(Cluster.parse(f"1x1x{name}").chip) is is_one


def test_it_is_built_for_the_versions_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA 12.8 says 12080, and NCCL what its header says."""
    header = tmp_path / "nvidia/nccl/include/nccl.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define NCCL_VERSION_CODE 22805\n")
    told: list[str] = []

    def compiled(sources: object, out: Path, options: Iterable[str]) -> None:
        told.extend(options)
        out.write_text("a library")

    monkeypatch.setattr(stand_in, "compile_library", compiled)
    monkeypatch.setattr(stand_in, "rest", lambda *_: "")
    stand_in._build(Torch(tmp_path / "torch", "9.9", "12.8"), tmp_path / stand_in.LIBRARY)
    assert {"-DCUDART=12080", "-DNCCL=22805"} <= set(told)


@pytest.mark.parametrize(("total", "parts", "dealt"), [(10, 4, [3, 3, 2, 2]), (8, 4, [2] * 4), (1, 3, [1, 0, 0])])
def test_tokens_are_dealt_evenly(total: int, parts: int, dealt: list[int]) -> None:
    assert changes.even(total, parts) == dealt


@pytest.mark.parametrize("is_full", [True, False])
def test_what_is_changed_on_each_machine_and_not_behind_it(is_full: bool) -> None:
    places = [(each.owner, each.function.__name__, each.on) for each in changes.CHANGES]
    usual = [getattr(owner, name) for owner, name, _ in places]
    with changes.changed(is_full=is_full):
        differs = [getattr(owner, name) is not was for (owner, name, _), was in zip(places, usual, strict=True)]
    assert differs == [on in ("both", "stand-in" if is_full else "cpu") for *_, on in places]
    assert [getattr(owner, name) for owner, name, _ in places] == usual


def test_a_rank_is_on_a_device_of_its_node() -> None:
    """Rank 11 of 16, 8 devices a node: the fourth. On the CPU it is alone on its machine."""
    request = RehearsalRequest(config="", folder="", rank=11, world=16, local_size=8, steps=2)
    world = world_of(request)
    assert (world.rank, world.local_rank, world.size, world.local_size, world.device) == (11, 3, 16, 8, "cuda:3")
    alone = world_of(replace(request, is_full=False))
    assert (alone.rank, alone.local_rank, alone.size, alone.backend) == (11, 0, 16, "fake")


def test_what_is_missing_is_said_with_how_to_get_it(tmp_path: Path) -> None:
    """In the order in which one would mend it."""
    with (
        patch.object(Torch, "installed", lambda: Torch(tmp_path, "9.9+cpu", None)),
        patch.object(stand_in, "compiler", lambda: None),
    ):
        assert [each.what for each in stand_in.lacking()] == [
            "this torch is built without CUDA",
            "there is no C compiler",
        ]
        with pytest.raises(UserError, match="no stand-in for the CUDA driver: this torch is built without CUDA"):
            stand_in.library()
    with patch.object(Torch, "installed", lambda: Torch(tmp_path, "9.9", "99.1")):
        assert stand_in.lacking()[0].what == "the headers of CUDA are missing"


def test_what_is_changed_is_there(subtests: pytest.Subtests) -> None:
    """A function that has moved is found here, and not in a rehearsal that changes nothing."""
    for change in changes.CHANGES:
        with subtests.test(msg=change.function.__name__):
            assert getattr(change.owner, change.function.__name__) is change.function and change.why


GRAPH = """
import torch
from fivefold.rehearsal.stream_order import Driver

x, graph, driver = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph(), Driver()
counts = [driver.counts().launches]
with torch.cuda.graph(graph):
    y = (x + 1) * 2
counts.append(driver.counts().launches)
for _ in range(3):
    graph.replay()
counts.append(driver.counts().launches)
x + 1
counts.append(driver.counts().launches)
print([count - counts[0] for count in counts])
"""


@pytest.mark.rehearsal
@pytest.mark.skipif(bool(stand_in.lacking()), reason="it needs a CUDA build of torch, and a C compiler")
def test_a_cuda_graph_is_one_launch() -> None:
    """What is captured is not launched; afterwards kernels are launches again."""
    environment = stand_in.environment(Cluster.parse("1xH100").chip, 1)
    done = subprocess.run([sys.executable, "-c", GRAPH], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "[0, 0, 3, 4]", done.stdout + done.stderr
