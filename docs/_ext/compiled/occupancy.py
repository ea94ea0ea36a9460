"""How many warps of a kernel fit on one multiprocessor, and what limits it.

The numbers are those of the vendors' manuals: the CUDA programming guide and
the AMD instruction set reference with LLVM's AMDGPU usage guide.
"""

from dataclasses import dataclass

from words_later import N_


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor; AMD calls it a compute unit."""

    warps: int
    programs: int
    parts: int  # it has as many schedulers, each with its own registers
    registers: int  # of a thread's lane in one part
    warp_registers: int  # registers of a warp come in multiples of this
    shared: int  # bytes
    shared_step: int  # bytes; a program's share is a multiple of this
    reserved: int  # bytes of it that each program costs in addition
    lanes: int  # threads of a warp


NVIDIA = {"parts": 4, "registers": 512, "warp_registers": 8, "lanes": 32}
AMD = {"parts": 4, "registers": 512, "warp_registers": 8, "lanes": 64}
AMD |= {"shared": 65536, "shared_step": 512, "reserved": 0}
LIMITS = {
    "sm_75": Limits(32, 16, **NVIDIA, shared=65536, shared_step=256,
                    reserved=0),
    "sm_80": Limits(64, 32, **NVIDIA, shared=167936, shared_step=128,
                    reserved=1024),
    "sm_90": Limits(64, 32, **NVIDIA, shared=233472, shared_step=128,
                    reserved=1024),
    "sm_100": Limits(64, 32, **NVIDIA, shared=233472, shared_step=128,
                     reserved=1024),
    "gfx90a": Limits(32, 16, **AMD),
    "gfx942": Limits(32, 16, **AMD),
}  # fmt: skip


def occupancy(target, registers, shared, num_warps, per_device=None):
    """Warps at a time, the most that are possible, and what limits them.

    per_device is the number of programs and of multiprocessors, if only so
    many programs are launched.
    """
    limits = LIMITS[target]
    fit = {
        N_("warps"): limits.warps // num_warps,
        N_("programs"): limits.programs,
    }
    if registers:
        each = _up(registers, limits.warp_registers)
        warps = limits.parts * (limits.registers // each)
        fit[N_("registers")] = warps // num_warps
    if shared:
        each = _up(shared + limits.reserved, limits.shared_step)
        fit[N_("shared memory")] = limits.shared // each
    if per_device:
        programs, multiprocessors = per_device
        fit[N_("the launch")] = -(-programs // multiprocessors)
    least = min(fit.values())
    warps = least * num_warps
    names = [name for name, count in fit.items() if count == least]
    if warps == limits.warps:
        names = []
    return warps, limits.warps, names


def _up(value, step):
    return -(-value // step) * step
