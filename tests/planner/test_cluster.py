"""The hardware as data: every chip file is whole and its numbers can be; what a cluster's text and file say."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.core.errors import UserError
from fivefold.hardware.chip import DTYPES, HARDWARE, Chip, chip_names, chip_of_device
from fivefold.hardware.cluster import Cluster
from fivefold.planner.report import guessed

TYPES = {"p4d": "A100-40", "p5": "H100", "p5e": "H200", "p6": "B200", "pcie": "L40S"}


def test_a_chip_file_is_whole(subtests: pytest.Subtests) -> None:
    """Everything is there, in units that make sense, and each number of the file has its source beside it."""
    for name in chip_names():
        with subtests.test(msg=name):
            cluster = Cluster.parse(f"1x1x{name}")
            chip, inside, between = cluster.chip, cluster.node.inside, cluster.node.between
            assert {*chip.peak_tflops} == {*chip.matmul_fraction} <= {*DTYPES}
            for fraction in (*chip.matmul_fraction.values(), chip.memory_fraction, inside.fraction, between.fraction):
                assert 0.1 <= fraction <= 1
            assert 4 <= chip.memory_gib <= 300 and chip.memory_bytes == int(chip.memory_gib * 2**30)
            assert chip.memory_bandwidth_gbs <= 8000 and len(chip.capability) == 2
            assert chip.context_gib + chip.communicator_gib < chip.memory_gib / 5
            assert inside.bytes_per_second > between.bytes_per_second * 0.9 and inside.latency_us <= between.latency_us
            assert 0 <= between.decay < 1 and inside.decay == 0


def test_a_chip_that_differs_is_no_alias(subtests: pytest.Subtests) -> None:
    """Peaks in bf16 and fp8, GB/s of its memory and of its link in one direction, GiB: of data sheets."""
    cases = {
        "H100": (989.4, 1978.9, 3350, 450, 79.18),
        "H800": (989.4, 1978.9, 3350, 200, 79.18),
        "H20": (148, 296, 4000, 450, 95),
        "H20-3e": (148, 296, 4800, 450, 139.8),
        "A800": (312, None, 2039, 200, 79.15),
        "A800-40": (312, None, 1555, 200, 39.39),
        "L40S": (362, 733, 864, 31.5, 44.39),
        "H200": (989.4, 1978.9, 4800, 450, 139.8),
        "B200": (2250, 4500, 8000, 900, 178.35),
        "GB200": (2500, 5000, 8000, 900, 184.31),
        "MI300X": (1307.4, 2614.9, 5300, 448, 191.69),
        "MI325X": (1307.4, 2614.9, 6000, 448, 255.69),
        "MI355X": (2516.6, 5033.2, 8000, 537, 287.98),
    }  # fmt: skip
    for name, numbers in cases.items():
        with subtests.test(msg=name):
            cluster = Cluster.parse(f"8x{name.lower()}")
            chip, peaks = cluster.chip, cluster.chip.peak_tflops
            found = (
                peaks["bf16"], peaks.get("fp8"), chip.memory_bandwidth_gbs, cluster.node.inside.gbs, chip.memory_gib
            )  # fmt: skip
            assert (found, cluster.text) == (numbers, f"1x8x{name}")


COMPARED = ("A100-40", "GB300")  # with published runs, and equal to the chip they are like but for what they say


def test_efficiencies_that_were_not_measured_are_said_to_be(subtests: pytest.Subtests) -> None:
    """Those of another chip, or judged: so their file says, and so does a plan."""
    for name in chip_names():
        with subtests.test(msg=name):
            text, chip = (HARDWARE / "chips" / f"{name}.toml").read_text(), Cluster.parse(f"1x1x{name}").chip
            of = "" if name in (*COMPARED, "cpu") else _efficiencies(text)
            assert chip.efficiencies == of or chip_of(of).efficiencies == chip.efficiencies != ""
            assert bool(guessed(chip)) == (bool(of) or name == "cpu")
    assert guessed(chip_of("H800")) == "efficiencies of H800 are those of H100, fivefold calibrate measures them"
    assert guessed(chip_of("L40S")) == "efficiencies of L40S are a judgement, fivefold calibrate measures them"


def chip_of(name: str) -> Chip:
    return Cluster.parse(f"1x1x{name}").chip


def _efficiencies(text: str) -> str:
    """`judgement` where a file says so of its large matmuls, the chip it is like where it says nothing of them."""
    heads = re.search(r"^\[matmul_fraction\](.*)\n(?:(?:bf16|fp16) =(.*))?", text, re.MULTILINE)
    like = re.search(r'^like = "(.*)"', text, re.MULTILINE)
    if heads:
        return "judgement" if "judgement" in f"{heads[1]}{heads[2]}" else ""
    return like[1] if like else ""


def test_what_a_chip_can_do() -> None:
    chip = Cluster.parse("8xH100").chip
    assert chip.flops_per_second("bf16") == pytest.approx(989.4e12 * 0.80)
    assert chip.flops_per_second("fp8") == pytest.approx(1978.9e12 * 0.71)
    assert chip.memory_bytes_per_second == pytest.approx(3.35e12 * 0.9)
    assert Cluster.parse("8xV100-32").chip.flops_per_second("bf16") is None


def test_the_chip_of_a_device(subtests: pytest.Subtests) -> None:
    cases = {
        "NVIDIA A100-SXM4-40GB": "A100-40", "NVIDIA A100-SXM4-80GB": "A100-80", "NVIDIA A100 80GB PCIe": "A100-PCIe",
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H200": "H200", "NVIDIA B200": "B200",
        "NVIDIA GB300": "GB300", "AMD Instinct MI300X": "MI300X", "Tesla V100-SXM2-32GB": "V100-32",
        "NVIDIA H800": "H800", "NVIDIA A800-SXM4-80GB": "A800", "NVIDIA A800-SXM4-40GB": "A800-40",
        "NVIDIA A800 80GB PCIe": "A100-PCIe", "NVIDIA H800 PCIe": "H100-PCIe", "NVIDIA H20": "H20",
        "NVIDIA H20-3e": "H20-3e", "AMD Instinct MI325X": "MI325X", "AMD Instinct MI355X": "MI355X",
        "NVIDIA H200 NVL": None, "NVIDIA L4": None, "NVIDIA A100-SXM4-80GB MIG 1g.10gb": None,
    }  # fmt: skip
    for device, chip in cases.items():
        with subtests.test(msg=device):
            if chip is not None:
                assert chip_of_device(device, fix="none").name == chip
                continue
            with pytest.raises(UserError, match=f"does not know {device}") as caught:
                chip_of_device(device, fix="take another")
            assert caught.value.fix == "take another"


def test_a_cluster_says_its_size_and_chip(subtests: pytest.Subtests) -> None:
    cases = [
        ("16x8xH100", 16, 8, "H100"), ("8xH100", 1, 8, "H100"), ("1x4xA100-40", 1, 4, "A100-40"),
        ("2x8xa100", 2, 8, "A100-80"), ("18x4xGB200", 18, 4, "GB200"), ("1x72xGB300", 1, 72, "GB300"),
        ("2xcpu", 1, 2, "cpu"), (" 4x8xMI300X ", 4, 8, "MI300X"),
    ]  # fmt: skip
    for text, nodes, devices, chip in cases:
        with subtests.test(msg=text):
            cluster = Cluster.parse(text)
            assert (cluster.nodes, cluster.devices_per_node, cluster.chip.name) == (nodes, devices, chip)
            assert cluster.world == nodes * devices
            assert Cluster.parse(cluster.text) == cluster


def test_a_type_of_nodes_replaces_links(subtests: pytest.Subtests) -> None:
    for kind, chip in TYPES.items():
        with subtests.test(msg=kind):
            usual, other = Cluster.parse(f"2x8x{chip}"), Cluster.parse(f"2x8x{chip}@{kind}")
            assert other.text == f"2x8x{chip}@{kind}" and other.chip == usual.chip
            assert other.node.between != usual.node.between and Cluster.parse(f"2x8x{chip}@dgx") == usual
            assert Cluster.parse(f"2x8x{chip}@{kind.upper()}") == other


def test_bandwidth_of_a_device() -> None:
    assert Cluster.parse("64x8xH100@p5").node.between.bytes_per_second == pytest.approx(50e9 * 0.74)
    assert Cluster.parse("64x8xH100").node.between.bytes_per_second == 40e9


def test_the_link_of_a_group(subtests: pytest.Subtests) -> None:
    cases = [
        ("2x8xH100", range(8), "NVLink", 1, 8), ("2x8xH100", range(8, 16), "NVLink", 1, 8),
        ("2x8xH100", (0, 8), "InfiniBand NDR", 2, 1), ("2x8xH100", range(16), "InfiniBand NDR", 2, 8),
        ("2x8xH100", (6, 7, 8), "InfiniBand NDR", 2, 2), ("2x8xH100", (3,), "NVLink", 1, 1),
        ("36x4xGB200", range(72), "NVLink", 1, 72), ("36x4xGB200", range(0, 144, 4), "InfiniBand NDR", 2, 18),
        ("4x4xH100", (3, 4), "InfiniBand NDR", 2, 1),
        ("12x7xGB200", (69, 70), "InfiniBand NDR", 2, 1),  # ten whole nodes of seven in a rack of 72
    ]  # fmt: skip
    for text, ranks, kind, nodes, per_node in cases:
        with subtests.test(text=text, ranks=ranks):
            span = Cluster.parse(text).tier_of(ranks)
            assert (span.link.kind, span.nodes, span.per_node) == (kind, nodes, per_node)


def test_a_file_replaces_what_is_known(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        'cluster = "4x8xA100@p4d"\n[chip]\nmemory_gib = 94\n[chip.peak_tflops]\nfp8 = 500\n'
        "[node.between]\ndecay = 0.1\n"
    )
    mine, usual = Cluster.parse(str(file)), Cluster.parse("4x8xA100@p4d")
    assert (mine.chip.memory_gib, mine.chip.peak_tflops["fp8"], mine.node.between.decay) == (94, 500, 0.1)
    assert mine.chip.memory_bandwidth_gbs == usual.chip.memory_bandwidth_gbs and mine.node.inside == usual.node.inside


def test_processes_share_the_cores_of_a_server(tmp_path: Path) -> None:
    """Of two cores one process has both, each of two has one, each of four has half of one."""
    shares = []
    for processes in (1, 2, 4):
        file = tmp_path / f"{processes}.toml"
        file.write_text(f'cluster = "{processes}xcpu"\n[node]\ncores = 2\n')
        shares.append(Cluster.parse(str(file)))
    core = Cluster.parse("1xcpu")
    assert core.chip.is_guess and not replace(core.chip, doubt=1.0).is_guess
    for share, speed, wait in zip(shares, (2.0, 1.0, 0.5), (1, 1, 2), strict=True):
        chip, inside = share.chip, share.node.inside
        assert chip.peak_tflops == {dtype: peak * speed for dtype, peak in core.chip.peak_tflops.items()}
        assert chip.memory_bandwidth_gbs == core.chip.memory_bandwidth_gbs * speed
        assert chip.launch_us == core.chip.launch_us * wait
        assert inside.gbs == core.node.inside.gbs / wait
        assert (inside.latency_us, inside.meet_us) == (core.node.inside.latency_us * wait, 2000 * wait)


def test_a_text_that_is_no_cluster_is_refused(subtests: pytest.Subtests) -> None:
    cases = [
        ("8xH10", "did you mean .*H100"), ("8xhopper", "known are A100-40"), ("nonsense", "NODESxDEVICESxCHIP"),
        ("0x8xH100", "no devices"), ("8x0xH100", "no devices"), ("64xH100", "write 8x8xH100"),
        ("2x12xH100@p5", "write 3x8xH100"), ("8xH100@p9", "did you mean"), ("8xA100@p5", "has H100, not A100-80"),
        ("H100", "NODESxDEVICESxCHIP"), ("-1x8xH100", "NODESxDEVICESxCHIP"), ("999999x8xH100", "more than 1,048,576"),
        ("nowhere.toml", "cannot be read"),
    ]  # fmt: skip
    for text, said in cases:
        with subtests.test(msg=text), pytest.raises(UserError, match=said):
            Cluster.parse(text)


def test_a_pipe_or_an_endless_file_is_no_cluster(tmp_path: Path) -> None:
    """Neither is read for ever."""
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "endless.toml").symlink_to("/dev/zero")
    (tmp_path / "large.toml").touch()
    os.truncate(tmp_path / "large.toml", 2**40)
    for name in ("pipe", "endless", "large"):
        with pytest.raises(UserError, match=r"cannot be read as a cluster: (not a regular file|more than)"):
            Cluster.parse(f"{tmp_path}/{name}.toml")


def test_a_file_that_says_what_cannot_be_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        ("[chip]\nmemory_gib = 80", "does not say its cluster"),
        ('cluster = "8xH100"\n[chip]\nmemory = 80', "did you mean memory_fraction or memory_gib"),
        ('cluster = "8xH100"\n[chip]\nmemory_gib = "80"', "cannot be '80'"),
        ('cluster = "8xH100"\n[chip]\nmemory_gib = -1', "cannot be -1"),
        ('cluster = "8xH100"\n[chip]\nmemory_gib = inf', "cannot be inf"),
        ('cluster = "8xH100"\n[chip]\nsms = true', "cannot be True"),
        ('cluster = "8xH100"\n[chip]\nsms = 1.5', "cannot be 1.5"),
        ('cluster = "8xH100"\n[chip]\nmatmul_fraction = 0.5', "cannot be 0.5"),
        ('cluster = "8xH100"\n[chip.matmul_fraction]\nbf16 = 80', "cannot be 80"),
        ('cluster = "8xH100"\n[node.between]\ngbs = 0', "cannot be 0"),
        ('cluster = "8xH100"\n[links]\ngbs = 1', "links is no table"),
        ("cluster = 8x", "cannot be read"),
        ('cluster = "8xH100"\na = ' + "[" * 5000, "cannot be read"),
        ('cluster = "8xH100"\n[chip]\nmemory_gib = 1e300', "cannot be 1e.300"),
        ('cluster = "8xH100"\n[chip]\nmemory_gib = 1' + "0" * 400, "cannot be 100"),
        ('cluster = "8xH100"\n[chip.peak_tflops]\nbf16 = 1e-320', "cannot be 1e-320"),
        ('cluster = "2x8xH100"\n[node.between]\ndecay = 1e308', "cannot be 1e.308"),
        ('cluster = "8xH100"\n[chip]\ntile = [0, 128]', "cannot be .0, 128"),
        ('cluster = "8xH100"\n[chip]\ntile = []', "tile cannot be"),
        ('cluster = "8xH100"\n[chip]\ncapability = ["x"]', "capability cannot be"),
        ('cluster = "8xH100"\n[node]\nchips = [1]', "chips cannot be"),
    ]
    for lines, said in cases:
        with subtests.test(msg=repr(lines[:80])):
            file = tmp_path / "mine.toml"
            file.write_text(lines)
            with pytest.raises(UserError, match=said) as raised:
                Cluster.parse(str(file))
            assert str(file) in raised.value.what


def test_a_number_stands_beside_its_source() -> None:
    """In every file but that of the CPU, which says at its top that all of it is judgement."""
    bare = [
        f"{file.stem}: {line}"
        for file in sorted((HARDWARE / "chips").glob("*.toml")) if file.stem != "cpu"
        for line in _numbers_without_source(file.read_text())
    ]  # fmt: skip
    assert bare == []


def _numbers_without_source(text: str) -> list[str]:
    """Lines with a number, neither they nor the head of their table with a comment; what hardware is needs none."""
    plain, head = ("capability", "most_devices", "domain_devices"), ""
    bare = []
    for line in text.splitlines():
        head = line if line.startswith("[") else head
        key, _, value = line.partition(" = ")
        if value[:1].isdigit() and "#" not in line and "#" not in head and key not in plain:
            bare.append(line)
    return bare
