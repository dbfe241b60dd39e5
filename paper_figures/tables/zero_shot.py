"""Zero-shot accuracy."""

from __future__ import annotations

import pandas as pd

from paper_figures.data import Data
from paper_figures.item import Item, Missing, Query

QUERY = Query("laptop/table_zero_shot", ("baseline", "cb", "cb_fe", "cb_fe_sc"))
COMMAND = QUERY.command


def values(data: Data) -> pd.DataFrame:
    selection = data.select(QUERY)
    table = data.table("evaluation", selection.runs)
    table = table[(table["kind"] == "zero_shot") & (table["metric"] == "acc")]
    # The newest checkpoint, and of its results those over most items.
    table = table.sort_values(["step", "items"], kind="stable").drop_duplicates(["run", "task"], keep="last")
    if table.empty:
        raise Missing("zero-shot results of these runs (accuracy)", COMMAND)
    found = []
    for (task, technique), group in table.groupby(["task", "technique"], sort=True):
        found.append(
            {
                "kind": "measured",
                "task": task,
                "technique": technique,
                "accuracy_percent": 100 * group["value"].mean(),
                "standard_error_percent": 100 * group["standard_error"].mean(),
                "items": int(group["items"].max()) if group["items"].notna().any() else None,
                "seeds": group["seed"].nunique(),
            }
        )
    return pd.DataFrame(found)


ITEM = Item(
    title="Zero-shot accuracy",
    paper="On LAMBADA, PIQA, MathQA, WinoGrande and RACE, CB+FE leaves accuracy as it is, and CB+FE+SC loses "
    "fractions of a point.",
    caption="Accuracy in per cent, mean over seeds, with the standard error over items. Models as small as those "
    "that can be trained here score near chance: differences mean little.",
    needs=(QUERY,),
    values=values,
    columns=(
        ("kind", "value is"),
        ("task", "task"),
        ("technique", "technique"),
        ("accuracy_percent", "accuracy (%)"),
        ("standard_error_percent", "± standard error (%)"),
        ("items", "items"),
        ("seeds", "seeds"),
    ),
)
