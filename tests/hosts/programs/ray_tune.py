"""Ray Tune: a grid search of three trials: ``ray_tune.py FOLDER``."""

from __future__ import annotations

import sys

import ray
from ray import tune


def trial(config: dict[str, int]) -> None:
    tune.report({"score": (config["x"] - 3) ** 2})


ray.init()
results = tune.Tuner(
    trial,
    param_space={"x": tune.grid_search([1, 3, 4])},
    tune_config=tune.TuneConfig(metric="score", mode="min"),
    run_config=tune.RunConfig(name="grid", storage_path=sys.argv[1], verbose=0),
).fit()
print("trials", len(results), "best", results.get_best_result().config["x"])
