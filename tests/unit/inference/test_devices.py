from pathlib import Path

import pytest
from sealmesh.inference.devices import DeviceError, Footprint, detect_device
from sealmesh.inference.devices.ascend import AscendDevice
from sealmesh.inference.devices.cpu import CpuDevice, available_memory_bytes
from sealmesh.inference.devices.cuda import CudaDevice

GIB = 1 << 30


def cpu(*flags: str, cores: int = 8, memory: int = 16 * GIB) -> CpuDevice:
    return CpuDevice("x86_64", frozenset(flags), cores, memory)


@pytest.mark.parametrize(
    ("flags", "own", "dtype"),
    [
        ((), "bfloat16", "float32"),
        (("avx2", "avx512f"), "bfloat16", "float32"),
        (("avx512f", "avx512_bf16"), "bfloat16", "bfloat16"),
        (("amx_bf16",), "", "bfloat16"),
        (("asimd", "bf16"), "bfloat16", "bfloat16"),
        (("asimd",), "bfloat16", "float32"),
        # Never the other half-width format: it would change answers.
        (("amx_bf16", "avx512_bf16"), "float16", "float32"),
        (("amx_bf16", "avx512_fp16"), "float16", "float16"),
        (("avx512_fp16",), "bfloat16", "float32"),
        (("amx_bf16",), "float32", "float32"),
    ],
)
def test_the_number_format_follows_model_and_hardware(flags: tuple[str, ...], own: str, dtype: str) -> None:
    assert cpu(*flags).dtype(own) == dtype


def test_amx_kernels_for_latent_attention_are_for_bfloat16_only() -> None:
    amx = cpu("amx_tile", "amx_bf16")
    assert amx.engine_args("float32", latent=True)["attention_backend"] == "CPU_MLA"
    assert "attention_backend" not in amx.engine_args("bfloat16", latent=True)
    assert "attention_backend" not in amx.engine_args("float32", latent=False)
    assert "attention_backend" not in cpu("avx2").engine_args("float32", latent=True)


def test_few_cores_keep_one_to_compute_on() -> None:
    assert cpu(cores=1).environment(1)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    assert cpu(cores=2).environment(1)["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "1"
    assert "VLLM_CPU_NUM_OF_RESERVED_CPU" not in cpu(cores=8).environment(1)


def test_the_environment_is_offline_and_repeatable() -> None:
    environment = cpu().environment(3)
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONHASHSEED"] == "0"


def test_too_little_memory_says_how_much_and_which_setting() -> None:
    device = cpu(memory=4 * GIB)
    device.check(Footprint(weights=1 * GIB, kv_cache=1 * GIB))
    with pytest.raises(DeviceError) as refused:
        device.check(Footprint(weights=1 * GIB, kv_cache=8 * GIB))
    for words in ("10.5 GiB are needed", "KV space 8.0", "4.0 GiB are free", "worker.kv_cache_gib"):
        assert words in str(refused.value)


def test_free_memory_is_bounded_by_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_memory_bytes(tmp_path) == 8000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert available_memory_bytes(tmp_path) == 8000 * 1024
    (group / "memory.max").write_text("1000000\n")
    (group / "memory.current").write_text("400000\n")
    assert available_memory_bytes(tmp_path) == 600000


def test_accelerators_are_found_by_their_device_files(tmp_path: Path) -> None:
    assert not CudaDevice(tmp_path).present()
    assert not AscendDevice(tmp_path).present()
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "davinci_manager", "davinci0", "davinci1"):
        (tmp_path / "dev" / name).touch()
    assert CudaDevice(tmp_path).present()
    assert AscendDevice(tmp_path).present()
    assert AscendDevice(tmp_path).describe() == "ascend, 2 NPUs"


def test_a_device_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AscendDevice, "present", lambda _: False)
    with pytest.raises(DeviceError, match="davinci_manager"):
        detect_device("ascend")
