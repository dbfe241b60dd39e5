"""Orthonormal bases against float64 linear algebra, by both ways of making them; exact powers of two."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from optimus_cc.compression import LowRank, low_rank, powers_of_two
from optimus_cc.compression.power_iteration import cholesky_basis, orthonormal_basis, surely_finite, warm_query

Basis = Callable[[torch.Tensor], torch.Tensor]
BASES: dict[str, Basis] = {"cpu": orthonormal_basis, "gpu": cholesky_basis}
"""The one for GPUs runs on a CPU too."""


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _conditioned(rows: int, rank: int, condition: float, seed: int = 0) -> torch.Tensor:
    """Singular values from 1 down to 1 / condition, mixed over the columns."""
    left, right = torch.linalg.qr(_random(rows, rank, seed=seed))[0], torch.linalg.qr(_random(rank, rank, seed=1))[0]
    matrix: torch.Tensor = (left * torch.logspace(0, -math.log10(condition), rank, dtype=torch.float64)) @ right
    return matrix


def _outside(basis: torch.Tensor, left: torch.Tensor) -> float:
    """The share of ``left`` that is not in the span of the columns of ``basis``."""
    basis, left = basis.double(), left.double()
    return float((left - basis @ (basis.mT @ left)).norm() / left.norm())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
@pytest.mark.parametrize(("rows", "rank"), [(300, 1), (300, 16), (40, 40), (2000, 128)])
@pytest.mark.parametrize("name", BASES)
def test_a_basis_is_orthonormal_and_spans_its_input(
    name: str, rows: int, rank: int, condition: float, scale: float
) -> None:
    left = torch.stack([_conditioned(rows, rank, condition, seed) * scale for seed in (0, 1)]).float()
    basis = BASES[name](left)
    assert basis.dtype == torch.float32
    for p, a in zip(basis, left, strict=True):
        torch.testing.assert_close(p.double().mT @ p.double(), torch.eye(rank).double(), atol=5e-6, rtol=0)
        assert _outside(p, a) < 3e-6


@pytest.mark.parametrize("name", BASES)
def test_columns_of_very_different_size_are_equal_before_a_basis(name: str) -> None:
    left = (_random(200, 8) * torch.logspace(0, -25, 8)).float()[None]
    basis = BASES[name](left)[0]
    torch.testing.assert_close(basis.double().mT @ basis.double(), torch.eye(8).double(), atol=3e-6, rtol=0)
    for column in range(8):
        assert _outside(basis, left[0, :, column : column + 1]) < 1e-5


@pytest.mark.parametrize("name", BASES)
def test_what_has_no_full_rank_is_spanned_and_the_projection_never_grows(name: str) -> None:
    thin = _random(60, 2)
    twice = torch.cat([thin, thin], dim=1)
    hole = _random(60, 4)
    hole[:, 1] = 0
    one = torch.zeros(60, 4, dtype=torch.float64)
    one[:, 2] = thin[:, 0]
    mixed = thin @ _random(2, 4, seed=3)
    left = torch.stack([twice, hole, one, mixed, torch.zeros_like(one)]).float()
    basis = BASES[name](left)
    assert torch.isfinite(basis).all()
    for p, a in zip(basis, left, strict=True):
        assert float(torch.linalg.matrix_norm(p.double(), ord=2)) < 1 + 1e-5
        assert not a.any() or _outside(p, a) < 3e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", BASES)
def test_what_is_not_finite_gives_no_finite_projection_and_leaves_the_others_of_its_batch(
    name: str, bad: float
) -> None:
    left = _random(3, 50, 4).float()
    whole = BASES[name](left)
    for column in range(4):
        spoilt = left.clone()
        spoilt[1, 7, column] = bad
        basis = BASES[name](spoilt)
        assert not torch.isfinite(basis[1] @ basis[1].mT).any()
        assert torch.equal(basis[0], whole[0])
        assert torch.equal(basis[2], whole[2])


def test_a_message_through_the_basis_for_gpus_arrives_as_through_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the codec promises holds for both: exact at full rank, as good as the best approximation in the end."""
    matrices = {
        "full": (40, _random(60, 40).float()),
        "decaying": (20, (_conditioned(40, 20, 1e12)).float()),
        "thin": (4, (_random(60, 2) @ _random(2, 30)).float()),
        "zero": (4, torch.zeros(60, 30)),
        "truncated": (5, (_random(60, 40) * torch.logspace(0, -3, 40)).float()),
    }
    for name, (rank, matrix) in matrices.items():
        best = float(torch.linalg.svdvals(matrix.double())[rank:].norm())
        for basis in (orthonormal_basis, cholesky_basis):
            monkeypatch.setattr(low_rank, "orthonormal_basis", basis)
            codec = LowRank(rank)
            state = codec.new_state(("test",))
            for _ in range(40):
                error = float((matrix.double() - codec.decode(codec.encode(matrix, state)).double()).norm())
            assert error <= 1.001 * best + 1e-5 * float(matrix.norm()), (name, basis)


@pytest.mark.parametrize("scale", [1e-38, 1e-23, 1.0, 1e23, 1e37])
def test_a_query_has_unit_rows_at_any_scale(scale: float) -> None:
    first = torch.linalg.qr(_random(50, 4))[0].mT.float()
    factor = (_random(4, 50) * scale).float()
    factor[2] = 0
    factor[3] = math.nan
    query = warm_query(factor[None], first[None])[0].double()
    torch.testing.assert_close(query.norm(dim=1), torch.ones(4).double(), atol=1e-6, rtol=0)
    unit = factor[:2].double() / factor[:2].double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(query[:2], unit, atol=1e-6, rtol=1e-4)
    assert torch.equal(query[2:].float(), first[2:])


def test_products_that_are_called_finite_are() -> None:
    basis = torch.linalg.qr(_random(64, 16))[0].float()[None]
    for exponent in range(116, 129):
        factors = (torch.ones(1, 16, 8) * 2.0 ** (exponent - 1)) * 1.9
        finite = torch.isfinite(torch.bmm(basis, factors)).all() & torch.isfinite(factors).all()
        assert finite or not surely_finite(factors)
        assert surely_finite(factors) or exponent > 121


def test_powers_of_two_are_exact() -> None:
    for exponent in range(-126, 128):
        power = powers_of_two.power(torch.tensor([exponent], dtype=torch.int32))
        assert float(power) == 2.0**exponent
        for value in (1.0, 1.5, 1.9999):
            assert int(powers_of_two.exponent(power * value)) == exponent
    odd = torch.tensor([0.0, 1e-45, math.inf, math.nan])
    assert powers_of_two.exponent(odd).tolist() == [-127, -127, 128, 128]
