"""Facts about made-up hosts."""

import json

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import host_facts
from kvtrial.host import conditions

GIB = 2**30


def test_meminfo_is_in_bytes():
    assert host_facts.parse_meminfo("MemTotal:  16 kB\nHugePages_Total:   3\nbroken\n") == {
        "MemTotal": 16384,
        "HugePages_Total": 3,
    }


@pytest.mark.parametrize(
    ("governors", "said"),
    [
        ({}, None),
        ({0: "performance", 1: "performance", 11: "performance"}, "performance"),
        ({0: "performance", 1: "powersave", 11: "powersave"}, "performance (1 CPU), powersave (2 CPUs)"),
    ],
)
def test_the_governor_is_that_of_all_cpus_and_a_mixed_one_is_named(governors, said, tmp_path):
    """The first CPU's alone says nothing of the others, on which the engine runs. To modules and host program."""
    (tmp_path / "cpufreq").mkdir()
    for cpu, name in governors.items():
        (tmp_path / f"cpu{cpu}" / "cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "cpufreq" / "scaling_governor").write_text(f"{name}\n")
    assert host_facts.governor(str(tmp_path)) == conditions.governor(tmp_path) == said


MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {50 * 2**20} kB\nSwapTotal: 0 kB\n"
V1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
V2 = ("memory.max", "memory.current", "memory.stat")
STAT = f"anon {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"


@pytest.mark.parametrize("names", [V1, V2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("limit", "current", "total", "available"),
    [
        (8 * GIB, 5 * GIB, 8 * GIB, 5 * GIB),  # 2 GiB of what is in use are cached files
        (8 * GIB, GIB, 8 * GIB, 8 * GIB),
        (60 * GIB, 3 * GIB, 60 * GIB, 50 * GIB),
        (2**63 - 4096, 5 * GIB, 64 * GIB, 50 * GIB),
        ("max", 5 * GIB, 64 * GIB, 50 * GIB),
        (None, None, 64 * GIB, 50 * GIB),
    ],
)
def test_a_containers_limit_counts_for_modules_and_host_program(names, limit, current, total, available, tmp_path):
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory").mkdir()
    for name, text in zip(names, (limit, current, STAT), strict=True):
        if limit is not None:
            (tmp_path / name).write_text(f"{text}\n")
    told = host_facts.memory(host_facts.parse_meminfo(MEMINFO), host_facts.cgroup_memory(str(tmp_path)))
    assert (told["ram_total_bytes"], told["ram_available_bytes"]) == (total, available)
    seen = conditions.meminfo(tmp_path, tmp_path)
    assert (seen["MemTotal"], seen["MemAvailable"]) == (total, available)


def test_cpu_flags_are_those_that_the_engine_cares_for():
    text = "processor: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 avx512f sse\n\nprocessor: 1\nmodel name: Other\n"
    assert host_facts.parse_cpuinfo(text) == ("Some CPU", ["avx2", "avx512f"])
    assert host_facts.parse_cpuinfo("model name: Old\nflags: fpu sse sse2 avx\n") == ("Old", [])
    assert host_facts.parse_cpuinfo("model name: Hidden\n") == ("Hidden", None)


def test_gpus_are_read_and_missing_values_are_none():
    text = "0, GPU-1, NVIDIA H200, 143771, 4, 580.95.05, 00000000:1B:00.0, 9.0, Enabled, Enabled\n"
    text += "1, GPU-2, NVIDIA X, [N/A], [N/A], 580.95.05, 0, 9.0, [N/A], Disabled\nfailed to look\n"
    first, second = host_facts.parse_gpus(text)
    assert first["memory_total_bytes"] == 143771 * 2**20
    assert first["driver_version"] == "580.95.05"
    assert second["memory_total_bytes"] is None
    assert host_facts.smallest_gpu_mebibytes([first]) == 143771
    assert host_facts.smallest_gpu_mebibytes([first, second]) is None
    assert host_facts.smallest_gpu_mebibytes([]) is None


def test_gpu_processes_are_read():
    assert host_facts.parse_gpu_processes("123, 500, GPU-1\nNo running processes found\n") == [
        {"pid": 123, "memory_bytes": 500 * 2**20, "gpu_uuid": "GPU-1"}
    ]


def test_free_space_is_that_of_the_nearest_existing_parent(tmp_path):
    assert host_facts.free_bytes(str(tmp_path / "not" / "there")) > 0


def test_rocm_is_seen_by_its_device(tmp_path):
    none = {"nvidia": False, "rocm": False, "xpu": False}
    assert host_facts.accelerators(str(tmp_path), str(tmp_path)) == none
    (tmp_path / "kfd").touch()
    assert host_facts.accelerators(str(tmp_path), str(tmp_path)) == {**none, "rocm": True}


def test_an_nvidia_gpu_is_seen_without_its_driver_and_by_its_driver(tmp_path):
    device = tmp_path / "bus" / "pci" / "devices" / "0000:05:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x068000\n")
    assert not host_facts.accelerators(str(tmp_path), str(tmp_path))["nvidia"]  # a bridge
    (device / "class").write_text("0x030200\n")
    assert host_facts.accelerators(str(tmp_path), str(tmp_path))["nvidia"]
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert host_facts.accelerators(str(tmp_path / "dev"), str(tmp_path / "none"))["nvidia"]


def test_only_an_intel_gpu_with_memory_of_its_own_is_an_xpu(tmp_path):
    device = tmp_path / "class" / "drm" / "card0" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x8086\n")
    assert not host_facts.accelerators(str(tmp_path), str(tmp_path))["xpu"]
    (device / "tile0").mkdir()
    (device / "tile0" / "physical_vram_size_bytes").write_text("1\n")
    assert host_facts.accelerators(str(tmp_path), str(tmp_path))["xpu"]
    (device / "vendor").write_text("0x1a03\n")
    assert not host_facts.accelerators(str(tmp_path), str(tmp_path))["xpu"]


def test_own_processes_are_host_programs_and_engines_of_campaigns(tmp_path):
    campaign = tmp_path / "campaigns" / "c1"
    (campaign / "runs" / ".partial").mkdir(parents=True)
    (campaign / "progress.json").write_text(json.dumps({"pid": 5, "pid_start_ticks": 50}))
    (campaign / "runs" / ".partial" / "engine.json").write_text(json.dumps({"pid": 6, "start_ticks": 60}))
    (tmp_path / "campaigns" / "c2").mkdir()
    (tmp_path / "campaigns" / "c2" / "progress.json").write_text("half a fi")
    assert host_facts.own_processes(str(tmp_path)) == {(5, 50), (6, 60)}


def test_a_leftover_that_is_mapped_is_told_from_one_that_is_not(tmp_path, proc):
    for name in ("vllm_offload_a.mmap", "vllm_offload_b.mmap", "somebody_elses"):
        (tmp_path / name).write_bytes(b"1234")
    proc(10, maps=f"7f0-7f1 rw-s 0000 00:01 5    {tmp_path}/vllm_offload_a.mmap\n")
    found = host_facts.shared_memory_leftovers(str(tmp_path), proc.root)
    assert [(item["path"].rsplit("/", 1)[1], item["bytes"], item["mapped"]) for item in found] == [
        ("vllm_offload_a.mmap", 4, True),
        ("vllm_offload_b.mmap", 4, False),
    ]
