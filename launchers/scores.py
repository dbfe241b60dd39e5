"""Results of an evaluation as a person sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launchers.progress import number


def table(result: Mapping[str, Any]) -> str:
    """A result as lines for a person."""
    limit = f", the first {result['limit']} of each" if result.get("limit") else ""
    if result["kind"] == "perplexity":
        counts = result["items"]
        lines = [f"perplexity of {counts['documents']:,} documents, {counts['tokens']:,} tokens"]
        lines += [f"  {name:<18}{number(metric['value']):>10}" for name, metric in result["metrics"].items()]
        return "\n".join(lines)
    lines = [f"zero-shot, lm-eval {result['versions']['lm_eval']}{limit}"]
    for name, task in result["tasks"].items():
        for metric, values in task["metrics"].items():
            error = values["standard_error"]
            told = "" if error is None else f" ± {number(error)}"
            shots = f", {task['num_fewshot']}-shot" if task["num_fewshot"] else ""
            counted = "" if task["items"] is None else f"  {task['items']['evaluated']} items{shots}"
            lines.append(f"  {name:<18}{metric:<12}{number(values['value']):>8}{told:<12}{counted}")
    return "\n".join(lines)
