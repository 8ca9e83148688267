import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from kernel_tables import tables  # noqa: E402


def test_the_committed_table_is_what_the_measurements_give() -> None:
    folder = ROOT / "results" / "bench"
    text = tables(folder)
    assert (folder / "kernels.md").read_text() == text
    for kernel in ("outer clamped", "products norms", "convolution norms", "weighted"):
        assert f"| {kernel} |" in text
