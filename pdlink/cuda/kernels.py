"""The kernels on one device: the module in `pdlink._cuda`, loaded by the driver, and their launch."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_uint, c_void_p
from functools import lru_cache

from pdlink import _cuda
from pdlink.cuda.driver import CudaUnavailable, Device


def are_built() -> bool:
    """Whether this build has machine code of the kernels: nvcc was there."""
    return bool(_cuda.fatbin())


class Kernels:
    """Loaded once per device; usable from any thread."""

    def __init__(self, device: Device, image: bytes | None = None) -> None:
        """image: for `cuModuleLoadData`; None takes the built-in one.

        Raises CudaUnavailable in a build without nvcc, CudaFailure for a GPU older than the kernels (sm_80).
        """
        image = _cuda.fatbin() if image is None else image
        if not image:
            raise CudaUnavailable(
                "pdlink was built without nvcc, so there are no kernels; build it with CUDA 12 or later"
            )
        self._device = device
        self._module = c_void_p()
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()
        with device.current() as driver:
            driver.call("cuModuleLoadData", byref(self._module), ctypes.c_char_p(image))

    def launch(self, launch: _cuda.Launch, stream: int) -> None:
        """Launch it in a stream (0: the default one). Its memory must stay until it has run."""
        argument = ctypes.create_string_buffer(launch.argument, len(launch.argument))
        arguments = (c_void_p * 1)(ctypes.addressof(argument))
        blocks_x, blocks_y = launch.grid
        with self._device.current() as driver:
            driver.call(
                "cuLaunchKernel",
                c_void_p(self.function(launch.kernel)),
                *(c_uint(n) for n in (blocks_x, blocks_y, 1, _cuda.THREADS, 1, 1, 0)),
                c_void_p(stream),
                arguments,
                c_void_p(),
            )

    def function(self, name: str) -> int:
        """The driver's handle of a kernel. The first call loads the code, which is slow."""
        with self._lock:
            if name not in self._functions:
                function = c_void_p()
                with self._device.current() as driver:
                    driver.call("cuModuleGetFunction", byref(function), self._module, name.encode())
                self._functions[name] = function.value or 0
            return self._functions[name]

    def close(self) -> None:
        """Safe to call twice."""
        module, self._module = self._module, c_void_p()
        if module.value:
            with self._device.current() as driver:
                driver.call("cuModuleUnload", module)


@lru_cache(maxsize=64)
def of_device(index: int) -> Kernels:
    """The kernels of a device for the rest of the process, as torch keeps its own."""
    device = Device(index)
    device.open()
    return Kernels(device)
