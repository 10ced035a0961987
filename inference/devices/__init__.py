"""Device families: what each needs from vLLM, its environment and its host."""

from __future__ import annotations

from typing import Literal

from sealmesh.inference.devices.ascend import AscendDevice
from sealmesh.inference.devices.base import Device, DeviceError, Footprint
from sealmesh.inference.devices.cpu import CpuDevice
from sealmesh.inference.devices.cuda import CudaDevice

__all__ = ["Device", "DeviceError", "Footprint", "detect_device"]


def detect_device(name: Literal["auto", "cpu", "cuda", "ascend"] = "auto") -> Device:
    """The named device family, or the best one that this host has (accelerators before the CPU).

    Looks at device files and /proc only: no driver is loaded and no framework imported.

    Raises:
        DeviceError: a named family is not present here.
    """
    accelerators: tuple[Device, ...] = (CudaDevice(), AscendDevice())
    if name == "auto":
        return next((device for device in accelerators if device.present()), CpuDevice.of_host())
    if name == "cpu":
        return CpuDevice.of_host()
    device = next(device for device in accelerators if device.name == name)
    if not device.present():
        raise DeviceError(f"device {name} was asked for, but {device.absence}; set device = auto or cpu")
    return device
