"""Table 4 as code: the objective L_t(S) behind every recurrent family, its update, and whether the one minimises the
other.

    python experiments/online_learning.py                       # the tables; half a minute
    python experiments/online_learning.py --save                # also results/online_learning.json, .md and .png
    python experiments/online_learning.py --add my_update.py    # also your own objective and update

Each update is compared with a numerical minimiser that sees only L_t, in float64, on random states, keys and gates,
some of them extreme. The mixers of model.py and mixers.py are run, and their states compared with the same updates.
Then, without training: how much each update recalls of n random key-value pairs from a state of d x N numbers.

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
k_j S_ij. So a pair that is written repeatedly is read back as up to N times its value; Eq. 6 stops at its value.
"""

import argparse
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

import families  # noqa: E402, F401
import model  # noqa: E402
from bench.measure import check_out, headline, new_record, write_record  # noqa: E402
from evaluation.tasks import table  # noqa: E402
from runtime.errors import ConfigError, main_error, regular  # noqa: E402
from tools.loss_curve import save_figure  # noqa: E402

HOLDS = 1e-8  # an update holds if it differs from its minimiser by at most this share of the largest number in either
MIXER_HOLDS = 1e-5  # a mixer, in float32, holds if its states differ by at most this, relative, in the 2-norm
D_STATE, N_STATE = 16, 16  # in the recall experiments: every update has a state of 256 numbers
NEWEST = N_STATE // 2  # recall of so many newest pairs is also measured
PAIRS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TIMES = tuple(2**i for i in range(9))  # how often a single pair is written
CORRELATED = 0.5  # expected cosine of two keys, for recall with correlated keys


# ----------------------------------------------------------------------------------------------- objectives and updates
# In pairs: an objective takes (S, S_prev, k, x, p) and returns a number; an update takes (S_prev, k, x, p), returns S.

def sq(a): return a.square().sum()

# linear attention
def linear_attention_loss(S, S_prev, k, x, p): return sq(S - S_prev) - 2 * (S @ k) @ x
def linear_attention(S_prev, k, x, p): return S_prev + outer(x, k)

# RetNet; RWKV 5.1 is the same with a learned decay
def retnet_loss(S, S_prev, k, x, p): return p.gamma * sq(S - S_prev) + (1 - p.gamma) * sq(S) - 2 * (S @ k) @ x
def retnet(S_prev, k, x, p): return p.gamma * S_prev + outer(x, k)

# GLA, whose inner product is printed with the wrong sign
def gla_loss_printed(S, S_prev, k, x, p): return sq(S - S_prev * p.alpha) + 2 * (S @ k) @ x
def gla_loss(S, S_prev, k, x, p): return sq(S - S_prev * p.alpha) - 2 * (S @ k) @ x
def gla(S_prev, k, x, p): return S_prev * p.alpha + outer(x, k)

# Griffin: no keys, S is (d,); the last term is printed as a vector, but must mean its sum
def griffin_loss(S, S_prev, k, x, p):
    return sq(p.a.sqrt() * (S - S_prev)) + sq((1 - p.a).sqrt() * S) - 2 * ((1 - p.a).sqrt() * S * p.i * x).sum()
def griffin(S_prev, k, x, p): return p.a * S_prev + (1 - p.a).sqrt() * p.i * x

# Longhorn: Eq. 5, the update of Theorem 3.1 (Eq. 6), and the one printed next to Eq. 5 in Table 4 (Eq. 7)
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

# the implicit step (Longhorn's with one rate for all channels), and that loss's gradient flow for a time p.rate
def implicit_loss(S, S_prev, k, x, p): return sq(S - S_prev) + p.rate * sq(S @ k - x)
def implicit(S_prev, k, x, p): return S_prev - p.rate / (1 + p.rate * (k @ k)) * outer(S_prev @ k - x, k)
def flow_loss(S, S_prev, k, x, p):
    N = len(k)  # d[S, x]/dt = [S, x] M; the matrix exponential does not use the update's formula
    M = torch.cat([torch.cat([-outer(k, k), k[None]]), torch.zeros(N + 1, 1, dtype=k.dtype)], 1)
    return sq(S - (torch.cat([S_prev, x[:, None]], 1) @ torch.linalg.matrix_exp(p.rate * M))[:, :N])
def flow(S_prev, k, x, p):
    kk = k @ k
    return S_prev + torch.expm1(-p.rate * kk) / kk * outer(S_prev @ k - x, k)

# gated DeltaNet and KDA: the explicit step from a state that decays first, by one number or by one per key channel
def gated_deltanet_loss(S, S_prev, k, x, p): return deltanet_loss(S, p.gamma * S_prev, k, x, p)
def gated_deltanet(S_prev, k, x, p): return deltanet(p.gamma * S_prev, k, x, p)
def kda_loss(S, S_prev, k, x, p): return deltanet_loss(S, S_prev * p.alpha, k, x, p)
def kda(S_prev, k, x, p): return deltanet(S_prev * p.alpha, k, x, p)

# Mamba: RetNet's objective with a separate decay per number of the state
def mamba_loss(S, S_prev, k, x, p):
    decay = torch.exp(p.delta[:, None] * p.A)  # (d, N)
    return (decay * (S - S_prev).square()).sum() + ((1 - decay) * S.square()).sum() - 2 * (S @ k) @ (p.delta * x)
def mamba(S_prev, k, x, p): return torch.exp(p.delta[:, None] * p.A) * S_prev + outer(p.delta * x, k)

# HGRN2: the key is 1 - p.alpha; each column is a mean of its old value and x
def hgrn2_loss(S, S_prev, k, x, p):
    return (p.alpha * (S - S_prev).square()).sum() + ((1 - p.alpha) * (S - x[:, None]).square()).sum()
def hgrn2(S_prev, k, x, p): return S_prev * p.alpha + outer(x, 1 - p.alpha)

# RWKV-4: no keys, S = num / den is (d,) and k (d,) the logarithm of x's weight: a weighted mean of values
def rwkv4_loss(S, S_prev, k, x, p): return (p.z * (S - S_prev).square()).sum() + (k.exp() * (S - x).square()).sum()
def rwkv4(S_prev, k, x, p): return (p.z * S_prev + k.exp() * x) / (p.z + k.exp())

# The share of a new value that one step writes to an empty state, eps |k|^2; in Longhorn the length of keys sets it
WRITES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99)
FORGETS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
LENGTHS = tuple({"key": math.sqrt(2 * w / (1 - w))} for w in WRITES)  # with beta = 0.5


@dataclass
class Update:
    """A row of the table: an objective, its update, and the claim about them.

    L, S: formulas of the two, with S' for S_prev. source: who claims that the update minimises the objective. holds:
    whether it does; a different result is an error. mixers: families whose mixers run it. tune: settings that the
    recall experiments choose from, each with fields of `p` as numbers, and 'key', the length of keys; None: no recall,
    because there is no key to recall with or the update is another row's.
    """

    name: str
    L: str
    S: str
    objective: Callable
    update: Callable
    source: str = "Table 4"
    holds: bool = True
    note: str = ""
    mixers: tuple = ()
    tune: tuple | None = ()
    elementwise: bool = False  # S is (d,)
    added: bool = False  # by --add


UPDATES = [
    Update("linear attention", "|S - S'|^2 - 2 <S k, x>", "S' + x k^T", linear_attention_loss, linear_attention,
           note="the loss of a pair, -2 <S k, x>, has no minimum, so a pair that is written again adds up"),
    Update("RetNet", "g |S - S'|^2 + (1 - g) |S|^2 - 2 <S k, x>", "g S' + x k^T", retnet_loss, retnet,
           mixers=("retnet", "rwkv", "mamba2"), tune=tuple({"gamma": 1 - f} for f in FORGETS),
           note="the terms without x have their minimum at g S', not at S' as Eq. 4's divergence; the same in GLA, "
                "Griffin and Mamba"),
    Update("GLA, as printed", "|S - S' diag(a)|^2 + 2 <S k, x>", "S' diag(a) + x k^T", gla_loss_printed, gla,
           holds=False, tune=None,
           note="with a plus before the inner product the minimum is at S' diag(a) - x k^T; with a minus (next row) it "
                "holds"),
    Update("GLA", "|S - S' diag(a)|^2 - 2 <S k, x>", "S' diag(a) + x k^T", gla_loss, gla, "Table 4, except the sign",
           mixers=("gla",), tune=tuple({"alpha": 1 - f} for f in FORGETS)),
    Update("Griffin", "|sqrt(a) (s - s')|^2 + |sqrt(1-a) s|^2 - 2 sum sqrt(1-a) s i x", "a s' + sqrt(1-a) i x",
           griffin_loss, griffin, elementwise=True, tune=None,
           note="holds if the last term is summed; Griffin's own paper has sqrt(1 - a^2) instead of sqrt(1 - a)"),
    Update("Longhorn, Eq. 6", "|S - S'|^2 + |S k - x|^2_diag(b)", "S' + (e * (x - S' k)) k^T,  e = b / (1 + b |k|^2)",
           longhorn_loss, longhorn_exact, "Theorem 3.1", mixers=("longhorn_exact",), tune=LENGTHS),
    Update("Longhorn, Eq. 7", "|S - S'|^2 + |S k - x|^2_diag(b)", "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_loss,
           longhorn, holds=False, mixers=("longhorn",), tune=LENGTHS,
           note="printed next to Eq. 5, which Eq. 6 minimises; Eq. 7 does if S' = 0, N = 1 or k has a single "
                "nonzero entry"),
    Update("Longhorn, Eq. 7, its own", "sum_ij (1 + b_i (|k|^2 - k_j^2)) (S_ij - S'_ij)^2 + b_i (k_j S_ij - x_i)^2",
           "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_diagonal_loss, longhorn, "here", tune=None,
           note="the objective that Eq. 7 minimises: each number in row i answers x_i by itself, and moves less the "
                "larger the key's other entries are"),
    Update("DeltaNet", "|S - S'|^2 + 2 b <S' k - x, S k>", "S' - b (S' k - x) k^T", deltanet_loss, deltanet, "here",
           mixers=("deltanet",), tune=tuple({"rate": w} for w in WRITES),
           note="a gradient step of b on |S k - x|^2 / 2 (Section 4), so it minimises that loss, linearised; Eq. 6 is "
                "the step b = b' / (1 + b' |k|^2); one eigenvalue of I - b k k^T is below -1 if b |k|^2 > 2"),
    Update("delta rule, implicit", "|S - S'|^2 + b |S k - x|^2", "S' - e (S' k - x) k^T,  e = b / (1 + b |k|^2)",
           implicit_loss, implicit, "here", tune=LENGTHS,
           note="--step=implicit, backward Euler: Theorem 3.1 with one b for all channels; e |k|^2 < 1 for any key"),
    Update("delta rule, exact", "|S - flow|^2,  dS/dt = -(S k - x) k^T from S' for a time of b",
           "S' - e (S' k - x) k^T,  e = (1 - exp(-b |k|^2)) / |k|^2", flow_loss, flow, "arXiv 2512.12602", tune=LENGTHS,
           note="--step=exact; the flow is that linear system's matrix exponential, computed without a formula for e"),
    Update("gated DeltaNet", "|S - g S'|^2 + 2 b <g S' k - x, S k>", "g S' - b (g S' k - x) k^T", gated_deltanet_loss,
           gated_deltanet, "here", mixers=("gated_deltanet",), tune=None),
    Update("KDA", "|S - S' diag(a)|^2 + 2 b <S' diag(a) k - x, S k>", "S' diag(a) - b (S' diag(a) k - x) k^T", kda_loss,
           kda, "here", mixers=("kda",), tune=None),
    Update("Mamba", "sum_ij a_ij (S_ij - S'_ij)^2 + (1 - a_ij) S_ij^2 - 2 <S k, D x>",
           "a * S' + (D x) k^T,  a = exp(D A)", mamba_loss, mamba, "here, for A.2", mixers=("mamba",),
           tune=tuple({"delta": w} for w in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3))),
    Update("HGRN2", "sum_ij f_j (S_ij - S'_ij)^2 + (1 - f_j) (S_ij - x_i)^2", "S' diag(f) + x (1 - f)^T", hgrn2_loss,
           hgrn2, "here, for A.5", tune=None),
    Update("RWKV-4", "sum z (s - s')^2 + e^k (s - x)^2,  z = e^-w z'", "(z s' + e^k x) / (z + e^k)", rwkv4_loss, rwkv4,
           "here, for A.4", elementwise=True, mixers=("rwkv4",), tune=None),
]
ROW = {row.name: row for row in UPDATES}


def settings(d, N, **given):
    """The `p` for objectives and updates: the mixers' initial values, for keys of length 1, except as `given`.

    gamma is that of RetNet's first head, alpha GLA's, delta and A Mamba's. Numbers are expanded to their shapes.
    """
    shape = {"beta": (d,), "rate": (), "gamma": (), "alpha": (N,), "a": (d,), "i": (d,), "delta": (d,), "A": (d, N),
             "z": (d,)}
    p = {"beta": 0.5, "rate": 0.5, "gamma": 1 - 2**-5, "alpha": 0.5 ** (1 / 16), "a": 0.9, "i": 0.5, "delta": 0.01,
         "A": -torch.arange(1.0, N + 1, dtype=torch.float64), "z": 1.0} | given
    tensor = lambda v, shape: torch.as_tensor(v, dtype=torch.float64).expand(shape).clone()
    return SimpleNamespace(**{n: tensor(v, shape[n]) for n, v in p.items()})


# --------------------------------------------------------------------------------------- the update against a minimiser

def draws(count, elementwise, seed):
    """Yields `count` random (S_prev, k, x, p): the first third of ordinary size, the rest with some extremes.

    Extremes are keys of length 0.001 and 1000, gates and step sizes within 1e-6 of 0 and 1, states of size 0 and 100.
    """
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    pick = lambda choices: choices[int(torch.randint(len(choices), (), generator=g))]

    def gate(*shape):
        u = torch.rand(shape, generator=g, dtype=torch.float64)
        kind = torch.randint(3, shape, generator=g) if extreme else torch.zeros(shape)
        return torch.where(kind == 1, 1e-6, torch.where(kind == 2, 1 - 1e-6, 1e-3 + 0.998 * u))

    for i in range(count):
        extreme = i >= count / 3
        d, N = pick([(1, 1), (3, 4), (4, 8), (2, 16)])
        size = pick([1e-3, 1.0, 1e3]) if extreme else 1.0
        k = normal(d).clamp(-3, 3) * pick([1, 5]) if elementwise else F.normalize(normal(N), dim=0) * size
        S = normal(d) if elementwise else normal(d, N)
        p = settings(d, N, beta=gate(d), rate=gate(), gamma=gate(), alpha=gate(N), a=gate(d), i=gate(d),
                     delta=10 * gate(d), A=-3 * gate(d, N), z=normal(d).exp())
        S_size, x_size = (pick([0.0, 1.0, 100.0]), pick([1.0, 100.0])) if extreme else (1.0, 1.0)
        yield S * S_size, k, normal(d) * x_size, p


def minimise(loss, start, *given):
    """Minimise loss(S, *given) from `start`: (S, smallest curvature, last step).

    Uses SciPy's exact trust region with gradients and Hessians from autograd, then three Newton steps for the last
    digits, which a method that compares values of the loss cannot resolve. The curvature is the smallest eigenvalue of
    the Hessian over the largest: unless it is positive, there is no unique minimiser. The step is Newton's last,
    relative to the largest number: unless it is small, no minimum was found. If the loss is not convex, the minimum may
    be a local one.
    """
    from scipy.optimize import minimize

    f = lambda s: loss(s.view(start.shape), *given)

    def value_and_gradient(s):
        s = torch.tensor(s, dtype=torch.float64, requires_grad=True)
        value = f(s)
        return value.item(), torch.autograd.grad(value, s)[0].numpy()

    hessian = lambda s: torch.autograd.functional.hessian(f, torch.tensor(s, dtype=torch.float64)).numpy()
    wide = 1e3 * (1 + start.abs().max().item())
    try:
        s = minimize(value_and_gradient, start.flatten().numpy(), jac=True, hess=hessian, method="trust-exact",
                     options={"initial_trust_radius": wide, "max_trust_radius": 1e12, "gtol": 1e-9, "maxiter": 60}).x
        for _ in range(3):
            step = np.linalg.lstsq(hessian(s), value_and_gradient(s)[1], rcond=None)[0]
            s = s - step
        curvature = np.linalg.eigvalsh(hessian(s))  # ascending
    except (ValueError, np.linalg.LinAlgError):  # diverged to values that are not finite
        return start, -math.inf, math.inf
    low = curvature[0] / max(abs(curvature).max(), 1e-300)
    return torch.tensor(s).view(start.shape), float(low), float(abs(step).max() / max(abs(s).max(), 1e-300))


def check(row, count, seed):
    """How far `row`'s update is from the minimiser of its objective, over `count` draws.

    Returns {'off': the largest difference over all draws, relative to the largest number in either; 'off_ordinary': the
    same over draws of ordinary size; 'smallest_curvature', 'largest_last_step': see `minimise`; 'draws'; 'found': True
    if every draw had a unique minimum; 'minimises': True if the update was always there}. Raises ConfigError for an
    objective or update with an invalid result.
    """
    offs, curvatures, steps = [], [], []
    for S_prev, k, x, p in draws(count, row.elementwise, seed):
        before, got = S_prev.clone(), answer(row, S_prev, k, x, p)
        if not torch.equal(before, S_prev):
            raise ConfigError(f"{row.name}: update changed S_prev in place: return a new tensor")
        value = row.objective(S_prev + 0.5, S_prev, k, x, p)
        if not (isinstance(value, torch.Tensor) and value.shape == () and value.isfinite() and got.isfinite().all()):
            raise ConfigError(f"{row.name}: the objective must be a single number, and it and the update finite, for "
                              f"keys of length 0.001 to 1000; got objective {value} at |k| = {k.norm():.3g}")
        g = torch.Generator().manual_seed(seed + len(offs))  # the start does not depend on the update
        start = torch.randn(S_prev.shape, generator=g, dtype=torch.float64)
        least, low, step = minimise(row.objective, start, S_prev, k, x, p)
        offs.append(((got - least).abs().max() / max(got.abs().max(), least.abs().max(), 1e-300)).item())
        curvatures.append(low)
        steps.append(step)
    minimised = min(curvatures) > 1e-13 and max(steps) <= HOLDS
    return {"off": max(offs), "off_ordinary": max(offs[:math.ceil(count / 3)]), "smallest_curvature": min(curvatures),
            "largest_last_step": max(steps), "draws": count, "found": minimised,
            "minimises": minimised and max(offs) <= HOLDS}


def answer(row, S_prev, k, x, p):
    """row.update's S. Raises ConfigError unless it is a float64 tensor of S_prev's shape."""
    S = row.update(S_prev, k, x, p)
    if not isinstance(S, torch.Tensor) or S.shape != S_prev.shape or S.dtype != torch.float64:
        got = f"{tuple(S.shape)} {S.dtype}" if isinstance(S, torch.Tensor) else type(S).__name__
        raise ConfigError(f"{row.name}: update returned {got}, expected the new S, {tuple(S_prev.shape)} torch.float64")
    return S


# -------------------------------------------------------------------------------------------------------------- streams

def make_pairs(n, d, N, correlation, g):
    """n random pairs: keys (n, N) of length 1 that share a random direction, and normally distributed values (n, d).

    correlation: approximately the expected cosine of two keys.
    """
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    unit = lambda a: F.normalize(a, dim=-1)
    keys = math.sqrt(correlation) * unit(normal(N)) + math.sqrt(1 - correlation) * unit(normal(n, N))
    return unit(keys), normal(n, d)


def lost(read, values):
    """The share of the values that is lost: sum (c read - value)^2 / sum value^2, for tensors of any shape.

    c is the best single factor: in a model, the norm and learned projection that follow would find it.
    """
    read = read / read.abs().max().clamp(min=1e-300)  # keeps its square finite
    return 1 - ((read * values).sum().square() / (read.square().sum() * values.square().sum()).clamp(min=1e-300)).item()


def recall(row, p, keys, values):
    """The share lost over a stream, of all pairs and of the newest NEWEST, after each number in PAIRS: (2, len(PAIRS)).

    Infinite once the state is not finite.
    """
    S, shares = torch.zeros(values.shape[1], keys.shape[1], dtype=torch.float64), []
    for n, (k, x) in enumerate(zip(keys, values, strict=True), 1):
        S = answer(row, S, k, x, p)
        if n in PAIRS:
            read = keys[:n] @ S.T  # (n, d)
            finite = read.isfinite().all()
            shares.append([lost(read[-m:], values[:n][-m:]) if finite else math.inf for m in (n, NEWEST)])
    return torch.tensor(shares, dtype=torch.float64).T


def recall_rows(rows, correlation, streams, seed):
    """The share that every update with keys loses, with its mixer's initial values and at its best settings.

    Returns a list of {'name'; 'start': share lost of all pairs, mean over streams, for each of PAIRS, with the mixer's
    initial values; 'best': the same at the best setting for each number of pairs; 'setting': that setting; 'newest':
    share lost of the newest NEWEST pairs, at the best setting for these; all with '..._quartiles' over streams}. All
    updates see the same streams, on which the settings are also chosen.
    """
    data = [make_pairs(max(PAIRS), D_STATE, N_STATE, correlation, torch.Generator().manual_seed(seed + s))
            for s in range(streams)]  # keys (n, N) and values (n, d) each
    recalled = []
    for row in rows:
        tried, shares = [{}, *row.tune], []
        for setting in tried:
            p = settings(D_STATE, N_STATE, **{n: v for n, v in setting.items() if n != "key"})
            shares.append(torch.stack([recall(row, p, keys * setting.get("key", 1.0), x) for keys, x in data]))
        shares = torch.stack(shares)  # (settings, streams, 2, len(PAIRS))
        best, newest = shares.mean(1).argmin(0).tolist()  # the setting for each of PAIRS
        entry = {"name": row.name, "setting": [tried[i] for i in best]}
        for name, which, at in (("start", 0, [0] * len(PAIRS)), ("best", 0, best), ("newest", 1, newest)):
            of = torch.stack([shares[s, :, which, i] for i, s in enumerate(at)])  # (len(PAIRS), streams)
            entry[name] = of.mean(1).tolist()
            entry[name + "_quartiles"] = of.quantile(torch.tensor([0.25, 0.75], dtype=of.dtype), 1).T.tolist()
        recalled.append(entry)
    return recalled


def least_squares_floor(n):
    """The least that any S (d, N), even chosen with hindsight, loses of n pairs: it fits N of n dimensions."""
    return max(0.0, 1 - N_STATE / n)


def written_again(row, seed):
    """[<S k, x> / |x|^2] after writing the same pair TIMES times, with the mixer's initial values and |k| = 1."""
    (k,), (x,) = make_pairs(1, D_STATE, N_STATE, 0.0, torch.Generator().manual_seed(seed))
    S, p, reads = torch.zeros(D_STATE, N_STATE, dtype=torch.float64), settings(D_STATE, N_STATE), []
    for t in range(1, max(TIMES) + 1):
        S = row.update(S, k, x, p)
        if t in TIMES:
            reads.append(((S @ k) @ x / (x @ x)).item())
    return reads


def diagonal_cost(N, correlation, writes, streams, seed, d=8):
    """The loss of Eq. 7 compared with Eq. 6, over the later half of streams of 8 N pairs (at least 64), beta = 0.5.

    writes: eps |k|^2, which sets the length of keys. 'missed': the share of the possible decrease of Eq. 5 that a step
    of Eq. 7 from its own state S' misses, (L(S7) - L(S6)) / (L(S') - L(S6)), summed over steps: 0 is the minimiser, 1
    is as good as no step, more is worse than no step.
    """
    n, p, left, possible = max(64, 8 * N), settings(d, N), 0.0, 0.0
    for s in range(streams):
        keys, values = make_pairs(n, d, N, correlation, torch.Generator().manual_seed(seed + s))
        S = torch.zeros(d, N, dtype=torch.float64)
        for t, (k, x) in enumerate(zip(keys * math.sqrt(2 * writes / (1 - writes)), values, strict=True)):
            before, S = S, longhorn(S, k, x, p)
            if t >= n // 2:
                loss = lambda S, before=before, k=k, x=x: longhorn_loss(S, before, k, x, p).item()
                least = loss(longhorn_exact(before, k, x, p))
                left += loss(S) - least
                possible += loss(before) - least
    return {"N": N, "correlation": correlation, "writes": writes, "missed": left / possible}


# ------------------------------------------------------------------------------------------------ the mixers that train
# Convert an operator's arguments and its last state to sequences for the updates above: (S before, S after, k (T, N),
# x (T, d), [p of each step]).

def scan_sequences(a, state):
    k, x = (a["k"], a["x"]) if "dt" in a else (a["B"], a["u"])
    for b in range(len(x)):
        if "dt" in a:
            given = [{"beta": torch.sigmoid(dt + a["dt_bias"])} for dt in a["dt"][b]]
        else:
            given = [{"delta": F.softplus(delta + a["delta_bias"]), "A": a["A"]} for delta in a["delta"][b]]
        yield a["h0"][b], state[b], k[b], x[b], [settings(*state[b].shape, **g) for g in given]


def head_sequences(a, state):
    (B, T, H, _), K = a["v"].shape, a["k"].shape[3]
    for b, h in itertools.product(range(B), range(H)):
        given = [{} for _ in range(T)]
        if "beta" in a:
            given = [{"rate": rate} for rate in a["beta"][b, :, h]]
        if "log_decay" in a:
            gates = a["log_decay"].exp()
            gates = gates[h].expand(T) if gates.dim() == 1 else gates[b, :, h]
            given = [g | {"gamma" if gate.dim() == 0 else "alpha": gate} for g, gate in zip(given, gates, strict=True)]
        x, k = a["v"][b, :, h], a["k"].expand(-1, -1, H, -1)[b, :, h]  # (T, d), (T, K)
        yield a["state"][b, h].T, state[b, h].T, k, x, [settings(x.shape[1], K, **g) for g in given]


def wkv4_sequences(a, state):
    for b, (num, den, top) in enumerate(zip(*a["state"], strict=True)):
        z, ps = den * top.exp(), []
        for k in a["k"][b]:
            ps.append(settings(z.numel(), 1, z=z * (-a["decay"]).exp()))
            z = ps[-1].z + k.exp()
        yield num / den, state[0][b] / state[1][b], a["k"][b], a["v"][b], ps


SEQUENCES = {"longhorn_scan": scan_sequences, "selective_scan": scan_sequences, "wkv4": wkv4_sequences,
             **dict.fromkeys(("gated_linear_attention", "retention", "delta_rule", "gated_delta_rule", "kda"),
                             head_sequences)}


@torch.no_grad()
def operator_call(family, backend="", seed=0, T=12):
    """The call of `family`'s mixer to its operator for T tokens, from a state that has already seen T.

    The weights are random, because initial ones would leave every gate near its middle. Returns (the operator's name,
    {argument: tensor}, state after the call), all float64. Raises RuntimeError unless the mixer calls it exactly once.
    """
    config = model.ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, d_state=8, vocab_size=64, backend=backend)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        branch = model.LM(config).layers[0].branches[0]
        for weight in branch.mixer.parameters():
            weight.normal_(0.0, 0.5)
        name, module = branch.mixer.operator, sys.modules[type(branch.mixer).__module__]
        op, calls = getattr(module, name), []

        def record(*args, **given):
            result = op(*args, **given)
            calls.append((inspect.signature(op).bind(*args, **given).arguments, result[1]))
            return result

        _, state = branch.mixer(torch.randn(2, T, 32), branch.initial_state(2, "cpu"))
        with mock.patch.object(module, name, record):
            branch.mixer(torch.randn(2, T, 32), state)
    if len(calls) != 1:
        raise RuntimeError(f"{family}: its mixer called {name} {len(calls)} times, not once")

    def wide(a):
        return a.double() if isinstance(a, torch.Tensor) else tuple(map(wide, a)) if isinstance(a, (tuple, list)) else a

    return name, {n: wide(a) for n, a in calls[0][0].items()}, wide(calls[0][1])


def mixer_off(family, update, backend=""):
    """Relative difference, in the 2-norm, between the last states of `family`'s mixer and of `update` step by step."""
    name, arguments, state = operator_call(family, backend)
    got, true = [], []
    for S, after, k, x, ps in SEQUENCES[name](arguments, state):
        for t, p in enumerate(ps):
            S = update(S, k[t], x[t], p)
        got.append(after)
        true.append(S)
    got, true = torch.stack(got), torch.stack(true)
    return ((got - true).norm() / true.norm()).item()


# ------------------------------------------------------------------------------------------------ an update of your own

def read_update(path):
    """The row for a file that defines objective(S, S_prev, k, x, p) and update(S_prev, k, x, p), and optionally name,
    note, L, S and tune. Raises ConfigError."""
    path = regular(path)
    try:
        module = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--add={path}: it does not run ({type(error).__name__}: {error})") from error
    for name, wanted in (("objective", "S, S_prev, k, x, p"), ("update", "S_prev, k, x, p")):
        if not callable(module.get(name)):
            raise ConfigError(f"--add={path}: defines no function {name}({wanted})")
    name, tune = str(module.get("name", path.stem)), module.get("tune", LENGTHS)
    if name in ROW:
        raise ConfigError(f"--add={path}: a row named {name!r} already exists: set another name = \"...\"")
    known = ["key", *vars(settings(1, 1))]
    if not isinstance(tune, (list, tuple)) or not all(isinstance(t, dict) and set(t) <= set(known) for t in tune):
        raise ConfigError(f"--add={path}: tune must be a list of settings such as [{{'beta': 0.9, 'key': 2.0}}], with "
                          f"numbers for {', '.join(known)}")
    formulas = (str(module.get(name, f"{role} in {path.name}")) for name, role in (("L", "objective"), ("S", "update")))
    return Update(name, *formulas, module["objective"], module["update"], "you", note=str(module.get("note", "")),
                  tune=tuple(tune), added=True)


# --------------------------------------------------------------------------------------------------------------- output

def wrapped(text, indent=""):
    return textwrap.wrap(" ".join(text.split()), 120, subsequent_indent=indent)


def verdict(check):
    if check["minimises"]:
        return "yes"
    if check["found"]:
        return "NO"
    return "NO: no unique minimum" if check["smallest_curvature"] <= 1e-13 else "not known: no minimum was found"


def report(record, rows):
    """The record as Markdown that also reads well in a terminal: a list of lines."""
    lines = ["Objectives and updates (S': previous state; g, a, f: gates; b, D: step sizes; *: elementwise):", ""]
    width = max(len(row.name) for row in rows)
    for row in rows:
        lines += [f"    {row.name:{width}}  L = {row.L}", f"    {'':{width}}  S = {row.S}"]
    lines += ["", *wrapped(f"""Does the update minimise its objective? {record['draws']} random draws each, in float64.
        off: the largest relative difference from a numerical minimiser, for draws of ordinary size and for all draws;
        yes: at most {HOLDS:g}. mixers: relative difference between the states of the mixers that train and the update,
        in float32."""), ""]
    cells = [["family", "claimed by", "minimises it?", "off", "with extremes", "mixers"]]
    for row, check in zip(rows, record["checks"], strict=True):
        trained = ", ".join(f"{family} {off:.0e}" for family, off in check["mixers"].items()) or "-"
        off = (f"{check[name]:.0e}" for name in ("off_ordinary", "off"))
        cells.append([row.name, row.source, verdict(check), *off, trained])
    lines += [table(cells), ""]
    lines += [*(line for row in rows if row.note for line in wrapped(f"- {row.name}: {row.note}.", "  ")), ""]
    wide = max(high - low for rows in record["recall"].values() for r in rows for name in ("start", "best", "newest")
               for low, high in r[name + "_quartiles"] if math.isfinite(high - low))
    lines += [*wrapped(f"""Recall without training. Random pairs are written one after another to a state of {D_STATE} x
        {N_STATE} numbers: the share of their values that is lost when they are read back with the keys, with a common
        gain (0: perfect, 1: nothing left). Means over {record['streams']} streams; quartiles are at most {wide:.2f}
        apart."""), ""]
    shown = [PAIRS.index(n) for n in (4, 8, 16, 32, 64, 128)]
    for title, key, which in PANELS:
        cells = [["update", *(f"n = {PAIRS[i]}" for i in shown)]]
        cells += [[r["name"], *(f"{r[which][i]:.3f}" for i in shown)] for r in record["recall"][key]]
        if which != "newest":
            cells.append(["least squares with hindsight", *(f"{least_squares_floor(PAIRS[i]):.3f}" for i in shown)])
        lines += [f"{title[0].upper()}{title[1:]}:", "", table(cells), ""]
    lines += [f"One pair written repeatedly and read back, as a multiple of its value (mixers' initial values, N = "
              f"{N_STATE}):", ""]
    cells = [["update", "once", *(f"{t} times" for t in TIMES[2::2])]]
    cells += [[name, *(f"{r:.3g}" for r in reads[::2])] for name, reads in record["written_again"].items()]
    lines += [table(cells), ""]
    lines += [*wrapped("""The cost of the diagonal form, over streams of 8 N pairs: the share of the possible decrease
        of Eq. 5 that a step of Eq. 7 from its own state misses (0: the minimiser, 1: as good as no step), by N, by the
        share of a value that a step writes, and by the cosine of two keys."""), ""]
    by_cosine = {}
    for c in record["diagonal"]:
        by_cosine.setdefault((c["N"], c["writes"]), {})[c["correlation"]] = f"{abs(c['missed']):.2f}"
    cells = [["N", "eps k^2", *(f"cosine {c:g}" for c in next(iter(by_cosine.values())))]]
    cells += [[str(N), f"{writes:.2f}", *at.values()] for (N, writes), at in by_cosine.items()]
    return [*lines, table(cells)]


# title, which keys, which column of recall_rows
PANELS = (("all pairs, as the mixers start", "independent", "start"),
          ("all pairs, each at its best constant setting", "independent", "best"),
          (f"the same, keys with a cosine of {CORRELATED:g}", "correlated", "best"),
          (f"the newest {NEWEST} pairs, each at its best setting for these", "independent", "newest"))
COLORS = {"linear attention": "tab:gray", "RetNet": "tab:brown", "GLA": "tab:orange", "Longhorn, Eq. 6": "tab:blue",
          "Longhorn, Eq. 7": "tab:red", "DeltaNet": "tab:green", "Mamba": "tab:purple"}


def draw(record, path):
    """Plot the record: recall by number of pairs, a pair written repeatedly, the cost of the diagonal form."""
    from matplotlib.figure import Figure

    names = [r["name"] for r in record["recall"]["independent"]]
    style = {n: dict(label=n, color=COLORS.get(n, "black"), lw=2.4 if n in ("Longhorn, Eq. 6", "RetNet") else 1.5)
             for n in names}
    for n in {"DeltaNet", "GLA"} & set(names):  # at the best settings they lie on top of Eq. 6 and RetNet
        style[n] |= dict(ls=(0, (3, 2)), zorder=3)
    figure = Figure(figsize=(15, 8.4), dpi=110)
    axes = figure.subplots(2, 3)
    *_, again, diagonal = axes.flat
    for panel, (title, key, which) in zip(axes.flat, PANELS, strict=False):
        for r in record["recall"][key]:
            panel.plot(PAIRS, [v if math.isfinite(v) else math.nan for v in r[which]], **style[r["name"]])
        if which != "newest":
            panel.plot(PAIRS, [least_squares_floor(n) for n in PAIRS], color="black", ls=":", lw=1)
            panel.text(23, 0.12, "least squares\nwith hindsight", fontsize=8)
        panel.axvline(N_STATE, color="black", lw=0.5)
        panel.set(xscale="log", xlabel=f"pairs written (line: N = {N_STATE})", ylabel="share of values that is lost",
                  title=title, ylim=(-0.02, 1.02))
        panel.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 4, 8, 16, 32, 64, 128])
        panel.minorticks_off()
    for name, reads in record["written_again"].items():
        again.plot(TIMES, reads, **style[name])
    for line in (1, N_STATE):
        again.axhline(line, color="black", lw=0.5)
    again.set(xscale="log", yscale="log", xlabel="times written", ylabel="read back, as a multiple of its value",
              title=f"one pair again and again (lines: 1 and N = {N_STATE})")
    for N, writes in sorted({(c["N"], c["writes"]) for c in record["diagonal"] if c["N"] > 1}):  # 0 for N = 1
        at = sorted((c["correlation"], c["missed"]) for c in record["diagonal"] if (c["N"], c["writes"]) == (N, writes))
        label = f"N = {N}, {writes:.2f} written"
        diagonal.plot(*zip(*at, strict=True), "o-" if writes < 0.5 else "s--", ms=4, label=label)
    diagonal.set(xlabel="cosine of two keys, about", ylabel="share of Eq. 5's decrease that is missed",
                 title="what a step of Eq. 7 misses (1: as good as no step)", ylim=(-0.02, 1.3))
    diagonal.axhline(1, color="black", lw=0.5)
    diagonal.legend(fontsize=8, ncol=2, loc="upper left", frameon=False)
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncol=8, frameon=False, fontsize=9)
    figure.suptitle(f"Recall without training: random pairs, a state of {D_STATE} x {N_STATE} numbers, mean of "
                    f"{record['streams']} streams, float64, {record['date'][:10]}", fontsize=10)
    figure.tight_layout(rect=(0, 0.035, 1, 1))
    save_figure(figure, path)


# ----------------------------------------------------------------------------------------------------------------- main

def measure(rows, draw_count, streams, seed):
    """Everything that the tables and the figure show, as a record."""
    checks = []
    for row in rows:
        off = {family: mixer_off(family, row.update) for family in row.mixers}
        checks.append({"name": row.name, "claimed_by": row.source, "expected": row.holds, "mixers": off,
                       **check(row, draw_count, seed)})
    recalled = [row for row in rows if row.tune is not None]
    sizes = itertools.product((1, 4, 16, 64), (1 / 3, 0.9), (0.0, 0.25, 0.5, 0.75, 0.95))
    return {"draws": draw_count, "streams": streams, "seed": seed, "pairs": PAIRS, "state": [D_STATE, N_STATE],
            "checks": checks, "written_again": {row.name: written_again(row, seed) for row in recalled},
            "recall": {key: recall_rows(recalled, correlation, streams, seed)
                       for key, correlation in (("independent", 0.0), ("correlated", CORRELATED))},
            "diagonal": [diagonal_cost(N, correlation, writes, 4 if N < 64 else 2, seed)
                         for N, writes, correlation in sizes]}


def unexpected(record, rows):
    """A line per result that contradicts this file's claims, because an update or a mixer was changed."""
    lines = []
    for row, check in zip(rows, record["checks"], strict=True):
        if check["minimises"] != row.holds and not row.added:
            lines.append(f"{row.name}: the update {'is' if check['minimises'] else 'is not'} the minimiser (off by "
                         f"{check['off']:.1e}), contrary to this file's claim")
        lines += [f"{family}: its mixer differs by {off:.1e} from the update of {row.name}, more than {MIXER_HOLDS:g}"
                  for family, off in check["mixers"].items() if not off <= MIXER_HOLDS]  # `not` catches NaN
    return lines


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="append", default=[], metavar="FILE", help="a Python file with objective(S, "
                        "S_prev, k, x, p), update(S_prev, k, x, p) and, optionally, name, note, L, S (the formulas) "
                        "and tune (settings of p for the recall); may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="seed of draws and streams (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="12 draws instead of 48, 2 streams instead of 12")
    parser.add_argument("--out", type=Path, help="write the record to this .json file, and a .md and .png next to it")
    parser.add_argument("--save", action="store_true", help="write them to results/online_learning.json, .md and .png")
    args = parser.parse_args(argv)
    if args.out and args.out.suffix != ".json":
        named = args.out.with_suffix(".json") if args.out.name else "record.json"
        parser.error(f"--out={args.out}: the record must be a .json file, such as {named}")
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed={args.seed}: it must be in 0 .. {2**32 - 1}")
    if args.save and args.add and not args.out:
        parser.error("--save with --add: results/ is only for the families in this file; choose a file with --out")
    return args


def main(argv=None):
    args, began = parse(argv), time.perf_counter()
    out = args.out or (ROOT / "results" / "online_learning.json" if args.save else None)
    check_out(out)
    torch.set_num_threads(1)  # the states are small: more threads would only wait for each other
    rows = UPDATES + [read_update(path) for path in args.add]
    record = new_record("online_learning")
    head = f"{headline(record)}, seed {args.seed}"
    print(f"{head}\n")
    record |= measure(rows, *((12, 2) if args.quick else (48, 12)), args.seed)
    record |= {"finished": True, "run_seconds": time.perf_counter() - began}
    text, wrong = "\n".join(report(record, rows)), unexpected(record, rows)
    print(f"{text}\n\n{record['run_seconds']:.0f} seconds")
    for line in wrong:
        print(f"experiments/online_learning.py: {line}", file=sys.stderr)
    if out:
        write_record(out, record)
        out.with_suffix(".md").write_text(f"{head}\n\n{text}\n")
        draw(record, out.with_suffix(".png"))
        print(f"record: {out}, table: {out.with_suffix('.md')}, figure: {out.with_suffix('.png')}")
    return int(bool(wrong))


if __name__ == "__main__":
    with main_error("experiments/online_learning.py", ImportError):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("experiments/online_learning.py: interrupted; nothing written")
