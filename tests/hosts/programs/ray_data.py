"""A small Ray Data pipeline: maps, filters, writes Parquet files into a shared folder and reads them again."""

from __future__ import annotations

import sys

import ray

ray.init()
ray.data.DataContext.get_current().enable_progress_bars = False
numbers = ray.data.range(1000, override_num_blocks=6)
numbers.map(lambda row: {"y": row["id"] * 2}).filter(lambda row: row["y"] % 3 == 0).write_parquet(sys.argv[1])
found = ray.data.read_parquet(sys.argv[1])
print("rows", found.count(), "sum", found.sum("y"))
