"""Table 4 as code: the objective L_t(S) behind every recurrent family, its update, and whether the update minimises it.

    python experiments/objectives.py                       # the tables; half a minute
    python experiments/objectives.py --save                # to results/online_learning.json, .md and .png
    python experiments/objectives.py --add my_update.py    # also your own objective and update

Each update is compared in float64 with a numerical minimiser that sees only L_t, on random states, keys and gates, some
of them extreme. The mixers of model.py and mixers.py are run, too, and their states compared with the same updates. The
figure shows how much of the decrease that Eq. 6 reaches is missed by Eq. 7, the diagonal form used in training.

    paper        here         shape
    S, S_{t-1}   S, S_prev    (d, N); (d,) in the families without keys (Griffin, RWKV-4)
    k_t, x_t     k, x         (N,), (d,)
    beta_t       p.beta       (d,)   Longhorn's step size per channel, in (0, 1)
    beta_t       p.rate       ()     DeltaNet's, one for all channels, in (0, 1)
    gamma        p.gamma      ()     RetNet's decay, in (0, 1)
    alpha_t      p.alpha      (N,)   GLA's gate per channel of the keys, in (0, 1); HGRN2's f
    alpha_t, i_t p.a, p.i     (d,)   Griffin's two gates, in (0, 1)
    eps_t, A     p.delta, p.A (d,), (d, N)   Mamba's step size, positive, and rates, negative
    e^-w z_{t-1} p.z          (d,)   RWKV-4: the decayed sum of weights so far, positive

Eq. 7 is also an exact minimiser, but of another objective: each of the N numbers S_ij should answer x_i by itself, as
k_j S_ij. So a pair that is written repeatedly is read back as up to N times its value; with Eq. 6 as its value.
"""

import inspect
import itertools
import math
import runpy
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import outer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
import families  # noqa: E402, F401
import model  # noqa: E402
from bench.measure import headline, new_record, record_file, write_record  # noqa: E402
from common.errors import ConfigError, main_error, regular  # noqa: E402
from common.torch_private import map_tensors  # noqa: E402
from configurator import Seed  # noqa: E402
from evaluation.tasks import table  # noqa: E402
from experiments import figures  # noqa: E402

HOLDS = 1e-8  # an update holds if it differs from its minimiser by at most this share of the largest number in either
MIXER_HOLDS = 1e-5  # a mixer, in float32, holds if its states differ by at most this, relative, in the 2-norm
DRAWS = 48  # random states, keys and gates for each row of the table
STREAMS = 4  # streams of pairs on which the two forms of Longhorn are compared; half as many for the longest keys
NO_CURVATURE = 1e-13  # a smallest curvature of at most this, relative to the largest: no unique minimum
COSINES = (0.0, 0.25, 0.5, 0.75, 0.95)  # cosines of two keys in the comparison of the two forms


# ----------------------------------------------------------------------------------------------- objectives and updates
# In pairs: an objective takes (S, S_prev, k, x, p) and returns a number; an update takes (S_prev, k, x, p), returns S.

def sq(a): return a.square().sum()

def linear_attention(S_prev, k, x, p): return S_prev + outer(x, k)
def retnet(S_prev, k, x, p): return p.gamma * S_prev + outer(x, k)
def gla(S_prev, k, x, p): return S_prev * p.alpha + outer(x, k)

# Longhorn: Eq. 5, the update of Theorem 3.1 (Eq. 6), and the update printed next to Eq. 5 in Table 4 (Eq. 7)
def longhorn_loss(S, S_prev, k, x, p): return sq(S - S_prev) + (p.beta * (S @ k - x).square()).sum()
def longhorn_exact(S_prev, k, x, p):
    eps = p.beta / (1 + p.beta * (k @ k))  # (d,)
    return S_prev + outer(eps * (x - S_prev @ k), k)
def longhorn(S_prev, k, x, p):
    eps = p.beta / (1 + p.beta * (k @ k))  # (d,)
    return (1 - outer(eps, k * k)) * S_prev + outer(eps * x, k)

# the objective that Eq. 7 does minimise: a number S_ij moves less if the key's other components are larger
def longhorn_diagonal_loss(S, S_prev, k, x, p):
    held = 1 + outer(p.beta, k @ k - k * k)  # (d, N)
    return (held * (S - S_prev).square()).sum() + (p.beta[:, None] * (S * k - x[:, None]).square()).sum()

# DeltaNet: a gradient step of p.rate on |S k - x|^2 / 2, so the minimiser of that loss linearised at S_prev
def deltanet_loss(S, S_prev, k, x, p): return sq(S - S_prev) + 2 * p.rate * (S_prev @ k - x) @ (S @ k)
def deltanet(S_prev, k, x, p): return S_prev - p.rate * outer(S_prev @ k - x, k)

# the gradient flow of DeltaNet's loss for a time p.rate
def flow_loss(S, S_prev, k, x, p):
    N = len(k)  # d[S, x]/dt = [S, x] M; the matrix exponential does not use the update's formula
    M = torch.cat([torch.cat([-outer(k, k), k[None]]), torch.zeros(N + 1, 1, dtype=k.dtype)], 1)
    return sq(S - (torch.cat([S_prev, x[:, None]], 1) @ torch.linalg.matrix_exp(p.rate * M))[:, :N])
def flow(S_prev, k, x, p):
    kk = k @ k
    return S_prev + torch.expm1(-p.rate * kk) / kk * outer(S_prev @ k - x, k)

# each number of the state stays with weight a, and is pulled to `rest` with weight 1 - a
def forget(a, S, S_prev, rest=0.0): return (a * (S - S_prev).square() + (1 - a) * (S - rest).square()).sum()


@dataclass
class Update:
    """A row of the table: an objective, its update, and the claim about them.

    L, S: formulas of the two, with S' for S_prev. source: who claims that the update minimises the objective. holds:
    whether it does, None if nobody says; a different result is an error. mixers: families whose mixers run it.
    """

    name: str
    L: str
    S: str
    objective: Callable
    update: Callable
    source: str = "Table 4"
    holds: bool | None = True
    note: str = ""
    mixers: tuple = ()
    elementwise: bool = False  # S is (d,)


UPDATES = [
    Update("linear attention", "|S - S'|^2 - 2 <S k, x>", "S' + x k^T",
           lambda S, S_prev, k, x, p: sq(S - S_prev) - 2 * (S @ k) @ x, linear_attention,
           note="the loss of a pair, -2 <S k, x>, has no minimum, so a pair that is written twice adds up"),
    Update("RetNet", "g |S - S'|^2 + (1 - g) |S|^2 - 2 <S k, x>", "g S' + x k^T",
           lambda S, S_prev, k, x, p: forget(p.gamma, S, S_prev) - 2 * (S @ k) @ x, retnet,
           mixers=("retnet", "rwkv", "mamba2"),
           note="the terms without x have their minimum at g S', not at S' like the divergence of Eq. 4; the same "
                "holds for GLA, Griffin and Mamba"),
    Update("GLA, as printed", "|S - S' diag(a)|^2 + 2 <S k, x>", "S' diag(a) + x k^T",
           lambda S, S_prev, k, x, p: sq(S - S_prev * p.alpha) + 2 * (S @ k) @ x, gla, holds=False,
           note="with a plus before the inner product the minimum is at S' diag(a) - x k^T; with a minus (next row) "
                "the update is the minimiser"),
    Update("GLA", "|S - S' diag(a)|^2 - 2 <S k, x>", "S' diag(a) + x k^T",
           lambda S, S_prev, k, x, p: sq(S - S_prev * p.alpha) - 2 * (S @ k) @ x, gla, "Table 4, except the sign",
           mixers=("gla",)),
    # no keys: S is (d,); the last term is printed as a vector, but must mean its sum
    Update("Griffin", "|sqrt(a) (s - s')|^2 + |sqrt(1-a) s|^2 - 2 sum sqrt(1-a) s i x", "a s' + sqrt(1-a) i x",
           lambda S, S_prev, k, x, p: forget(p.a, S, S_prev) - 2 * ((1 - p.a).sqrt() * S * p.i * x).sum(),
           lambda S_prev, k, x, p: p.a * S_prev + (1 - p.a).sqrt() * p.i * x, elementwise=True,
           note="holds if the last term is summed; Griffin's own paper has sqrt(1 - a^2) instead of sqrt(1 - a)"),
    Update("Longhorn, Eq. 6", "|S - S'|^2 + |S k - x|^2_diag(b)", "S' + (e * (x - S' k)) k^T,  e = b / (1 + b |k|^2)",
           longhorn_loss, longhorn_exact, "Theorem 3.1", mixers=("longhorn_exact",)),
    Update("Longhorn, Eq. 7", "|S - S'|^2 + |S k - x|^2_diag(b)", "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_loss,
           longhorn, holds=False, mixers=("longhorn",),
           note="printed next to Eq. 5, which Eq. 6 minimises; Eq. 7 does so if S' = 0, N = 1 or k has a "
                "single nonzero entry"),
    Update("Longhorn, Eq. 7, its own", "sum_ij (1 + b_i (|k|^2 - k_j^2)) (S_ij - S'_ij)^2 + b_i (k_j S_ij - x_i)^2",
           "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_diagonal_loss, longhorn, "here",
           note="the objective that Eq. 7 minimises: each number in row i answers x_i by itself, and moves less the "
                "larger the key's other entries are"),
    Update("DeltaNet", "|S - S'|^2 + 2 b <S' k - x, S k>", "S' - b (S' k - x) k^T", deltanet_loss, deltanet, "here",
           mixers=("deltanet",),
           note="a gradient step of b on |S k - x|^2 / 2 (Section 4), so it minimises that loss, linearised; Eq. 6 is "
                "the step b = b' / (1 + b' |k|^2); one eigenvalue of I - b k k^T is below -1 if b |k|^2 > 2"),
    Update("delta rule, implicit", "|S - S'|^2 + b |S k - x|^2", "S' - e (S' k - x) k^T,  e = b / (1 + b |k|^2)",
           lambda S, S_prev, k, x, p: sq(S - S_prev) + p.rate * sq(S @ k - x),
           lambda S_prev, k, x, p: S_prev - p.rate / (1 + p.rate * (k @ k)) * outer(S_prev @ k - x, k), "here",
           note="--step=implicit, backward Euler: Theorem 3.1 with one b for all channels; e |k|^2 < 1 for any key"),
    Update("delta rule, exact", "|S - flow|^2,  dS/dt = -(S k - x) k^T from S' for a time of b",
           "S' - e (S' k - x) k^T,  e = (1 - exp(-b |k|^2)) / |k|^2", flow_loss, flow, "arXiv 2512.12602",
           note="--step=exact; the flow is computed as a matrix exponential of this linear system, without e"),
    Update("gated DeltaNet", "|S - g S'|^2 + 2 b <g S' k - x, S k>", "g S' - b (g S' k - x) k^T",
           lambda S, S_prev, k, x, p: deltanet_loss(S, p.gamma * S_prev, k, x, p),
           lambda S_prev, k, x, p: deltanet(p.gamma * S_prev, k, x, p), "here", mixers=("gated_deltanet",)),
    Update("KDA", "|S - S' diag(a)|^2 + 2 b <S' diag(a) k - x, S k>", "S' diag(a) - b (S' diag(a) k - x) k^T",
           lambda S, S_prev, k, x, p: deltanet_loss(S, S_prev * p.alpha, k, x, p),
           lambda S_prev, k, x, p: deltanet(S_prev * p.alpha, k, x, p), "here", mixers=("kda",)),
    Update("Mamba", "sum_ij a_ij (S_ij - S'_ij)^2 + (1 - a_ij) S_ij^2 - 2 <S k, D x>",
           "a * S' + (D x) k^T,  a = exp(D A)",
           lambda S, S_prev, k, x, p: (forget(torch.exp(p.delta[:, None] * p.A), S, S_prev)
                                       - 2 * (S @ k) @ (p.delta * x)),
           lambda S_prev, k, x, p: torch.exp(p.delta[:, None] * p.A) * S_prev + outer(p.delta * x, k),
           "here, for A.2", mixers=("mamba",)),
    # the key is 1 - alpha: each column is a mean of its old value and x
    Update("HGRN2", "sum_ij f_j (S_ij - S'_ij)^2 + (1 - f_j) (S_ij - x_i)^2", "S' diag(f) + x (1 - f)^T",
           lambda S, S_prev, k, x, p: forget(p.alpha, S, S_prev, x[:, None]),
           lambda S_prev, k, x, p: S_prev * p.alpha + outer(x, 1 - p.alpha), "here, for A.5"),
    # no keys: S = num / den is (d,), a weighted mean of values, and k (d,) the logarithm of x's weight
    Update("RWKV-4", "sum z (s - s')^2 + e^k (s - x)^2,  z = e^-w z'", "(z s' + e^k x) / (z + e^k)",
           lambda S, S_prev, k, x, p: (p.z * (S - S_prev).square() + k.exp() * (S - x).square()).sum(),
           lambda S_prev, k, x, p: (p.z * S_prev + k.exp() * x) / (p.z + k.exp()),
           "here, for A.4", elementwise=True, mixers=("rwkv4",)),
]


# --------------------------------------------------------------------------------------- the update against a minimiser

def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def draws(count, elementwise, seed):
    """`count` random (S_prev, k, x, p): the first third of ordinary size, the rest with some extremes.

    Extremes are keys of length 0.001 and 1000, gates and step sizes within 1e-6 of 0 and 1, states of size 0 and 100.
    """
    torch.manual_seed(seed)

    def pick(choices):
        return choices[int(torch.randint(len(choices), ()))]

    def gate(*shape):
        u = torch.rand(shape, dtype=torch.float64)
        kind = torch.randint(3, shape) if extreme else torch.zeros(shape)
        return torch.where(kind == 1, 1e-6, torch.where(kind == 2, 1 - 1e-6, 1e-3 + 0.998 * u))

    drawn = []
    for i in range(count):
        extreme = i >= count / 3
        d, N = pick([(1, 1), (3, 4), (4, 8), (2, 16)])
        key_size = pick([1e-3, 1.0, 1e3]) if extreme else 1.0
        if elementwise:
            k = normal(d).clamp(-3, 3) * pick([1, 5])
            S = normal(d)
        else:
            k = F.normalize(normal(N), dim=0) * key_size
            S = normal(d, N)
        p = SimpleNamespace(
            beta=gate(d), rate=gate(), gamma=gate(), alpha=gate(N), a=gate(d), i=gate(d), delta=10 * gate(d),
            A=-3 * gate(d, N), z=normal(d).exp())
        S_size = pick([0.0, 1.0, 100.0]) if extreme else 1.0
        x_size = pick([1.0, 100.0]) if extreme else 1.0
        drawn.append((S * S_size, k, normal(d) * x_size, p))
    return drawn


def minimise(loss, start, *given):
    """Minimise loss(S, *given) from `start`: (S, smallest curvature, last step).

    Uses SciPy's exact trust region with gradients and Hessians from autograd. Three Newton steps then give the last
    digits, which a method that compares values of the loss cannot resolve. The curvature is the smallest eigenvalue of
    the Hessian over the largest: unless it is positive, there is no unique minimiser. The step is Newton's last,
    relative to the largest number: unless it is small, no minimum was found. If the loss is not convex, the minimum may
    be a local one.
    """
    from scipy.optimize import minimize

    def f(s):
        return loss(s.view(start.shape), *given)

    def value(s):
        return f(torch.tensor(s)).item()

    def gradient(s):
        return torch.autograd.functional.jacobian(f, torch.tensor(s)).numpy()

    def hessian(s):
        return torch.autograd.functional.hessian(f, torch.tensor(s)).numpy()

    wide = 1e3 * (1 + start.abs().max().item())
    try:
        s = minimize(value, start.flatten().numpy(), jac=gradient, hess=hessian, method="trust-exact",
                     options={"initial_trust_radius": wide, "max_trust_radius": 1e12, "gtol": 1e-9, "maxiter": 60}).x
        for _ in range(3):
            step = np.linalg.lstsq(hessian(s), gradient(s), rcond=None)[0]
            s = s - step
        curvature = np.linalg.eigvalsh(hessian(s))  # ascending
    except (ValueError, np.linalg.LinAlgError):  # diverged to values that are not finite
        return start, -math.inf, math.inf
    lowest = curvature[0] / max(abs(curvature).max(), 1e-300)
    last_step = abs(step).max() / max(abs(s).max(), 1e-300)
    return torch.tensor(s).view(start.shape), float(lowest), float(last_step)


def check(row, count, seed):
    """How far `row`'s update is from the minimiser of its objective, over `count` draws.

    Raises ConfigError for an objective or update with an invalid result.

    Returns a dict:
        off: the largest difference over all draws, relative to the largest number in either.
        off_ordinary: the same over draws of ordinary size.
        smallest_curvature, largest_last_step: see `minimise`.
        draws: `count`.
        found: True if every draw had a unique minimum.
        minimises: True if the update was at the minimum in every draw.
    """
    offs = []
    curvatures = []
    steps = []
    for i, (S_prev, k, x, p) in enumerate(draws(count, row.elementwise, seed)):
        got = answer(row, S_prev, k, x, p)
        torch.manual_seed(seed + i)  # the start does not depend on the update
        least, lowest, step = minimise(row.objective, normal(*S_prev.shape), S_prev, k, x, p)
        largest = max(got.abs().max(), least.abs().max(), 1e-300)
        offs.append(((got - least).abs().max() / largest).item())
        curvatures.append(lowest)
        steps.append(step)
    found = min(curvatures) > NO_CURVATURE and max(steps) <= HOLDS
    ordinary = offs[:math.ceil(count / 3)]
    return {"off": max(offs), "off_ordinary": max(ordinary), "smallest_curvature": min(curvatures),
            "largest_last_step": max(steps), "draws": count, "found": found,
            "minimises": found and max(offs) <= HOLDS}


def answer(row, S_prev, k, x, p):
    """row.update's S. Raises ConfigError unless S has the shape of S_prev and the objective is a number, both float64
    and finite."""
    S = row.update(S_prev.clone(), k, x, p)  # an update may write to its argument
    value = row.objective(S_prev + 0.5, S_prev, k, x, p)
    for what, got, shape in ("update", S, S_prev.shape), ("objective", value, ()):
        is_right = isinstance(got, torch.Tensor) and got.shape == shape and got.dtype == torch.float64
        if not (is_right and got.isfinite().all()):
            raise ConfigError(f"{row.name}: its {what} returned {getattr(got, 'dtype', '')} {str(got)[:80]} for a key "
                              f"of length {k.norm():.3g}, expected finite float64 numbers of shape {tuple(shape)}")
    return S


# ----------------------------------------------------------------------------------------- what the diagonal form costs

def make_pairs(n, d, N, correlation, seed):
    """n random pairs: keys (n, N) of length 1 that share a random direction, and normally distributed values (n, d).

    correlation: approximately the expected cosine of two keys.
    """
    torch.manual_seed(seed)
    shared = F.normalize(normal(N), dim=-1)
    own = F.normalize(normal(n, N), dim=-1)
    keys = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    return F.normalize(keys, dim=-1), normal(n, d)


def diagonal_cost(N, correlation, writes, streams, seed, d=8):
    """The loss of Eq. 7 compared with Eq. 6, over the later half of streams of 8 N pairs (at least 64), beta = 0.5.

    writes: eps |k|^2, which sets the length of keys. 'missed': the share of the possible decrease of Eq. 5 that a step
    of Eq. 7 from its own state S' misses, (L(S7) - L(S6)) / (L(S') - L(S6)), summed over steps: 0 is the minimiser, 1
    is as good as no step, more is worse than no step.
    """
    n = max(64, 8 * N)
    p = SimpleNamespace(beta=torch.full((d,), 0.5, dtype=torch.float64))
    left = 0.0
    possible = 0.0
    for stream in range(streams):
        keys, values = make_pairs(n, d, N, correlation, seed + stream)
        keys = keys * math.sqrt(2 * writes / (1 - writes))
        S = torch.zeros(d, N, dtype=torch.float64)
        for t, (k, x) in enumerate(zip(keys, values, strict=True)):
            before, S = S, longhorn(S, k, x, p)
            if t >= n // 2:
                given = before, k, x, p
                least = longhorn_loss(longhorn_exact(*given), *given).item()
                left += longhorn_loss(S, *given).item() - least
                possible += longhorn_loss(before, *given).item() - least
    return {"N": N, "correlation": correlation, "writes": writes, "missed": left / possible}


# ------------------------------------------------------------------------------------------------ the mixers that train
# Convert an operator's arguments, with one row in the batch, and its last state to sequences for the updates above:
# S before, S after (H, ...), k (H, T, N), x (H, T, d), {name in p: (H, T, ...)}, for each of the mixer's H heads.

def scan_sequences(a, state):
    if "dt" in a:
        gates = {"beta": torch.sigmoid(a["dt"] + a["dt_bias"])}
        return a["h0"], state, a["k"], a["x"], gates
    delta = F.softplus(a["delta"] + a["delta_bias"])
    return a["h0"], state, a["B"], a["u"], {"delta": delta, "A": a["A"].expand(1, delta.shape[1], -1, -1)}


def head_sequences(a, state):
    _, T, H, _ = a["v"].shape
    by_head = lambda tensor: tensor[0].transpose(0, 1)  # (1, T, H, ...) -> (H, T, ...)
    gates = {}
    if "beta" in a:
        gates["rate"] = by_head(a["beta"])
    if "log_decay" in a:
        decay = a["log_decay"].exp()
        per_channel = decay.dim() == 4
        gates["alpha" if per_channel else "gamma"] = by_head(decay if per_channel else decay.expand(1, T, H))
    return a["state"][0].mT, state[0].mT, by_head(a["k"].expand(-1, -1, H, -1)), by_head(a["v"]), gates


def wkv4_sequences(a, state):
    num, den, top = a["state"]
    z = den * top.exp()  # (1, d)
    decayed = []
    for k in a["k"].unbind(1):
        decayed.append(z * (-a["decay"]).exp())
        z = decayed[-1] + k.exp()
    return num / den, state[0] / state[1], a["k"], a["v"], {"z": torch.stack(decayed, 1)}


SEQUENCES = {"longhorn_scan": scan_sequences, "selective_scan": scan_sequences, "wkv4": wkv4_sequences,
             **dict.fromkeys(("gated_linear_attention", "retention", "delta_rule", "gated_delta_rule", "kda"),
                             head_sequences)}


@torch.no_grad()
def operator_call(family, backend=""):
    """Record the call of `family`'s mixer to its operator for 12 tokens, from the state after 12 others.

    The weights are random, because initial ones would leave every gate near its middle. Returns (the operator's name,
    {argument: tensor}, state after the call), all float64. Raises RuntimeError unless the mixer calls it exactly once.
    """
    config = model.ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, d_state=8, vocab_size=64, backend=backend)
    torch.manual_seed(0)
    mixer = model.LM(config).layers[0].branches[0].mixer
    for weight in mixer.parameters():
        weight.normal_(0.0, 0.5)
    name = mixer.operator
    modules = [sys.modules[c.__module__] for c in type(mixer).__mro__]  # its own module, and those of its base classes
    module = next(module for module in modules if hasattr(module, name))
    op = getattr(module, name)
    calls = []

    def watched(*args, **kwargs):
        result = op(*args, **kwargs)
        calls.append((inspect.signature(op).bind(*args, **kwargs).arguments, result[1]))
        return result

    _, state = mixer(torch.randn(1, 12, 32), mixer.initial_state(1, "cpu"))
    with mock.patch.object(module, name, watched):
        mixer(torch.randn(1, 12, 32), state)
    if len(calls) != 1:
        raise RuntimeError(f"{family}: its mixer called {name} {len(calls)} times, not once")
    return name, *map_tensors(torch.Tensor.double, calls[0])


def mixer_off(family, update, backend=""):
    """Relative difference, in the 2-norm, between the last states of `family`'s mixer and of `update`, step by step."""
    name, arguments, state = operator_call(family, backend)
    S, after, k, x, gates = SEQUENCES[name](arguments, state)
    of_heads = torch.vmap(lambda S, k, x, gates: update(S, k, x, SimpleNamespace(**gates)))
    for t in range(k.shape[1]):
        S = of_heads(S, k[:, t], x[:, t], {name: gate[:, t] for name, gate in gates.items()})
    return ((after - S).norm() / S.norm()).item()


# ------------------------------------------------------------------------------------------------ an update of your own

def read_update(path):
    """The row for a file that defines objective(S, S_prev, k, x, p) and update(S_prev, k, x, p), and optionally name.
    Raises ConfigError."""
    path = regular(path)
    try:
        given = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--add={path}: it does not run ({type(error).__name__}: {error})") from error
    if not {"objective", "update"} <= given.keys():
        raise ConfigError(f"--add={path}: define objective(S, S_prev, k, x, p) and update(S_prev, k, x, p)")
    return Update(str(given.get("name", path.stem)), f"objective in {path.name}", f"update in {path.name}",
                  given["objective"], given["update"], source="you", holds=None)


# --------------------------------------------------------------------------------------------------------------- output

def wrapped(text, indent=""):
    return textwrap.wrap(" ".join(text.split()), 120, subsequent_indent=indent)


def verdict(check):
    if check["minimises"]:
        return "yes"
    if check["found"]:
        return "NO"
    if check["smallest_curvature"] <= NO_CURVATURE:
        return "NO: no unique minimum"
    return "not known: no minimum was found"


def report(record, rows):
    """The record as Markdown that also reads well in a terminal: a list of lines."""
    lines = ["Objectives and updates (S': previous state; g, a, f: gates; b, D: step sizes; *: elementwise):", ""]
    width = max(len(row.name) for row in rows)
    for row in rows:
        lines += [f"    {row.name:{width}}  L = {row.L}", f"    {'':{width}}  S = {row.S}"]
    lines += ["", *checks_table(record, rows), ""]
    for row in rows:
        if row.note:
            lines += wrapped(f"- {row.name}: {row.note}.", "  ")
    return [*lines, "", *diagonal_table(record)]


def checks_table(record, rows):
    cells = [["family", "claimed by", "minimises it?", "off", "with extremes", "mixers"]]
    for row, check in zip(rows, record["checks"], strict=True):
        trained = ", ".join(f"{family} {off:.0e}" for family, off in check["mixers"].items()) or "-"
        cells.append([row.name, row.source, verdict(check), f"{check['off_ordinary']:.0e}", f"{check['off']:.0e}",
                      trained])
    return [*wrapped(f"""Does the update minimise its objective? {record['draws']} random draws each, in float64.
        off: the largest relative difference from a numerical minimiser, for draws of ordinary size and for all draws;
        yes: at most {HOLDS:g}. mixers: relative difference between the states of the mixers that train and the update,
        in float32."""), "", table(cells)]


def diagonal_table(record):
    cells = [["N", "eps k^2", *(f"cosine {cosine:g}" for cosine in COSINES)]]
    for (N, writes), missed in by_cosine(record).items():
        cells.append([str(N), f"{writes:.2f}", *(f"{abs(share):.2f}" for share in missed)])
    return [*wrapped("""The cost of the diagonal form: the share of the possible decrease of Eq. 5 that a step of
        Eq. 7 from its own state misses (0: the minimiser, 1: as good as no step). It is measured over streams of 8 N
        pairs (at least 64), by N, by the share of a value that a step writes, and by the cosine of two
        keys."""), "", table(cells)]


def by_cosine(record):
    """{(N, writes): [missed at each of COSINES]}"""
    curves = {}
    for cost in record["diagonal"]:
        curves.setdefault((cost["N"], cost["writes"]), []).append(cost["missed"])
    return curves


def draw(record, path):
    """Plot what a step of the diagonal form misses, against the cosine of two keys."""
    curves = []
    for (N, writes), missed in sorted(by_cosine(record).items()):
        if N > 1:  # for N = 1 Eq. 7 is Eq. 6
            label = f"N = {N}, {writes:.2f} written"
            curves.append(figures.Curve(label, label, COSINES, missed))
    panel = figures.Panel("what a step of Eq. 7 misses (1: no step)",
                          "cosine of two keys, about", "share of Eq. 5's decrease that is missed", curves)
    figures.draw([panel], path)


# ----------------------------------------------------------------------------------------------------------------- main

def measure(rows, seed):
    """Everything that the tables and the figure show, as a record."""
    checks = []
    diagonal = []
    for row in rows:
        off = {family: mixer_off(family, row.update) for family in row.mixers}
        checks.append({"name": row.name, "claimed_by": row.source, "expected": row.holds, "mixers": off,
                       **check(row, DRAWS, seed)})
    for N, writes, cosine in itertools.product((1, 4, 16, 64), (1 / 3, 0.9), COSINES):
        diagonal.append(diagonal_cost(N, cosine, writes, STREAMS if N < 64 else STREAMS // 2, seed))
    return {"draws": DRAWS, "streams": STREAMS, "seed": seed, "checks": checks, "diagonal": diagonal}


def unexpected(record, rows):
    """A line per result that contradicts this file's claims, because an update or a mixer was changed."""
    lines = []
    for row, check in zip(rows, record["checks"], strict=True):
        if row.holds not in (None, check["minimises"]):
            lines.append(f"{row.name}: the update {'is' if check['minimises'] else 'is not'} the minimiser (off by "
                         f"{check['off']:.1e}), contrary to this file's claim")
        for family, off in check["mixers"].items():
            if not off <= MIXER_HOLDS:  # catches NaN, too
                lines.append(f"{family}: its mixer differs by {off:.1e} from the update of {row.name}, more than "
                             f"{MIXER_HOLDS:g}")
    return lines


@dataclass
class Options:
    add: list[Path] = ()  # Python files with objective(S, S_prev, k, x, p), update(S_prev, k, x, p) and perhaps name
    seed: Seed = 0  # seed of draws and streams
    out: Path = None  # record file (out/online_learning.json); a .md and .png go beside it
    save: bool = False  # write them to results/online_learning.json, .md and .png


def main(argv):
    args, began = configurator.read(Options, argv, __doc__), time.perf_counter()
    out = record_file(args, "online_learning")
    torch.set_num_threads(1)  # the states are small: more threads would only wait for each other
    rows = UPDATES + [read_update(path) for path in args.add]
    record = new_record("online_learning")
    head = f"{headline(record)}, seed {args.seed}"
    print(f"{head}\n")
    record |= measure(rows, args.seed)
    record |= {"finished": True, "run_seconds": time.perf_counter() - began}
    text, wrong = "\n".join(report(record, rows)), unexpected(record, rows)
    print(f"{text}\n\n{record['run_seconds']:.0f} seconds")
    for line in wrong:
        print(f"experiments/objectives.py: {line}", file=sys.stderr)
    write_record(out, record)
    out.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
    draw(record, out.with_suffix(".png"))
    print(f"record: {out}, table: {out.with_suffix('.md')}, figure: {out.with_suffix('.png')}")
    return int(bool(wrong))


if __name__ == "__main__":
    with main_error("experiments/objectives.py", ImportError):
        sys.exit(main(sys.argv[1:]))
