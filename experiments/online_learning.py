"""Table 4 as code: the objective L_t(S) behind every recurrent family, its update, and whether the one minimises the other.

    python experiments/online_learning.py                            # the table, the checks, recall without training: half a minute
    python experiments/online_learning.py --save                     # and results/online_learning.json, .md and .png
    python experiments/online_learning.py --add my_update.py         # an objective and an update of yours, through all of it

Each update is compared with a numerical minimiser that sees only L_t, in float64, on random states, keys and gates with extreme
ones among them; the mixers of model.py are run and their states compared with the same updates. Then, without any
training: streams of random key-value pairs, and what each update still reads back of n of them from a state of d x N numbers.

    paper        here        shape
    S, S_{t-1}   S, S_prev   (d, N); (d,) in the families without keys (Griffin, RWKV-4)
    k_t, x_t     k, x        (N,), (d,)
    beta_t       p.beta      (d,)   Longhorn's step size of each channel, in (0, 1)
    beta_t       p.rate      ()     DeltaNet's, one for all channels, in (0, 1)
    gamma        p.gamma     ()     RetNet's decay, in (0, 1)
    alpha_t      p.alpha     (N,)   GLA's gate of each channel of the keys, in (0, 1); HGRN2's f
    alpha_t, i_t p.a, p.i    (d,)   Griffin's two gates, in (0, 1)
    eps_t, A     p.delta, p.A (d,), (d, N)   Mamba's step size, positive, and rates, negative
    e^-w z_{t-1} p.z         (d,)   RWKV-4: the decayed weight of all it has seen, positive

The surprise: Eq. 7 is an exact minimiser too, of another objective: each of the N numbers S_ij is to answer x_i alone, as
k_j S_ij. Written again and again, a pair is then read back as up to N times its value, where Eq. 6 stops at one time.
"""

import argparse
import datetime
import inspect
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
from torch import outer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mixers  # noqa: E402
import model  # noqa: E402
import records  # noqa: E402
from bench.measure import finite, refuse_uncommitted  # noqa: E402
from configurator import main_error  # noqa: E402

HOLDS = 1e-8  # an update holds when it is off its minimiser by no more of the largest number in either
MIXER_HOLDS = 1e-5  # and a mixer, in float32, when its outputs and states are off by no more, by the 2-norm
D_STATE, N_STATE = 16, 16  # of the recall: every update has 256 numbers
NEWEST = N_STATE // 2  # pairs that are asked for by themselves, while more are written
PAIRS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
TIMES = tuple(2**i for i in range(9))  # that one pair is written again
CORRELATED = 0.5  # expected cosine of two keys, in the recall with correlated keys


class Mistake(ValueError):
    """What a user's file or option did wrong, in one line."""


# ----------------------------------------------------------------------------------------------- objectives and updates
# A pair each: the objective takes (S, S_prev, k, x, p) and returns a number; the update (S_prev, k, x, p) and returns S.

def sq(a): return a.square().sum()


# linear attention
def linear_attention_loss(S, S_prev, k, x, p): return sq(S - S_prev) - 2 * (S @ k) @ x
def linear_attention(S_prev, k, x, p): return S_prev + outer(x, k)


# RetNet; RWKV 5.1 is the same with a learned decay
def retnet_loss(S, S_prev, k, x, p): return p.gamma * sq(S - S_prev) + (1 - p.gamma) * sq(S) - 2 * (S @ k) @ x
def retnet(S_prev, k, x, p): return p.gamma * S_prev + outer(x, k)


# GLA, whose inner product has the wrong sign in print
def gla_loss_printed(S, S_prev, k, x, p): return sq(S - S_prev * p.alpha) + 2 * (S @ k) @ x
def gla_loss(S, S_prev, k, x, p): return sq(S - S_prev * p.alpha) - 2 * (S @ k) @ x
def gla(S_prev, k, x, p): return S_prev * p.alpha + outer(x, k)


# Griffin: no keys, S is (d,); the last term is printed as a vector and meant summed
def griffin_loss(S, S_prev, k, x, p):
    return sq(p.a.sqrt() * (S - S_prev)) + sq((1 - p.a).sqrt() * S) - 2 * ((1 - p.a).sqrt() * S * p.i * x).sum()
def griffin(S_prev, k, x, p): return p.a * S_prev + (1 - p.a).sqrt() * p.i * x


# Longhorn: Eq. 5, the update of Theorem 3.1 (Eq. 6), and the one that Table 4 prints beside it (Eq. 7)
def longhorn_loss(S, S_prev, k, x, p): return sq(S - S_prev) + (p.beta * (S @ k - x).square()).sum()
def longhorn_exact(S_prev, k, x, p):
    eps = p.beta / (1 + p.beta * (k @ k))  # (d,)
    return S_prev + outer(eps * (x - S_prev @ k), k)
def longhorn(S_prev, k, x, p):
    eps = p.beta / (1 + p.beta * (k @ k))  # (d,)
    return (1 - outer(eps, k * k)) * S_prev + outer(eps * x, k)


# what Eq. 7 does minimise: a number S_ij moves the less, the larger the key's other components are
def longhorn_own_loss(S, S_prev, k, x, p):
    held = 1 + outer(p.beta, k @ k - k * k)  # (d, N)
    return (held * (S - S_prev).square()).sum() + (p.beta[:, None] * (S * k - x[:, None]).square()).sum()


# DeltaNet: a gradient step of p.rate on |S k - x|^2 / 2, so the minimiser of that loss made linear at S_prev
def deltanet_loss(S, S_prev, k, x, p): return sq(S - S_prev) + 2 * p.rate * (S_prev @ k - x) @ (S @ k)
def deltanet(S_prev, k, x, p): return S_prev - p.rate * outer(S_prev @ k - x, k)


# Mamba: RetNet's objective with a decay of its own for each number of the state
def mamba_loss(S, S_prev, k, x, p):
    decay = torch.exp(p.delta[:, None] * p.A)  # (d, N)
    return (decay * (S - S_prev).square()).sum() + ((1 - decay) * S.square()).sum() - 2 * (S @ k) @ (p.delta * x)
def mamba(S_prev, k, x, p): return torch.exp(p.delta[:, None] * p.A) * S_prev + outer(p.delta * x, k)


# HGRN2: the key is 1 - p.alpha; each column is a mean of what it was and of x
def hgrn2_loss(S, S_prev, k, x, p):
    return (p.alpha * (S - S_prev).square()).sum() + ((1 - p.alpha) * (S - x[:, None]).square()).sum()
def hgrn2(S_prev, k, x, p): return S_prev * p.alpha + outer(x, 1 - p.alpha)


# RWKV-4: no keys, S = num / den is (d,) and k (d,) the logarithm of x's weight: a weighted mean of the values
def rwkv4_loss(S, S_prev, k, x, p): return (p.z * (S - S_prev).square()).sum() + (k.exp() * (S - x).square()).sum()
def rwkv4(S_prev, k, x, p): return (p.z * S_prev + k.exp() * x) / (p.z + k.exp())


# What of the new value one step writes on an empty state, eps |k|^2: Longhorn sets it by the length of its keys
WRITES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 0.99)
FORGETS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4)
LENGTHS = tuple({"key": math.sqrt(2 * w / (1 - w))} for w in WRITES)  # with beta = 0.5


@dataclass
class Update:
    """A row: an objective, its update, and what is claimed of them.

    L, S: the two as formulas, S' for S_prev. source: who says that the update minimises the objective. holds: whether it
    does, as far as this file knows: another finding is an error. mixers: families of model.py that run it. tune: settings
    that the recall may choose from, each the fields of `p` as numbers, and 'key', the length of the keys; None: the recall
    leaves it out, because there is no key to ask with or it is another row's update.
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
    yours: bool = False


UPDATES = [
    Update("linear attention", "|S - S'|^2 - 2 <S k, x>", "S' + x k^T", linear_attention_loss, linear_attention,
           note="its loss of a pair, -2 <S k, x>, has no least value, so that a pair written again adds up"),
    Update("RetNet", "g |S - S'|^2 + (1 - g) |S|^2 - 2 <S k, x>", "g S' + x k^T", retnet_loss, retnet,
           mixers=("retnet", "rwkv"), tune=tuple({"gamma": 1 - f} for f in FORGETS),
           note="what holds the state is least at g S', not at S' as Eq. 4's divergence is; so with GLA, Griffin and Mamba"),
    Update("GLA, as printed", "|S - S' diag(a)|^2 + 2 <S k, x>", "S' diag(a) + x k^T", gla_loss_printed, gla, holds=False,
           tune=None, note="its + before the inner product makes it least at S' diag(a) - x k^T; with a minus, below, it holds"),
    Update("GLA", "|S - S' diag(a)|^2 - 2 <S k, x>", "S' diag(a) + x k^T", gla_loss, gla, "Table 4 but for the sign",
           mixers=("gla",), tune=tuple({"alpha": 1 - f} for f in FORGETS)),
    Update("Griffin", "|sqrt(a) (s - s')|^2 + |sqrt(1-a) s|^2 - 2 sum sqrt(1-a) s i x", "a s' + sqrt(1-a) i x", griffin_loss,
           griffin, elementwise=True, tune=None,
           note="holds with its last term, printed as a vector, summed; Griffin's own paper has sqrt(1 - a^2) for sqrt(1 - a)"),
    Update("Longhorn, Eq. 6", "|S - S'|^2 + |S k - x|^2_diag(b)", "S' + (e * (x - S' k)) k^T,  e = b / (1 + b |k|^2)",
           longhorn_loss, longhorn_exact, "Theorem 3.1", mixers=("longhorn_exact",), tune=LENGTHS),
    Update("Longhorn, Eq. 7", "|S - S'|^2 + |S k - x|^2_diag(b)", "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_loss, longhorn,
           holds=False, mixers=("longhorn",), tune=LENGTHS,
           note="Table 4 prints it beside Eq. 5, which Eq. 6 minimises; Eq. 7 does if S' = 0, N = 1 or k has one entry not 0"),
    Update("Longhorn, Eq. 7, its own", "sum_ij (1 + b_i (|k|^2 - k_j^2)) (S_ij - S'_ij)^2 + b_i (k_j S_ij - x_i)^2",
           "(1 - e (k*k)^T) * S' + (e * x) k^T", longhorn_own_loss, longhorn, "here", tune=None,
           note="what Eq. 7 minimises: each number of row i answers x_i alone, and the key's other entries hold it back"),
    Update("DeltaNet", "|S - S'|^2 + 2 b <S' k - x, S k>", "S' - b (S' k - x) k^T", deltanet_loss, deltanet,
           "here", mixers=("deltanet",), tune=tuple({"rate": w} for w in WRITES),
           note="a gradient step of b on |S k - x|^2 / 2 (Section 4), so it minimises that made linear; Eq. 6 with one b' is the "
                "step b = b' / (1 + b' |k|^2); I - b k k^T has no eigenvalue above 1, but 1 - b |k|^2, below -1 if b |k|^2 > 2"),
    Update("Mamba", "sum_ij a_ij (S_ij - S'_ij)^2 + (1 - a_ij) S_ij^2 - 2 <S k, D x>", "a * S' + (D x) k^T,  a = exp(D A)",
           mamba_loss, mamba, "here, for A.2", mixers=("mamba",),
           tune=tuple({"delta": w} for w in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3))),
    Update("HGRN2", "sum_ij f_j (S_ij - S'_ij)^2 + (1 - f_j) (S_ij - x_i)^2", "S' diag(f) + x (1 - f)^T", hgrn2_loss, hgrn2,
           "here, for A.5", tune=None),
    Update("RWKV-4", "sum z (s - s')^2 + e^k (s - x)^2,  z = e^-w z'", "(z s' + e^k x) / (z + e^k)", rwkv4_loss, rwkv4,
           "here, for A.4", elementwise=True, mixers=("rwkv4",), tune=None),
]
ROW = {row.name: row for row in UPDATES}


def settings(d, N, **given):
    """The `p` of objectives and updates: what mixers start with, keys of length 1 assumed, and what is given instead.

    beta and rate 0.5; gamma RetNet's first head's, alpha GLA's, delta and A Mamba's. Numbers are repeated over their shape.
    """
    shape = {"beta": (d,), "rate": (), "gamma": (), "alpha": (N,), "a": (d,), "i": (d,), "delta": (d,), "A": (d, N), "z": (d,)}
    rates = -torch.arange(1.0, N + 1, dtype=torch.float64)
    p = {"beta": 0.5, "rate": 0.5, "gamma": 1 - 2**-5, "alpha": 0.5 ** (1 / 16), "a": 0.9, "i": 0.5, "delta": 0.01, "A": rates,
         "z": 1.0} | given
    return SimpleNamespace(**{n: torch.as_tensor(v, dtype=torch.float64).expand(shape[n]).clone() for n, v in p.items()})


# --------------------------------------------------------------------------------------- the update against a minimiser

def draws(count, elementwise, seed):
    """`count` random (S_prev, k, x, p), the first third of ordinary size, the rest with extremes among them.

    Keys of length from 0.001 to 1000, gates and step sizes within 1e-6 of 0 and of 1, states of 0 and of 100.
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
        k = normal(d).clamp(-3, 3) * pick([1, 5]) if elementwise else torch.nn.functional.normalize(normal(N), dim=0) * size
        S = normal(d) if elementwise else normal(d, N)
        p = settings(d, N, beta=gate(d), rate=gate(), gamma=gate(), alpha=gate(N), a=gate(d), i=gate(d), delta=10 * gate(d),
                     A=-3 * gate(d, N), z=normal(d).exp())
        yield S * (pick([0.0, 1.0, 100.0]) if extreme else 1.0), k, normal(d) * (pick([1.0, 100.0]) if extreme else 1.0), p


def minimise(loss, start):
    """The S where `loss`, a function of S alone, is least, found from `start`: (S, smallest curvature, last step).

    SciPy's exact trust region with gradients and Hessians from autograd, then three plain Newton steps for the last digits,
    which a method that compares values of the loss cannot see. The curvature is the smallest eigenvalue of the Hessian there
    over the largest: not positive, and there is no one minimiser. The step is the last of Newton's, of the largest number:
    not small, and nothing was found. Of a loss that is not convex it is a minimum, not always the least.
    """
    from scipy.optimize import minimize

    f = lambda s: loss(s.view(start.shape))

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
    except (ValueError, np.linalg.LinAlgError):  # it ran off to where nothing is finite
        return start, -math.inf, math.inf
    low = curvature[0] / max(abs(curvature).max(), 1e-300)
    return torch.tensor(s).view(start.shape), float(low), float(abs(step).max() / max(abs(s).max(), 1e-300))


def check(row, count, seed):
    """How far `row`'s update is from the minimiser of its objective, over `count` draws.

    Returns {'off': the largest difference over all draws, of the largest number in either; 'off_ordinary': over those of
    ordinary size; 'smallest_curvature', 'largest_last_step': of `minimise`, over all draws; 'draws'; 'found': whether there
    was one minimum every time; 'minimises': whether the update was there}. Raises Mistake for an objective or update that
    does not return what it should.
    """
    offs, curvatures, steps = [], [], []
    for S_prev, k, x, p in draws(count, row.elementwise, seed):
        before, got = S_prev.clone(), answer(row, S_prev, k, x, p)
        if not got.isfinite().all():
            raise Mistake(f"{row.name}: update returned numbers that are not finite, for |k| = {k.norm():.3g} and a largest "
                          f"|S_prev| of {before.abs().max():.3g}: it must take keys of length 0.001 to 1000")
        if not torch.equal(before, S_prev):
            raise Mistake(f"{row.name}: update changed S_prev in place: make a new tensor")
        loss = checked_objective(row, S_prev, k, x, p)
        g = torch.Generator().manual_seed(seed + len(offs))  # a start that knows nothing of the update
        least, low, step = minimise(loss, torch.randn(S_prev.shape, generator=g, dtype=torch.float64))
        offs.append(((got - least).abs().max() / max(got.abs().max(), least.abs().max(), 1e-300)).item())
        curvatures.append(low)
        steps.append(step)
    found = min(curvatures) > 1e-13 and max(steps) <= HOLDS
    return {"off": max(offs), "off_ordinary": max(offs[:math.ceil(count / 3)]), "smallest_curvature": min(curvatures),
            "largest_last_step": max(steps), "draws": count, "found": found, "minimises": found and max(offs) <= HOLDS}


def answer(row, S_prev, k, x, p):
    """row.update's S; Mistake in a line where it raised, or where the result is not a float64 tensor like S_prev."""
    try:
        S = row.update(S_prev, k, x, p)
    except Exception as error:
        raise Mistake(f"{row.name}: update raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(S, torch.Tensor) or S.shape != S_prev.shape:
        raise Mistake(f"{row.name}: update returned {tuple(S.shape) if isinstance(S, torch.Tensor) else type(S).__name__}, not a "
                      f"tensor {tuple(S_prev.shape)}, S_prev's shape (d, N): return the whole new S")
    if S.dtype != torch.float64:
        raise Mistake(f"{row.name}: update returned {S.dtype}: keep to float64, which S_prev, k, x and p are")
    return S


def checked_objective(row, S_prev, k, x, p):
    """row.objective as a function of S alone, once called; Mistake in a line where it does not return a number that S moves."""
    S = (S_prev + 0.5).requires_grad_()
    try:
        value = row.objective(S, S_prev, k, x, p)
    except Exception as error:
        raise Mistake(f"{row.name}: objective raised {type(error).__name__}: {first_line(error)}") from error
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if shape != ():
        raise Mistake(f"{row.name}: objective returned {shape}, not one number (a tensor of shape ()): add its terms up")
    if not value.requires_grad:
        raise Mistake(f"{row.name}: objective does not depend on S: compute it from S with PyTorch's operations, without .item()")
    if not value.isfinite():
        raise Mistake(f"{row.name}: objective is {value.item()}, for |k| = {k.norm():.3g}: it must be finite for every S")
    return lambda S: row.objective(S, S_prev, k, x, p)


def first_line(error):
    return (str(error).strip().splitlines() or [""])[0]


# -------------------------------------------------------------------------------------------------------------- streams

def make_pairs(n, d, N, correlation, g):
    """n random pairs: keys (n, N) of length 1 whose expected cosine is about `correlation`, all sharing one random
    direction, and values (n, d), normal."""
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    unit = lambda a: torch.nn.functional.normalize(a, dim=-1)
    keys = math.sqrt(correlation) * unit(normal(N)) + math.sqrt(1 - correlation) * unit(normal(n, N))
    return unit(keys), normal(n, d)


def lost(read, values):
    """The share of the values that is not in what was read: sum (c read - value)^2 / sum value^2, whatever their shape.

    c is one number for all, the best: in the model a norm and a learned projection follow, which would find it.
    """
    read = read / read.abs().max().clamp(min=1e-300)  # its square is finite then
    return 1 - ((read * values).sum().square() / (read.square().sum() * values.square().sum()).clamp(min=1e-300)).item()


def recall(row, p, keys, values):
    """Over one stream: what is lost of all pairs and of the newest NEWEST, after each number of PAIRS: (2, len(PAIRS)),
    infinite from where the state is not finite."""
    S, shares = torch.zeros(values.shape[1], keys.shape[1], dtype=torch.float64), []
    for n, (k, x) in enumerate(zip(keys, values, strict=True), 1):
        S = answer(row, S, k, x, p)
        if n in PAIRS:
            read = keys[:n] @ S.T  # (n, d)
            shares.append([lost(read[-m:], values[:n][-m:]) if read.isfinite().all() else math.inf for m in (n, NEWEST)])
    return torch.tensor(shares, dtype=torch.float64).T


def recall_rows(rows, correlation, streams, seed, on_row=lambda: None):
    """What every update that has keys loses, as its mixer starts and at its best setting for each number of pairs.

    Returns a list of {'name'; 'start': share lost of all pairs, mean over streams, one for each of PAIRS; 'best': the same at
    the best setting for each, 'setting': which; 'newest', 'newest_setting': of the newest NEWEST pairs, at the best setting
    for them; all with '..._quartiles' over streams}. All updates see the same streams; a setting is chosen on those that it is
    judged by.
    """
    data = [make_pairs(max(PAIRS), D_STATE, N_STATE, correlation, torch.Generator().manual_seed(seed + s))
            for s in range(streams)]  # keys (n, N) and values (n, d) each
    found = []
    for row in rows:
        tried, shares = [{}, *row.tune], []
        for setting in tried:
            p = settings(D_STATE, N_STATE, **{n: v for n, v in setting.items() if n != "key"})
            shares.append(torch.stack([recall(row, p, keys * setting.get("key", 1.0), x) for keys, x in data]))
        shares = torch.stack(shares)  # (settings, streams, 2, len(PAIRS))
        chosen = shares.mean(1).argmin(0)  # (2, len(PAIRS))
        entry = {"name": row.name, "setting": [tried[i] for i in chosen[0]], "newest_setting": [tried[i] for i in chosen[1]]}
        for name, which, at in (("start", 0, torch.zeros_like(chosen[0])), ("best", 0, chosen[0]), ("newest", 1, chosen[1])):
            of = torch.stack([shares[s, :, which, i] for i, s in enumerate(at)])  # (len(PAIRS), streams)
            entry[name] = of.mean(1).tolist()
            entry[name + "_quartiles"] = of.quantile(torch.tensor([0.25, 0.75], dtype=of.dtype), 1).T.tolist()
        found.append(entry)
        on_row()
    return found


def least_squares_floor(n):
    """What no S (d, N) chosen with hindsight could beat on n random pairs: N of the n dimensions of a value row are reached."""
    return max(0.0, 1 - N_STATE / n)


def written_again(row, seed):
    """<S k, x> / |x|^2 after the same pair was written TIMES times, as the mixer starts, |k| = 1: a list."""
    (k,), (x,) = make_pairs(1, D_STATE, N_STATE, 0.0, torch.Generator().manual_seed(seed))
    S, p, reads = torch.zeros(D_STATE, N_STATE, dtype=torch.float64), settings(D_STATE, N_STATE), []
    for t in range(1, max(TIMES) + 1):
        S = row.update(S, k, x, p)
        if t in TIMES:
            reads.append(((S @ k) @ x / (x @ x)).item())
    return reads


def diagonal_cost(N, correlation, writes, streams, seed, d=8):
    """What Eq. 7 loses against Eq. 6, over the later half of streams of 8 N pairs (at least 64), beta = 0.5.

    The keys are as long as makes eps |k|^2 `writes`. S' is Eq. 7's own state, S6 the minimiser of Eq. 5 from there, S7 what
    Eq. 7 makes of it. Returns {'step_off': |S7 - S6| / |S6 - S'|, by root mean square; 'missed': of the decrease of Eq. 5
    that was to be had, L(S') - L(S6), the share that Eq. 7 leaves, summed over steps: 0 is the minimiser, 1 as good as no
    step, more is worse than none; 'apart': |S_7 - S_6| / |S_6| of the states that the two reach by themselves at the end}.
    """
    n, p, sums, apart = max(64, 8 * N), settings(d, N), torch.zeros(4, dtype=torch.float64), []
    for s in range(streams):
        keys, values = make_pairs(n, d, N, correlation, torch.Generator().manual_seed(seed + s))
        S7 = S6 = torch.zeros(d, N, dtype=torch.float64)
        for t, (k, x) in enumerate(zip(keys * math.sqrt(2 * writes / (1 - writes)), values, strict=True)):
            before, S7, S6 = S7, longhorn(S7, k, x, p), longhorn_exact(S6, k, x, p)
            if t >= n // 2:
                least = longhorn_exact(before, k, x, p)
                at = [longhorn_loss(S, before, k, x, p) for S in (S7, before, least)]
                sums += torch.stack([sq(S7 - least), sq(least - before), at[0] - at[2], at[1] - at[2]])
        apart.append((S7 - S6).norm() / S6.norm())
    off, step, left, there = sums
    return {"N": N, "correlation": correlation, "writes": writes, "step_off": (off / step).sqrt().item(),
            "missed": (left / there).item(), "apart": torch.stack(apart).mean().item()}


# ------------------------------------------------------------------------------------------------ the mixers that train
# How each family's mixer calls its kernel, as sequences of the updates above: (S before, S after, k (T, N), x (T, d),
# [p of each step], y (T, d), what of S and S_prev is y at step t).

def _scan_sequences(a, result):
    y, after = result
    step = a["dt"] + a["dt_bias"] if "dt" in a else a["delta"] + a["delta_bias"]  # (B, T, D)
    k, q, x = (a["k"], a["q"], a["x"]) if "dt" in a else (a["B"], a["C"], a["u"])
    for b in range(x.shape[0]):
        if "dt" in a:
            ps = [settings(x.shape[2], k.shape[2], beta=torch.sigmoid(s)) for s in step[b]]
        else:
            ps = [settings(x.shape[2], k.shape[2], delta=torch.nn.functional.softplus(s), A=a["A"]) for s in step[b]]
        read = lambda t, S, S_prev, b=b: (S @ q[b, t] + a["D"] * x[b, t]) * torch.nn.functional.silu(a["z"][b, t])
        yield a["h0"][b], after[b], k[b], x[b], ps, y[b], read


def _head_sequences(a, result):
    o, after = result
    B, T, H, K = a["k"].shape
    for b in range(B):
        for h in range(H):
            if "beta" in a:
                given = [{"rate": rate} for rate in a["beta"][b, :, h]]
            elif a["log_decay"].dim() == 1:
                given = [{"gamma": a["log_decay"][h].exp()}] * T
            else:
                given = [{"alpha": g.exp()} for g in a["log_decay"][b, :, h]]
            k, x, q, bonus = a["k"][b, :, h], a["v"][b, :, h], a["q"][b, :, h], a.get("bonus")

            def read(t, S, S_prev, k=k, x=x, q=q, u=None if bonus is None else bonus[h]):
                return (S if u is None else S_prev + u * outer(x[t], k[t])) @ q[t]

            yield (a["state"][b, h].T, after[b, h].T, k, x, [settings(x.shape[1], K, **g) for g in given], o[b, :, h], read)


def _wkv4_sequences(a, result):
    o, (num, den, _) = result
    start_num, start_den, top = a["state"]
    for b in range(o.shape[0]):
        z, ps = start_den[b] * top[b].exp(), []
        for k in a["k"][b]:
            ps.append(settings(z.numel(), 1, z=z * (-a["decay"]).exp()))
            z = ps[-1].z + k.exp()
        seen = [a["decay"].exp() * p.z for p in ps]  # before the decay: what the output's mean weighs the state by

        def read(t, S, S_prev, b=b, seen=seen):
            new = (a["bonus"] + a["k"][b, t]).exp()
            return (seen[t] * S_prev + new * a["v"][b, t]) / (seen[t] + new)

        yield start_num[b] / start_den[b], num[b] / den[b], a["k"][b], a["v"][b], ps, o[b], read


KERNEL_OF = {"longhorn": (model, "longhorn_scan", _scan_sequences), "longhorn_exact": (model, "longhorn_scan", _scan_sequences),
             "mamba": (model, "selective_scan", _scan_sequences), "gla": (model, "gated_linear_attention", _head_sequences),
             "retnet": (model, "retention", _head_sequences), "rwkv": (model, "retention", _head_sequences),
             "deltanet": (mixers, "delta_rule", _head_sequences), "rwkv4": (mixers, "wkv4", _wkv4_sequences)}


@torch.no_grad()
def kernel_call(family, kernel="", seed=0, T=12):
    """What `family`'s mixer, with random weights, from a state that has seen T tokens, gives its kernel for T more, and gets.

    `kernel` is the setting of that name: torch, or empty for the best that runs here. Returns
    ({argument: tensor}, result), all float64. Raises RuntimeError where the mixer does not call it once.
    """
    module, name, _ = KERNEL_OF[family]
    op, calls = getattr(module, name), []

    def spy(*args, **given):
        result = op(*args, **given)
        calls.append((inspect.signature(op).bind(*args, **given).arguments, result))
        return result

    config = model.ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, d_state=8, vocab_size=64, kernel=kernel)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        branch = model.LM(config).branches[0].branch
        for weight in branch.parameters():
            weight.normal_(0.0, 0.5)  # the initial weights would leave every gate near its middle
        _, state = branch(torch.randn(2, T, 32), branch.initial_state(2, "cpu"))
        with mock.patch.object(module, name, spy):
            branch(torch.randn(2, T, 32), state)
    if len(calls) != 1:
        raise RuntimeError(f"{family}: its mixer called {name} {len(calls)} times, not once: KERNEL_OF says what is compared")

    def wide(a):
        return a.double() if isinstance(a, torch.Tensor) else tuple(map(wide, a)) if isinstance(a, tuple) else a

    return {n: wide(a) for n, a in calls[0][0].items() if a is not None}, wide(calls[0][1])


def mixer_off(family, update, kernel=""):
    """Relative difference, by the 2-norm, of outputs and last states between `family`'s mixer and `update` step by step."""
    got, true = [], []
    for S, after, k, x, ps, y, read in KERNEL_OF[family][2](*kernel_call(family, kernel)):
        for t in range(len(ps)):
            S_prev, S = S, update(S, k[t], x[t], ps[t])
            got.append(y[t].flatten())
            true.append(read(t, S, S_prev).flatten())
        got.append(after.flatten())
        true.append(S.flatten())
    got, true = torch.cat(got), torch.cat(true)
    return ((got - true).norm() / true.norm()).item()


# ---------------------------------------------------------------------------------------------------------- your update

def read_update(path):
    """The row that a user's file describes: objective(S, S_prev, k, x, p), update(S_prev, k, x, p); name, note, L, S and
    tune as it likes. Raises Mistake in one line."""
    path = Path(path)
    if not path.is_file():
        raise Mistake(f"--add={path}: there is no such file")
    try:
        found = runpy.run_path(str(path))
    except SyntaxError as error:
        raise Mistake(f"--add={path}: line {error.lineno}: {error.msg}") from error
    except Exception as error:
        raise Mistake(f"--add={path}: running it raised {type(error).__name__}: {first_line(error)}") from error
    for name, wanted in (("objective", "S, S_prev, k, x, p"), ("update", "S_prev, k, x, p")):
        if not callable(found.get(name)):
            raise Mistake(f"--add={path}: defines no function {name}({wanted})")
    name, tune = str(found.get("name", path.stem)), found.get("tune", LENGTHS)
    if name in ROW:
        raise Mistake(f"--add={path}: there is a row named {name!r} already: give yours another name = \"...\"")
    known, fits = ["key", *vars(settings(1, 1))], isinstance(tune, (list, tuple)) and all(isinstance(t, dict) for t in tune)
    if not fits or any(n not in known or not isinstance(v, (int, float)) for t in tune for n, v in t.items()):
        raise Mistake(f"--add={path}: tune must be a list of settings such as [{{'beta': 0.9, 'key': 2.0}}], of numbers for "
                      f"{', '.join(known)}")
    return Update(name, str(found.get("L", "objective in " + path.name)), str(found.get("S", "update in " + path.name)),
                  found["objective"], found["update"], "you", note=str(found.get("note", "")), tune=tuple(tune), yours=True)


# --------------------------------------------------------------------------------------------------------------- output

def table(head, rows):
    """Lines of a Markdown table whose columns are aligned, so that a terminal shows it as well."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    line = lambda row: "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
    return [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)]


def wrapped(text, indent=""):
    return textwrap.wrap(" ".join(text.split()), 125, subsequent_indent=indent)


def verdict(found):
    if found["minimises"]:
        return "yes"
    if found["found"]:
        return "NO"
    return "NO: there is no one minimum" if found["smallest_curvature"] <= 1e-13 else "not known: no minimum was found"


def report(record, rows):
    """The record as Markdown that reads as well in a terminal: list of lines."""
    lines = ["Objectives and updates (S' the state before; g, a, f gates, b step sizes, D Mamba's; * elementwise):", ""]
    width = max(len(row.name) for row in rows)
    for row in rows:
        lines += [f"    {row.name:{width}}  L = {row.L}", f"    {'':{width}}  S = {row.S}"]
    lines += ["", *wrapped(f"""Does the update minimise its objective? {record['draws']} random draws each, in float64. off: the
        largest difference from a numerical minimiser, of the largest number in either, for draws of ordinary size and for all;
        yes: at most {HOLDS:g}. Beside it how far the mixers that train are off the update, in float32."""), ""]
    cells = []
    for row, found in zip(rows, record["checks"], strict=True):
        trained = ", ".join(f"{family} {off:.0e}" for family, off in found["mixers"].items()) or "-"
        cells.append([row.name, row.source, verdict(found), f"{found['off_ordinary']:.0e}", f"{found['off']:.0e}", trained])
    lines += table(["family", "claimed by", "minimises it?", "off", "with extremes", "mixers of model.py"], cells)
    lines += ["", *(line for row in rows if row.note for line in wrapped(f"- {row.name}: {row.note}.", "  ")), ""]
    wide = max(high - low for rows in record["recall"].values() for r in rows for name in ("start", "best", "newest")
               for low, high in r[name + "_quartiles"] if math.isfinite(high - low))
    lines += [*wrapped(f"""Recall without training. Random pairs are written to {D_STATE} x {N_STATE} numbers one after another:
        the share of their values that is lost when keys are asked again, after one gain for all (0: perfect, 1: nothing left).
        Means over {record['streams']} streams, whose quartiles are at most {wide:.2f} apart."""), ""]
    shown = [PAIRS.index(n) for n in (4, 8, 16, 32, 64, 128)]
    for title, key, which, _ in PANELS:
        cells = [[r["name"], *(f"{r[which][i]:.3f}" for i in shown)] for r in record["recall"][key]]
        if which != "newest":
            cells.append(["least squares with hindsight", *(f"{least_squares_floor(PAIRS[i]):.3f}" for i in shown)])
        lines += [f"{title[0].upper()}{title[1:]}:", "", *table(["update", *(f"n = {PAIRS[i]}" for i in shown)], cells), ""]
    lines += [f"One pair written again and again, read back as a multiple of its value (as the mixers start, N = {N_STATE}):", ""]
    cells = [[name, *(f"{r:.3g}" for r in reads[::2])] for name, reads in record["written_again"].items()]
    lines += [*table(["update", "once", *(f"{t} times" for t in TIMES[2::2])], cells), ""]
    lines += [*wrapped("""What the diagonal costs, over streams of 8 N pairs, by N, by what a step writes and by the cosine of two
        keys. In each cell, from Eq. 7's own state: the share of the decrease of Eq. 5 that its step misses (0: the minimiser,
        1: as good as no step) / how far it ends from the minimiser, over the minimiser's step / and how far from Eq. 6's state,
        left to itself, as a multiple of that:"""), ""]
    by_cosine = {}
    for c in record["diagonal"]:
        at = by_cosine.setdefault((c["N"], c["writes"]), {})
        at[c["correlation"]] = " / ".join(f"{abs(c[n]):.2f}" for n in ("missed", "step_off", "apart"))
    cells = [[str(N), f"{writes:.2f}", *at.values()] for (N, writes), at in by_cosine.items()]
    return lines + table(["N", "eps k^2", *(f"cosine {c:g}" for c in next(iter(by_cosine.values())))], cells)


# title, which keys, which column of recall_rows, a title as short as a picture's
PANELS = (("all n pairs, independent keys of length 1, every gate and step as its mixer starts", "independent", "start",
           "all pairs, as the mixers start"),
          ("all n pairs, independent keys, each update at its best constant setting for that n", "independent", "best",
           "all pairs, each at its best constant setting"),
          (f"all n pairs, keys with a cosine of about {CORRELATED:g}, each update at its best setting", "correlated", "best",
           f"the same, keys with a cosine of {CORRELATED:g}"),
          (f"the newest {NEWEST} of n pairs, independent keys, each update at its best setting for these", "independent",
           "newest", f"the newest {NEWEST} pairs, each at its best setting for these"))
COLORS = {"linear attention": "tab:gray", "RetNet": "tab:brown", "GLA": "tab:orange", "Longhorn, Eq. 6": "tab:blue",
          "Longhorn, Eq. 7": "tab:red", "DeltaNet": "tab:green", "Mamba": "tab:purple"}


def draw(record, path):
    """The picture of the record: recall by the number of pairs, a pair written again, what the diagonal costs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [r["name"] for r in record["recall"]["independent"]]
    yours = [n for n in names if n not in COLORS]
    # DeltaNet and GLA lie on Eq. 6 and RetNet where settings are chosen: dashed, so that both are seen
    style = {n: dict(color=COLORS.get(n, ("black", "magenta", "teal")[yours.index(n) % 3] if n in yours else None), label=n,
                     lw=2.4 if n in yours or "Eq. 6" in n or n == "RetNet" else 1.5,
                     ls=(0, (3, 2)) if n in ("DeltaNet", "GLA") else "-", zorder=3 if n in ("DeltaNet", "GLA") else 2)
             for n in names}
    figure, axes = plt.subplots(2, 3, figsize=(15, 8.4), dpi=110)
    *_, again, diagonal = axes.flat
    for panel, (_, key, which, title) in zip(axes.flat, PANELS, strict=False):
        for r in record["recall"][key]:
            panel.plot(PAIRS, [v if math.isfinite(v) else math.nan for v in r[which]], **style[r["name"]])
        if which != "newest":
            panel.plot(PAIRS, [least_squares_floor(n) for n in PAIRS], color="black", ls=":", lw=1)
            panel.text(23, 0.12, "least squares\nwith hindsight", fontsize=8)
        panel.axvline(N_STATE, color="black", lw=0.5)
        panel.set(xscale="log", xlabel=f"pairs written (line: N = {N_STATE})", ylabel="share of their values that is lost",
                  title=title, ylim=(-0.02, 1.02))
        panel.set_xticks([1, 2, 4, 8, 16, 32, 64, 128], [1, 2, 4, 8, 16, 32, 64, 128])
        panel.minorticks_off()
    for name, reads in record["written_again"].items():
        again.plot(TIMES, reads, **style[name])
    for x, y, words in ((256, 1, "what was written"), (4, N_STATE, "N times that")):
        again.axhline(y, color="black", lw=0.5)
        again.text(x, y * 1.12, words, fontsize=8, ha="right")
    again.set(xscale="log", yscale="log", xlabel="times written", ylabel="read back, as a multiple of its value",
              title="one pair again and again, as the mixers start")
    for N, writes in sorted({(c["N"], c["writes"]) for c in record["diagonal"] if c["N"] > 1}):  # of N = 1 it is 0
        at = sorted((c["correlation"], c["missed"]) for c in record["diagonal"] if (c["N"], c["writes"]) == (N, writes))
        shade = plt.cm.viridis({4: 0.75, 16: 0.4, 64: 0.05}[N])
        diagonal.plot(*zip(*at, strict=True), "o-" if writes < 0.5 else "s--", ms=4, color=shade,
                      label=f"N = {N}, eps $|k|^2$ = {writes:.2f}")
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
    figure.savefig(path)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------- main

def measure(rows, draw_count, streams, seed):
    """Everything that the tables and the picture show, as a record."""
    from tqdm import tqdm

    asked = [row for row in rows if row.tune is not None]
    sizes = [(N, writes, c) for N in (1, 4, 16, 64) for writes in (1 / 3, 0.9) for c in (0.0, 0.25, 0.5, 0.75, 0.95)]
    record = {"draws": draw_count, "streams": streams, "seed": seed, "pairs": PAIRS, "state": [D_STATE, N_STATE], "checks": []}
    with tqdm(total=len(rows) + 2 * len(asked) + len(sizes), leave=False, disable=not sys.stderr.isatty()) as bar:
        for row in rows:
            found = check(row, draw_count, seed)
            found["mixers"] = {family: mixer_off(family, row.update) for family in row.mixers}
            record["checks"].append({"name": row.name, "claimed_by": row.source, "expected": row.holds, **found})
            bar.update()
        record["recall"] = {key: recall_rows(asked, correlation, streams, seed, bar.update)
                            for key, correlation in (("independent", 0.0), ("correlated", CORRELATED))}
        record["written_again"] = {row.name: written_again(row, seed) for row in asked}
        record["diagonal"] = []
        for N, writes, correlation in sizes:
            record["diagonal"].append(diagonal_cost(N, correlation, writes, 4 if N < 64 else 2, seed))
            bar.update()
    return record


def unexpected(record, rows):
    """What is not as this file says it is, one line each: it would mean that an update or a mixer was changed."""
    lines = []
    for row, found in zip(rows, record["checks"], strict=True):
        if found["minimises"] != row.holds and not row.yours:
            lines.append(f"{row.name}: the update {'is' if found['minimises'] else 'is not'} the minimiser (off by "
                         f"{found['off']:.1e}), against what this file says of it")
        lines += [f"{family}: the mixer of model.py is {off:.1e} off the update of {row.name}, more than {MIXER_HOLDS:g}"
                  for family, off in found["mixers"].items() if not off <= MIXER_HOLDS]  # NaN is not right
    return lines


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="append", default=[], metavar="FILE", help="a Python file with objective(S, S_prev, "
                        "k, x, p) and update(S_prev, k, x, p), and as you like name, note, L, S (the formulas) and tune "
                        "(settings of p for the recall); may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of draws and streams (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="12 draws instead of 48, 2 streams instead of 12")
    parser.add_argument("--out", help="write the record to this file, JSON, and .md and .png beside it")
    parser.add_argument("--save", action="store_true", help="write them to results/online_learning.json, .md and .png")
    args = parser.parse_args(argv)
    if args.seed < 0:
        parser.error(f"--seed={args.seed}: must be at least 0")
    if args.out and Path(args.out).suffix in (".md", ".png"):
        parser.error(f"--out={args.out}: that is made beside the record: choose {Path(args.out).with_suffix('.json')}")
    if args.save and args.add and not args.out:
        parser.error("--save with --add: results/ holds the families of this file only; choose a file with --out")
    return args


def main(argv=None):
    args, began = parse(argv), time.perf_counter()
    out = Path(args.out) if args.out else ROOT / "results" / "online_learning.json" if args.save else None
    refuse_uncommitted(out)
    torch.set_num_threads(1)  # the states are small: more threads would wait for one another
    try:
        rows = UPDATES + [read_update(path) for path in args.add]
        names = [row.name for row in rows]
        if len(set(names)) < len(names):
            raise Mistake(f"--add: {max(names, key=names.count)!r} is the name of two: give one another name = \"...\"")
        where, date = records.environment(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        head = f"{where['cpu']}, torch {where['torch']}, {date[:10]}, commit {(where['commit'] or 'none')[:10]}, seed {args.seed}"
        print(f"{head}\n")
        record = {"benchmark": "online_learning", "date": date, "environment": where} | measure(
            rows, *((12, 2) if args.quick else (48, 12)), args.seed)
    except Mistake as error:
        print(f"experiments/online_learning.py: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"experiments/online_learning.py: {error}: pip install -r requirements.txt", file=sys.stderr)
        return 2
    record["run_seconds"] = time.perf_counter() - began
    lines = report(record, rows)
    print("\n".join(lines) + f"\n\n{record['run_seconds']:.0f} seconds")
    wrong = unexpected(record, rows)
    for line in wrong:
        print(f"experiments/online_learning.py: {line}", file=sys.stderr)
    if out:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            records.write_json(out, finite(record))
            out.with_suffix(".md").write_text("\n".join([head, "", *lines]) + "\n")
            draw(record, out.with_suffix(".png"))
        except OSError as error:
            print(f"experiments/online_learning.py: {out} could not be written ({error.strerror}): choose another --out",
                  file=sys.stderr)
            return 2
        print(f"record: {out}, table: {out.with_suffix('.md')}, picture: {out.with_suffix('.png')}")
    return int(bool(wrong))


if __name__ == "__main__":
    with main_error("experiments/online_learning.py"):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("experiments/online_learning.py: interrupted; nothing written")
