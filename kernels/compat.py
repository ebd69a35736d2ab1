"""The scans for other projects: mamba-ssm's selective_scan_fn, argument for argument, and our longhorn_scan.

    from kernels.compat import longhorn_scan, selective_scan_fn

Copy kernels/, common/ and longhorn_scan.cu. They need PyTorch and a C++ compiler, and for a GPU nvcc or NVRTC.
docs/kernels.md shows how to run Hugging Face's Mamba on these kernels.
"""

import torch

from kernels.scan import longhorn_scan, selective_scan  # noqa: F401


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    """The same function as mamba_ssm.ops.selective_scan_interface.selective_scan_fn, on a CPU too.

    Args:
        u, delta, z: (B, D, T), z optional.
        A: (D, N), negative.
        B, C: (B, N, T), or (B, G, N, T) for G groups of D / G channels each.
        D, delta_bias: (D,), optional; with delta_softplus, delta = softplus(delta + delta_bias).
    Returns y (B, D, T) in u's dtype, and with return_last_state also the state (B, D, N) in float32, which is
    differentiable here. Raises ValueError for mismatched shapes, and for two things that need mamba-ssm: complex
    numbers, and a B or C that is the same at each step.
    """
    if A.is_complex() or B.dim() == 2 or C.dim() == 2:
        raise ValueError("selective_scan_fn: complex numbers, and a B or C without time, (D, N), need mamba-ssm")
    B, C = (a[:, None] if a.dim() == 3 else a for a in (B, C))  # (B, G, N, T)
    groups = B.shape[1]
    if C.shape != B.shape or u.shape[1] % groups:
        raise ValueError(f"selective_scan_fn: B {tuple(B.shape)} and C {tuple(C.shape)} must agree, and their {groups} "
                         f"groups must divide the {u.shape[1]} channels")
    width = u.shape[1] // groups
    ys = []
    states = []
    for group in range(groups):
        rows = slice(group * width, (group + 1) * width)
        u_g, delta_g, z_g = (None if a is None else a[:, rows].transpose(1, 2) for a in (u, delta, z))  # (B, T, D / G)
        A_g, D_g, bias_g = (None if a is None else a[rows] for a in (A, D, delta_bias))
        B_g, C_g = (a[:, group].transpose(1, 2) for a in (B, C))  # (B, T, N)
        y, state = selective_scan(u_g, delta_g, A_g, B_g, C_g, D_g, z_g, bias_g, delta_softplus, return_last_state=True)
        ys.append(y.transpose(1, 2).to(u.dtype))
        states.append(state)
    y = torch.cat(ys, 1)
    return (y, torch.cat(states, 1)) if return_last_state else y
