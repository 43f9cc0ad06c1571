"""Clock and memory bandwidth of the GPU through the driver alone: no toolkit, no torch.

The driver compiles the PTX below for the GPU it finds. ``spin`` keeps every core busy and tells
cycles and nanoseconds of each block, which gives the real clock; ``sweep`` reads a buffer.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from spark_appliance.doctor.probe.core import ProbeError

PTX = """
.version 7.0
.target sm_70
.address_size 64

.visible .entry spin(.param .u64 out, .param .u32 rounds)
{
    .reg .pred %p<3>;
    .reg .b32 %r<8>;
    .reg .b64 %d<12>;
    .reg .f32 %f<12>;
    ld.param.u64 %d0, [out];
    ld.param.u32 %r0, [rounds];
    cvta.to.global.u64 %d0, %d0;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    cvt.rn.f32.u32 %f0, %r1;
    mov.f32 %f1, 0f3F7FFF00;
    mov.f32 %f2, 0f3F000000;
    mov.f32 %f3, %f0;
    mov.f32 %f4, %f0;
    mov.f32 %f5, %f0;
    mov.f32 %f6, %f0;
    mov.u32 %r3, 0;
    mov.u64 %d1, %clock64;
    mov.u64 %d2, %globaltimer;
again:
    fma.rn.f32 %f3, %f3, %f1, %f2;
    fma.rn.f32 %f4, %f4, %f1, %f2;
    fma.rn.f32 %f5, %f5, %f1, %f2;
    fma.rn.f32 %f6, %f6, %f1, %f2;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p0, %r3, %r0;
    @%p0 bra again;
    mov.u64 %d3, %clock64;
    mov.u64 %d4, %globaltimer;
    add.f32 %f3, %f3, %f4;
    add.f32 %f5, %f5, %f6;
    add.f32 %f3, %f3, %f5;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra done;
    sub.u64 %d5, %d3, %d1;
    sub.u64 %d6, %d4, %d2;
    mul.wide.u32 %d7, %r2, 24;
    add.u64 %d8, %d0, %d7;
    st.global.u64 [%d8], %d5;
    st.global.u64 [%d8+8], %d6;
    st.global.f32 [%d8+16], %f3;
done:
    ret;
}

.visible .entry sweep(.param .u64 out, .param .u64 data, .param .u64 vectors)
{
    .reg .pred %p<3>;
    .reg .b32 %r<32>;
    .reg .b64 %d<24>;
    ld.param.u64 %d0, [out];
    ld.param.u64 %d1, [data];
    ld.param.u64 %d2, [vectors];
    cvta.to.global.u64 %d0, %d0;
    cvta.to.global.u64 %d1, %d1;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %nctaid.x;
    mul.wide.u32 %d3, %r1, %r2;
    cvt.u64.u32 %d4, %r0;
    add.u64 %d3, %d3, %d4;
    mul.wide.u32 %d5, %r2, %r3;
    shl.b64 %d6, %d5, 4;
    shl.b64 %d7, %d5, 2;
    mul.lo.u64 %d8, %d5, 3;
    mov.u32 %r4, 0;
again:
    add.u64 %d9, %d3, %d8;
    setp.ge.u64 %p0, %d9, %d2;
    @%p0 bra done;
    shl.b64 %d10, %d3, 4;
    add.u64 %d11, %d1, %d10;
    add.u64 %d12, %d11, %d6;
    add.u64 %d13, %d12, %d6;
    add.u64 %d14, %d13, %d6;
    ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%d11];
    ld.global.v4.u32 {%r9, %r10, %r11, %r12}, [%d12];
    ld.global.v4.u32 {%r13, %r14, %r15, %r16}, [%d13];
    ld.global.v4.u32 {%r17, %r18, %r19, %r20}, [%d14];
    xor.b32 %r5, %r5, %r6;
    xor.b32 %r7, %r7, %r8;
    xor.b32 %r9, %r9, %r10;
    xor.b32 %r11, %r11, %r12;
    xor.b32 %r13, %r13, %r14;
    xor.b32 %r15, %r15, %r16;
    xor.b32 %r17, %r17, %r18;
    xor.b32 %r19, %r19, %r20;
    xor.b32 %r5, %r5, %r7;
    xor.b32 %r9, %r9, %r11;
    xor.b32 %r13, %r13, %r15;
    xor.b32 %r17, %r17, %r19;
    xor.b32 %r5, %r5, %r9;
    xor.b32 %r13, %r13, %r17;
    xor.b32 %r5, %r5, %r13;
    add.u32 %r4, %r4, %r5;
    add.u64 %d3, %d3, %d7;
    bra again;
done:
    setp.ne.u32 %p1, %r4, 305419896;
    @%p1 bra end;
    st.global.u32 [%d0], %r4;
end:
    ret;
}
"""

_LIBRARIES = ("libcuda.so.1", "/run/opengl-driver/lib/libcuda.so.1")
"""The second is where NixOS has it."""

_THREADS = 256
_BLOCKS_PER_SM = 4
_ROUNDS = 1 << 20
"""About 10 to 100 ms a launch."""

_SWEEPS = 10
_SM_COUNT = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT (cuda.h)."""


class _Cuda:
    """The calls of the driver, with errors as exceptions."""

    def __init__(self) -> None:
        failure = "no library"
        for name in _LIBRARIES:
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError as error:
                failure = str(error)
        else:
            raise ProbeError(f"libcuda.so.1: {failure}")
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)

    def call(self, name: str, *args: Any) -> None:
        """Call a function; a result other than 0 is an error."""
        status = getattr(self._library, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            label = text.value.decode() if text.value else str(status)
            raise ProbeError(f"{name}: {label}")

    def attribute(self, number: int) -> int:
        """Return an attribute of the device."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value


def describe() -> dict[str, Any]:
    """Return name, multiprocessors and memory (bytes) of the GPU. Makes no context."""
    cuda = _Cuda()
    name = ctypes.create_string_buffer(128)
    cuda.call("cuDeviceGetName", name, 128, cuda.device)
    total = ctypes.c_size_t()
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(total), cuda.device)
    return {
        "name": name.value.decode("utf-8", "replace"),
        "multiprocessors": cuda.attribute(_SM_COUNT),
        "total_bytes": total.value,
    }


def load(seconds: float, size: int) -> dict[str, Any]:
    """Return the clock (MHz) after a load of ``seconds``, and GB/s read of ``size`` bytes."""
    cuda = _Cuda()
    context = ctypes.c_void_p()
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), cuda.device)
    cuda.call("cuCtxSetCurrent", context)
    module = ctypes.c_void_p()
    cuda.call("cuModuleLoadData", ctypes.byref(module), PTX.encode() + b"\0")
    blocks = cuda.attribute(_SM_COUNT) * _BLOCKS_PER_SM
    out = _allocate(cuda, blocks * 24)
    return {
        "clock_mhz": _spin(cuda, module, out, blocks, seconds),
        "read_gbs": _sweep(cuda, module, out, blocks, size),
        "seconds": seconds,
        "bytes": size,
    }


def _allocate(cuda: _Cuda, size: int) -> ctypes.c_uint64:
    pointer = ctypes.c_uint64()
    cuda.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer


def _launch(
    cuda: _Cuda, module: ctypes.c_void_p, name: bytes, blocks: int, *arguments: Any
) -> None:
    function = ctypes.c_void_p()
    cuda.call("cuModuleGetFunction", ctypes.byref(function), module, name)
    pointers = (ctypes.c_void_p * len(arguments))(
        *(ctypes.cast(ctypes.byref(argument), ctypes.c_void_p) for argument in arguments)
    )
    cuda.call(
        "cuLaunchKernel", function, blocks, 1, 1, _THREADS, 1, 1, 0, None, pointers, None
    )  # fmt: skip


def _spin(
    cuda: _Cuda, module: ctypes.c_void_p, out: ctypes.c_uint64, blocks: int, seconds: float
) -> float:
    rounds = ctypes.c_uint32(_ROUNDS)
    until = time.monotonic() + seconds
    while True:
        _launch(cuda, module, b"spin", blocks, out, rounds)
        cuda.call("cuCtxSynchronize")
        if time.monotonic() >= until:
            break
    told = (ctypes.c_uint64 * (3 * blocks))()
    cuda.call("cuMemcpyDtoH_v2", told, out, ctypes.c_size_t(24 * blocks))
    clocks = sorted(
        told[3 * block] * 1000.0 / told[3 * block + 1]
        for block in range(blocks)
        if told[3 * block + 1]
    )
    if not clocks:
        raise ProbeError("the GPU's timer stands still")
    return clocks[len(clocks) // 2]


def _sweep(
    cuda: _Cuda, module: ctypes.c_void_p, out: ctypes.c_uint64, blocks: int, size: int
) -> float:
    data = _allocate(cuda, size)
    cuda.call("cuMemsetD8_v2", data, ctypes.c_ubyte(1), ctypes.c_size_t(size))
    step = blocks * _THREADS * 4
    vectors = ctypes.c_uint64(size // 16 // step * step)
    start, end = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.call("cuEventCreate", ctypes.byref(start), 0)
    cuda.call("cuEventCreate", ctypes.byref(end), 0)
    _launch(cuda, module, b"sweep", blocks, out, data, vectors)
    cuda.call("cuEventRecord", start, None)
    for _ in range(_SWEEPS):
        _launch(cuda, module, b"sweep", blocks, out, data, vectors)
    cuda.call("cuEventRecord", end, None)
    cuda.call("cuEventSynchronize", end)
    milliseconds = ctypes.c_float()
    cuda.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
    cuda.call("cuMemFree_v2", data)
    if milliseconds.value <= 0:
        raise ProbeError("the GPU's timer stands still")
    return vectors.value * 16 * _SWEEPS / milliseconds.value / 1e6
