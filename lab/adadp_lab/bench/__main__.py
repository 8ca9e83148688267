"""`python -m adadp_lab.bench`: the same as `adadp bench`, without an installed command."""

from adadp.cli.commands import run_alone
from adadp_lab.bench.command import bench

run_alone(bench)
