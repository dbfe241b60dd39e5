"""One step of power iteration on a batch of matrices, which messages (a batch of one) and gradients share.

With M of n x m and a query Q of r rows (r x m): P = orthonormal basis of M Qᵀ, then R = Pᵀ M; what the two factors
stand for is P R, the projection of M onto span(P), and M - P R is left out (Optimus-CC, section 4; PowerSGD, arXiv
1905.13727). Second factors and queries lie row by row: each of their r directions is contiguous, which the products
and norms on a CPU need to be fast. Nothing here waits for a GPU.
"""

from __future__ import annotations

import math

import torch

_CACHED_ELEMENTS = 2**16


def first_factor(matrices: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """M Qᵀ, k x n x r, of matrices k x n x m and queries k x r x m."""
    return torch.bmm(matrices, queries.mT)


def second_factor(matrices: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
    """Pᵀ M, k x r x m, of matrices k x n x m and bases k x n x r."""
    return torch.bmm(bases.mT, matrices)


def leave_out(
    matrices: torch.Tensor, bases: torch.Tensor, factors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """M - P R in one pass over the matrices; ``out`` may be ``matrices``."""
    if out is None:
        return torch.baddbmm(matrices, bases, factors, alpha=-1.0)
    return torch.baddbmm(matrices, bases, factors, alpha=-1.0, out=out)


def orthonormal_basis(left: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns, k x n x r, that span what the columns of ``left`` (k x n x r, fp32, r <= n) span.

    QR on a CPU, where it was faster than the alternatives at every shape and fails at nothing. On a GPU it factorises
    the matrices of a batch one after the other, column by column; there :func:`cholesky_basis`.
    """
    if left.device.type == "cpu":
        basis: torch.Tensor = torch.linalg.qr(left)[0]
        return basis
    return cholesky_basis(left)


def cholesky_basis(left: torch.Tensor) -> torch.Tensor:
    """Cholesky QR, twice, in double precision: products and small triangular solves, nothing that waits for the host.

    A Gram matrix squares the condition, so fp32 would fail from 4e3 on; in double precision two rounds reach all that
    fp32 can tell apart. A shift of the size of rounding (after Fukaya et al., arXiv 1809.11085) keeps a Gram matrix
    positive definite whatever its rank. A direction that is not there comes out as a column that is zero or shorter
    than one: P Pᵀ is still a contraction, and the next query of such a column starts afresh. A matrix that is not
    finite comes out as NaN.
    """
    rows, rank = left.shape[-2:]
    basis = left.double()
    norms = torch.linalg.vector_norm(basis, dim=-2, keepdim=True)
    basis = basis / norms.where(norms > 0, 1.0)
    shift = rank * (math.sqrt(rows) + rank) * torch.finfo(torch.float64).eps
    identity = torch.eye(rank, dtype=torch.float64, device=left.device)
    for _ in range(2):
        gram = torch.bmm(basis.mT, basis) + shift * identity
        lower = torch.linalg.cholesky_ex(gram)[0]  # cholesky itself would wait, to raise
        inverse = torch.linalg.solve_triangular(lower, identity.expand_as(gram), upper=False)
        basis = torch.bmm(basis, inverse.mT)
    finite = torch.isfinite(left.abs().amax(dim=(-2, -1), keepdim=True))
    return basis.float().where(finite, torch.nan)


def warm_query(previous: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """A query from the second factor before: scaled to unit rows; rows that vanished start afresh, from ``first``.

    Both are [..., rank, columns].
    """
    # In double precision: squares of fp32 reach neither its ends nor zero.
    norms = torch.linalg.vector_norm(previous, dim=-1, keepdim=True, dtype=torch.float64).float()
    usable = norms > torch.finfo(norms.dtype).tiny
    return torch.where(usable, previous / norms.where(usable, 1.0), first)


def surely_finite(factors: torch.Tensor) -> torch.Tensor:
    """k booleans: whether all of P R must be finite, told by R (k x r x m, fp32) alone. P has no entry above 2."""
    return torch.isfinite(factors.abs().amax(dim=(1, 2)) * (2.0 * factors.shape[1]))


def masked(factors: torch.Tensor, keep: torch.Tensor, value: float) -> torch.Tensor:
    """``factors`` (k x r x m), with ``value`` for all of those not in ``keep`` (k booleans)."""
    return torch.where(keep[:, None, None], factors, value)


def blocks(rows: int, columns: int, device: torch.device) -> list[slice]:
    """Rows that are worked on at once where a pass makes a temporary: on a CPU, as many as its cache holds of fp32."""
    size = rows if device.type != "cpu" else max(1, _CACHED_ELEMENTS // max(1, columns))
    return [slice(start, start + size) for start in range(0, rows, max(1, size))]


def clear_unless(keep: torch.Tensor, matrices: torch.Tensor) -> None:
    """Set those of ``matrices`` (k x ...) to zero that are not in ``keep`` (k booleans)."""
    keep = keep.view(-1, *(1 for _ in matrices.shape[1:]))
    # On a CPU a look costs less than another pass over the matrices; on a GPU it would wait.
    if keep.device.type != "cpu" or not keep.all():
        matrices.masked_fill_(~keep, 0.0)
