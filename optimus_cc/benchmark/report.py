"""What a benchmark found, as a table to print and, for links, as a file for the ``cluster`` group. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimus_cc.config.cluster import ClusterConfig, LinkConfig, as_file
from optimus_cc.config.schema import changed

Result = Mapping[str, Any]


def table(result: Result) -> str:
    """The result of any benchmark, for a person to read."""
    return {"cost": _cost_table, "links": _links_table, "codecs": _codecs_table}[result["benchmark"]](result)


def cluster_file(result: Result, name: str, cluster: ClusterConfig, remarks: Sequence[str]) -> str:
    """A file for the ``cluster`` group that says what was measured.

    Of several groups of one kind of link the one with most ranks speaks for it, and of those the slowest.

    Args:
        result: of ``benchmark=links``.
        cluster: how many nodes and ranks there are, and what is known of the links already.
        remarks: where the numbers come from; become comments.
    """
    links: dict[str, LinkConfig] = {}
    for kind, spans_nodes, known in (
        ("intra_node", False, cluster.intra_node),
        ("inter_node", True, cluster.inter_node),
    ):
        rings = _lines(result, "all_reduce", spans_nodes)
        pairs = _lines(result, "p2p", spans_nodes)
        links[kind] = LinkConfig(
            line_rate_gbit_s=known.line_rate_gbit_s,
            ring_gbit_s=_rounded(rings[0]["line"]["gbit_s"]) if rings else None,
            p2p_gbit_s=_rounded(pairs[0]["line"]["gbit_s"]) if pairs else None,
            latency_us=_latency_us(pairs, rings),
        )
    measured = changed(cluster, **links, calibration=None)
    return as_file(measured, name, [*remarks, *_links_table(result).splitlines()])


def _lines(result: Result, operation: str, spans_nodes: bool) -> list[Mapping[str, Any]]:
    """Groups, the one that speaks for its kind of link first."""
    found = [
        group for group in result["groups"] if group["operation"] == operation and group["spans_nodes"] == spans_nodes
    ]
    return sorted(found, key=lambda group: (-group["ranks"], group["line"]["gbit_s"] or 0.0))


def _latency_us(pairs: Sequence[Mapping[str, Any]], rings: Sequence[Mapping[str, Any]]) -> float | None:
    if pairs:
        return _rounded(pairs[0]["line"]["latency_s"] * 1e6)
    if rings:  # 2 (n - 1) messages, one after the other
        return _rounded(rings[0]["line"]["latency_s"] * 1e6 / (2 * (rings[0]["ranks"] - 1)))
    return None


def _rounded(value: float | None) -> float | None:
    """To four digits: no measurement is better."""
    return None if value is None else float(f"{value:.4g}")


def _cost_table(result: Result) -> str:
    rows = [["", "pairs", "plain (s)", "step time", "95 % interval", "processor time", "95 % interval"]]
    for row in result["techniques"]:
        cells = [row["technique"], str(row["ratio"]["samples"]), f"{row['plain_s']['value']:.4f}"]
        for ratio in (row["ratio"], row["processor_ratio"]):
            cells += [f"{ratio['value']:.4f}", _interval(ratio)]
        rows.append(cells)
    return _aligned(rows)


def _links_table(result: Result) -> str:
    rows = [["", "operation", "ranks", "latency (us)", "Gbit/s", "worst error of the fit"]]
    for group in result["groups"]:
        line = group["line"]
        rows.append(
            [
                group["group"],
                group["operation"],
                str(group["ranks"]),
                f"{line['latency_s'] * 1e6:.1f}",
                "-" if line["gbit_s"] is None else f"{line['gbit_s']:.3f}",
                f"{line['worst_error']:.0%}",
            ]
        )
    return _aligned(rows)


def _codecs_table(result: Result) -> str:
    rows = [["", "rank", "shape", "wire/logical", "encode (GB/s)", "decode (GB/s)", "encode/copy", "decode/copy"]]
    for row in result["codecs"]:
        rows.append(
            [
                row["codec"],
                str(row["rank"]),
                f"{row['rows']} x {row['columns']}",
                f"{row['wire_bytes'] / row['logical_bytes']:.3f}",
                f"{row['encode_gbyte_s']:.3f}",
                f"{row['decode_gbyte_s']:.3f}",
                f"{row['encode_per_copy']['value']:.1f}",
                f"{row['decode_per_copy']['value']:.1f}",
            ]
        )
    return "\n\n".join([_aligned(rows), _paths_table(result), _bases_table(result)])


def _paths_table(result: Result) -> str:
    rows = [["with an error memory", "rank", "shape", "products (s)", "step/products", "95 % interval"]]
    for row in result["memory_paths"]:
        ratio = row["per_products"]
        shape = f"{row['rows']} x {row['columns']}"
        cells = [row["path"], str(row["rank"]), shape, f"{row['products_s']:.3g}"]
        rows.append([*cells, f"{ratio['value']:.2f}", _interval(ratio)])
    return _aligned(rows)


def _bases_table(result: Result) -> str:
    rows = [["orthonormal basis", "rank", "rows", "seconds", "time/QR", "orthogonality", "norm without full rank"]]
    for row in result["bases"]:
        norm = row["norm_without_full_rank"]
        cells = [row["basis"], str(row["rank"]), str(row["rows"]), f"{row['seconds']:.3g}"]
        cells += [f"{row['per_qr']['value']:.2f}", f"{row['orthogonality']:.1e}"]
        rows.append([*cells, "not finite" if norm is None else f"{norm:.6f}"])
    return _aligned(rows)


def _interval(median: Mapping[str, Any]) -> str:
    return "too few pairs" if median["low"] is None else f"{median['low']:.4f} to {median['high']:.4f}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
